"""Two simulated machines with one shared folder train together through torchrun and deepspeed, and lose their
connection.

    pytest tests/cluster/test_nodes.py -rs             the simulated machines
    pytest tests/cluster/test_nodes.py -rs -m full     whole trainings

Skipped without root or namespaces.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster.simulated_nodes import (
    ENVIRON,
    PORT,
    OnNode,
    TwoNodes,
    deepspeed,
    torchrun,
    two_nodes,
    wait_for,
    wait_for_exit_codes,
)
from tests.launch.processes import TRAIN, RunningCommand, command
from tests.launch.tiny_runs import KEYS, STEPS, read_losses
from toolkit.restart_phases import read_restart
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

DRIVER = (
    Path(__file__).resolve().parents[1] / "launch" / "hung_training.py"
)  # launch/train.py, unless a test needs another script
HANG_SECONDS = 8
# After the hang timeout: collecting stacks and messages of other ranks, and closing sinks: 30 s at most
# (EXIT_SECONDS of observe/watchdog.py).
REPORT_SECONDS = 35
# torchrun's agent without its store waits until the kernel gives up the connection: a quarter of an hour with
# Linux' default of 15 retries, about 15 s with these, possibly twice (read_timeout of its c10d rendezvous).
TRIES, STORE_SECONDS = 5, 15 + 60
SLOW = {"FAULT": "slow:ALL:1"}  # slow steps, so that the test can act between two of them
RUN = (
    *KEYS,
    "zero=stage2",
    "monitor.probe=false",
    f"monitor.hang_seconds={HANG_SECONDS}",
    "cluster.grace_seconds=5",
)
LISTEN = (
    "import socket; s = socket.create_server(('10.213.0.1', 7)); s.settimeout(20); "
    "[s.accept()[0].close() for _ in range(2)]"
)
CALL = "import socket; socket.create_connection(('10.213.0.1', 7), timeout=1).close()"
SUM = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
rank = int(sys.argv[1])
store = dist.TCPStore("10.213.0.1", 29400, 2, rank == 0, timedelta(seconds=20))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
one = torch.tensor(rank + 1)
dist.all_reduce(one)
print("the sum is", int(one))
dist.destroy_process_group()
"""


@contextmanager
def run_on_both(
    nodes: TwoNodes,
    launcher: str,
    script: Path,
    *words: str,
    environ: Mapping[str, str] | None = None,
    restarts: int = 0,
) -> Iterator[list[OnNode]]:
    """Run the same command on both nodes."""
    with ExitStack() as stack:
        found = []
        for node in nodes:
            argv = (
                torchrun(nodes, node.number, PORT, str(script), *words, restarts=restarts)
                if launcher == "torchrun"
                else deepspeed(nodes, node.number, PORT, str(script), *words)
            )
            output = nodes.shared.parent / f"output-{node.number}.txt"
            found.append(stack.enter_context(node.start(argv, output, {**ENVIRON, **(environ or {})})))
        yield found


def words(nodes: TwoNodes) -> list[str]:
    return [*RUN, f"data.path={nodes.here / 'data'}", f"run.dir={nodes.shared / 'run'}"]


def copy_data(nodes: TwoNodes, data: Path) -> None:
    """Copy the same data to each node's own disk."""
    for node in nodes:
        node.run("cp", "-r", str(data), "data")


def check_done(run: RunDirectory, attempt: int) -> None:
    status = run.status()
    assert status is not None
    assert (status.state, status.exit_code, status.attempt, status.step) == (RunState.DONE, 0, attempt, STEPS)
    assert run.attempts() == list(range(1, attempt + 1)), "a start of both nodes is one attempt"


def has_trained(run: RunDirectory, steps: int) -> bool:
    return run.metrics_file.exists() and run.metrics_file.read_text().count("\n") >= steps


def losses(run: RunDirectory) -> list[float]:
    found = read_losses(run.metrics_file)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    return [loss for _, loss in found]


