"""Two simulated machines under torchrun with snapshots in memory: one is lost, and its replacement, whose
memory is empty, gets the state from the other one.

    pytest tests/cluster/test_partner_nodes.py -rs -m full

Skipped without root or namespaces.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.simulated_nodes import (
    ENVIRON,
    PORT,
    Node,
    OnNode,
    TwoNodes,
    torchrun,
    two_nodes,
    wait_for,
    wait_for_exit_codes,
)
from tests.launch.processes import TRAIN, RunningCommand, command
from tests.launch.tiny_runs import KEYS, STEPS, read_losses
from toolkit.goodput import read_times
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]
ON_DISK, IN_MEMORY, GATE_STEP = 3, 4, 5
SECONDS = 600  # for anything, on a busy machine
KEPT = (
    *(key for key in KEYS if not key.startswith("checkpoint.every")),
    "monitor.probe=false",
    "zero=stage2",
)
RUN = (
    *KEPT,
    f"checkpoint.every={ON_DISK}",
    f"checkpoint.memory_every={IN_MEMORY}",
    "+hooks.gate.target=tests.launch.gated_steps.GatedSteps",
)


def memory(node: Node) -> list[Path]:
    """The folders for snapshots on a node, as seen from outside."""
    return list(Path(f"/proc/{node.pid}/root/dev/shm").glob("dmt-*"))


def snapshot(node: Node) -> Path | None:
    found = [folder / f"step-{IN_MEMORY:08d}" for folder in memory(node)]
    return next((path for path in found if (path / "manifest.json").exists()), None)


def start(nodes: TwoNodes, number: int, name: str) -> OnNode:
    words = [*RUN, f"data.path={nodes.here / 'data'}", f"run.dir={nodes.shared / 'run'}"]
    # Otherwise the agents of torch 2.13 do not meet again after one of them was replaced.
    environ = {
        **ENVIRON,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GATE": str(nodes.shared / "gate"),
        "GATE_STEP": str(GATE_STEP),
    }
    argv = torchrun(nodes, number, PORT, str(TRAIN), *words, restarts=3)
    return nodes[number].start(argv, nodes.shared.parent / f"output-{name}.txt", environ)


@pytest.fixture(scope="module")
def one_node(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of two local ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("one")
    run = RunDirectory(folder / "run")
    argv = command("python", TRAIN, *KEPT, f"data.path={data}", f"run.dir={run.path}")
    with RunningCommand(argv, run.path, cwd=folder, environ=ENVIRON) as started:
        assert started.wait_for_exit(SECONDS) == 0, started.output
    return [loss for _, loss in read_losses(run.metrics_file)]


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "control: the copy is gone"])
def test_replaced_node_continues_from_the_memory_of_its_partner(
    copied: bool, data: Path, one_node: list[float], tmp_path: Path
) -> None:
    with two_nodes(tmp_path) as nodes:
        for node in nodes:
            node.run("cp", "-r", str(data), "data")
        run = RunDirectory(nodes.shared / "run")
        with start(nodes, 0, "first") as first, start(nodes, 1, "second") as second:

            def waits() -> bool:
                status = run.status()
                return (
                    status is not None
                    and status.step is not None
                    and all(snapshot(node) is not None for node in nodes)
                )

            wait_for(waits, SECONDS, "at the gate with snapshots", first, second)
            for process in nodes[1].processes():
                process.kill()
            nodes[1].run("sh", "-c", "rm -r /dev/shm/dmt-*")
            if not copied:
                kept = snapshot(nodes[0])
                assert kept is not None
                (kept / "part-00001.safetensors").unlink()
            (nodes.shared / "gate").touch()
            with start(nodes, 1, "third") as third:
                assert wait_for_exit_codes([first, third], SECONDS) == [0, 0], first.output + third.output
                for node in nodes:
                    assert memory(node) == []
            status = run.status()
            assert status is not None
            assert (status.state, status.step, status.attempt) == (RunState.DONE, STEPS, 2)
            times = read_times(run.attempt_folder(2))
            assert times is not None
            assert times.first == (IN_MEMORY if copied else ON_DISK), first.output
            found = read_losses(run.metrics_file)
            assert [step for step, _ in found] == list(range(1, STEPS + 1))
            assert [loss for _, loss in found] == one_node