@pytest.fixture(scope="module")
def one_node(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of two local ranks, started by the supervisor."""
    folder = tmp_path_factory.mktemp("one")
    run = RunDirectory(folder / "run")
    argv = command("python", TRAIN, *RUN, f"data.path={data}", f"run.dir={run.path}")
    with RunningCommand(argv, run.path, cwd=folder, environ=ENVIRON) as started:
        assert started.wait_for_exit(150) == 0, started.output
    found = losses(run)
    assert found[0] - found[-1] > 0.3, "otherwise a run that restarted or skipped a step could pass"
    return found


def test_simulated_nodes_are_isolated(tmp_path: Path) -> None:
    """A node's files are its own, except in the shared folder; the nodes reach each other only while
    connected.
    """
    with two_nodes(tmp_path) as nodes:
        names = [node.run("hostname").strip() for node in nodes]
        assert names == ["node0", "node1"]
        nodes[0].run("touch", "mine", str(nodes.shared / "ours"))
        assert nodes[1].run("ls", str(nodes.here)) == ""
        assert nodes[1].run("ls", str(nodes.shared)) == "ours\n"
        assert not list(nodes.here.iterdir()), "and it is not visible outside"
        with pytest.raises(OSError, match="Read-only"):
            nodes[1].run("touch", str(nodes.here.parent / "elsewhere"))
        with nodes[0].start([sys.executable, "-c", LISTEN], tmp_path / "listen.txt") as listening:
            wait_for(lambda: reached(nodes), 10, "reached", listening)
            nodes.cable(up=False)
            assert not reached(nodes)
            nodes.cable(up=True)
            wait_for(lambda: reached(nodes), 10, "reached again", listening)
        first = nodes[0]
        wait_for(lambda: first.processes() == [], 10, "rid of its processes")
    assert first._first.returncode is not None


def reached(nodes: TwoNodes) -> bool:
    try:
        nodes[1].run(sys.executable, "-c", CALL)
    except OSError:
        return False
    return True


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_nodes_match_single_node_losses(
    launcher: str, data: Path, one_node: list[float], tmp_path: Path
) -> None:
    """Names do not resolve and there is no shared handover file: the first node publishes the spec, and gloo
    uses the cable.
    """
    with two_nodes(tmp_path) as nodes:
        copy_data(nodes, data)
        run = RunDirectory(nodes.shared / "run")
        with run_on_both(nodes, launcher, TRAIN, *words(nodes)) as commands:
            assert wait_for_exit_codes(commands, 200) == [0, 0], commands[0].output + commands[1].output
            assert "attempt 1: 2 ranks on cpu" in commands[0].output
            assert "attempt 1" not in commands[1].output
        world = json.loads(run.plan_file.read_text())["world"]
        assert (world["ranks"], world["ranks_per_node"]) == (2, 1)
        check_done(run, attempt=1)
        assert losses(run) == pytest.approx(one_node, abs=1e-6)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "restarts"), [("deepspeed", 0), ("torchrun", 2)])
def test_lost_connection_ends_both_nodes_and_run_resumes(
    launcher: str, restarts: int, data: Path, one_node: list[float], tmp_path: Path
) -> None:
    """Nodes are not notified of a lost connection; each side times out. torchrun restarts the ranks if it
    may; otherwise the same command resumes.
    """
    with two_nodes(tmp_path) as nodes:
        copy_data(nodes, data)
        if launcher == "torchrun" and restarts == 0:
            for node in nodes:
                node.run("sh", "-c", f"echo {TRIES} > /proc/sys/net/ipv4/tcp_retries2")
        run = RunDirectory(nodes.shared / "run")
        with run_on_both(nodes, launcher, DRIVER, *words(nodes), environ=SLOW, restarts=restarts) as commands:
            wait_for(lambda: has_trained(run, 3), 120, "training", *commands)
            first = [rank.pid for node in nodes for rank in node.ranks().values()]
            nodes.cable(up=False)
            began = time.monotonic()

            def gone() -> bool:
                return not {rank.pid for node in nodes for rank in node.ranks().values()} & set(first)

            wait_for(gone, HANG_SECONDS + REPORT_SECONDS, "without ranks", *commands)
            status = run.status()
            assert status is not None
            assert (status.state, status.exit_code) == (RunState.FAILED, 1)
            assert status.reason is not None
            assert status.reason.startswith("hang: ")
            assert run.hang_file(1).exists()
            if restarts == 0:
                codes = wait_for_exit_codes(
                    commands, HANG_SECONDS + REPORT_SECONDS + (STORE_SECONDS if launcher == "torchrun" else 5)
                )
                assert 0 not in codes
            print(f"{launcher}: ranks and commands were gone after {time.monotonic() - began:.1f} s")
            nodes.cable(up=True)
            if restarts:
                assert wait_for_exit_codes(commands, 200) == [0, 0], commands[0].output + commands[1].output
        if restarts == 0:
            with run_on_both(nodes, launcher, DRIVER, *words(nodes)) as commands:
                assert wait_for_exit_codes(commands, 200) == [0, 0], commands[0].output + commands[1].output
        check_done(run, attempt=2)
        assert losses(run) == pytest.approx(one_node, abs=1e-6)


@pytest.mark.full
@pytest.mark.timeout(500)
def test_torchrun_restarts_both_nodes_after_a_killed_rank(
    data: Path, one_node: list[float], tmp_path: Path
) -> None:
    """Ranks of both nodes are killed in turn. The agents' restart counts then differ and their store is
    reused; the ranks still connect.
    """
    with two_nodes(tmp_path) as nodes:
        copy_data(nodes, data)
        run = RunDirectory(nodes.shared / "run")
        with run_on_both(nodes, "torchrun", DRIVER, *words(nodes), environ=SLOW, restarts=2) as commands:
            wait_for(lambda: has_trained(run, 3), 120, "training", *commands)
            nodes[1].ranks()[1].send_signal(signal.SIGKILL)

            def on() -> bool:
                status = run.status()
                return (
                    status is not None
                    and (status.state, status.attempt) == (RunState.RUNNING, 2)
                    and (status.step or 0) >= 3
                )

            wait_for(on, 120, "training again", *commands)
            nodes[0].ranks()[0].send_signal(signal.SIGKILL)
            assert wait_for_exit_codes(commands, 200) == [0, 0], commands[0].output + commands[1].output
        check_done(run, attempt=3)
        assert losses(run) == pytest.approx(one_node, abs=1e-6)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_torchrun_restarts_both_nodes_in_standbys(data: Path, one_node: list[float], tmp_path: Path) -> None:
    """Both nodes have a standby, since the one whose rank lives ends it as well."""
    gate = "+hooks.gate.target=tests.launch.gated_steps.GatedSteps"
    with two_nodes(tmp_path) as nodes:
        copy_data(nodes, data)
        run, opened = RunDirectory(nodes.shared / "run"), nodes.shared / "gate"
        keys = [*words(nodes), "monitor.hang_seconds=600", "cluster.standbys=1", gate]
        environ = {"GATE": str(opened), "GATE_STEP": "3"}
        with run_on_both(nodes, "torchrun", TRAIN, *keys, environ=environ, restarts=1) as commands:

            def named(number: int, name: str) -> bool:
                return name in nodes[number].names()

            wait_for(
                lambda: all(named(number, "standby-0") for number in range(2)) and run.saved_step() == 2,
                300,
                "ready",
                *commands,
            )
            for process in nodes[1].processes():
                if process.environ().get("RANK") == "1" and not process.name().startswith("standby"):
                    process.send_signal(signal.SIGKILL)
            opened.touch()
            wait_for(lambda: all(named(number, f"relay-{number}") for number in range(2)), 120, "relayed")
            assert wait_for_exit_codes(commands, 300) == [0, 0], commands[0].output + commands[1].output
            wait_for(lambda: not any(node.processes() for node in nodes), 60, "without orphans")
        check_done(run, attempt=2)
        assert losses(run) == pytest.approx(one_node, abs=1e-6)
        restart = read_restart(run.attempt_folder(2))
        assert restart is not None
        assert (restart.ranks, restart.standbys) == (1, 1)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_each_node_prepares_its_own_data(tmp_path: Path) -> None:
    """Megatron-LM#907, #795: an index built only by rank 0 is missing on other machines."""
    with two_nodes(tmp_path) as nodes:
        keys = [key for key in RUN if not key.startswith(("data=", "train.steps"))]
        run = RunDirectory(nodes.shared / "run")
        with run_on_both(
            nodes,
            "torchrun",
            TRAIN,
            *keys,
            "train.steps=2",
            "data=stdlib",
            "data.vocab_size=264",
            "data.path=made",
            f"run.dir={run.path}",
        ) as commands:
            assert wait_for_exit_codes(commands, 300) == [0, 0], commands[0].output + commands[1].output
            made = [
                node.run("find", "made", "-name", "manifest.json", "-exec", "cat", "{}", "+")
                for node in nodes
            ]
        assert made[0] == made[1] != ""
        assert sorted(entry.name for entry in nodes.shared.iterdir()) == ["run"]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_missing_data_on_one_node_is_reported_once(data: Path, tmp_path: Path) -> None:
    with two_nodes(tmp_path) as nodes:
        nodes[0].run("cp", "-r", str(data), "data")
        run = RunDirectory(nodes.shared / "run")
        with run_on_both(nodes, "deepspeed", TRAIN, *words(nodes)) as commands:
            assert wait_for_exit_codes(commands, 120) == [2, 2], commands[0].output + commands[1].output
            assert "rank 1: " in commands[1].output
            assert commands[0].output.count("remedy:") + commands[1].output.count("remedy:") == 1
        status = run.status()
        assert status is not None
        assert (status.state, status.exit_code) == (RunState.REFUSED, 2)


@pytest.mark.full
@pytest.mark.parametrize(("interface", "sums"), [("wire", True), ("lo", False)])
def test_control_gloo_needs_the_right_interface(interface: str, sums: bool, tmp_path: Path) -> None:
    """The reason for choosing the interface: with gloo on loopback, the other node never connects."""
    with two_nodes(tmp_path) as nodes, ExitStack() as stack:
        commands = [
            stack.enter_context(
                node.start(
                    [sys.executable, "-c", SUM, str(node.number)],
                    tmp_path / f"output-{node.number}.txt",
                    {"GLOO_SOCKET_IFNAME": interface},
                )
            )
            for node in nodes
        ]
        wait_for(
            lambda: (all if sums else any)(item.code() is not None for item in commands),
            60,
            "ended",
            *commands,
        )
        codes = [item.code() for item in commands]
        assert codes == [0, 0] if sums else 1 in codes, commands[0].output + commands[1].output
        assert all(("the sum is 3" in item.output) is sums for item in commands)
