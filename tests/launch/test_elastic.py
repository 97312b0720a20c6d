"""torchrun with a range of nodes: a run loses a node, continues without it, and continues with it when it
returns; it continues without a node that computes wrong values; it ends when it is asked to stop.

    pytest tests/launch/test_elastic.py -m full -s
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.metadata_server import Metadata, preemption_answers
from tests.launch.processes import BIN, ROOT, RunningCommand, read_status, send_signal
from tests.launch.tiny_runs import read_losses
from toolkit.checkpoint_folder import committed_checkpoints
from toolkit.config.compose import compose
from toolkit.estimate.plan_report import to_json
from toolkit.goodput import AttemptTimes, read_times
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.snapshot_folder import remove_abandoned_folders, snapshot_root
from toolkit.rundir.status import RunState
from toolkit.testing.dist import find_free_port
from toolkit.train.departure import decide_departure, read_departures
from toolkit.train.run import run

STEPS = 60
SAVE_EVERY = 10
KEYS = (
    "model=gpt2",
    "model.vocab_size=264",
    "model.max_position_embeddings=32",
    "data=prepared",
    "train.sequence_length=32",
    "train.global_batch=16",
    f"train.steps={STEPS}",
    "optim.lr=1e-3",
    "optim.eps=1e-4",
    "schedule=constant",
    "schedule.warmup=0",
    "eval.every=0",
    f"checkpoint.every={SAVE_EVERY}",
    "monitor=files",
    "debug.threads=1",
)
ENGINES = {f"zero{stage}": (f"zero=stage{stage}",) for stage in range(4)} | {"megatron": ("engine=megatron",)}
# Bounds on waiting, on a machine that is ten times slower than it should be.
START_SECONDS, CHANGE_SECONDS, END_SECONDS = 600, 600, 600


class Nodes:
    """Nodes on this machine that run the same command, each with its own agent, as in docs/clusters.md.

    torchrun orders the nodes by their addresses. The first of them serves the rendezvous in any case.
    """

    range = "1:2"
    last_call_seconds = 3

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.run_dir, self._folder, self._words = folder / "run", folder, words
        self._port = find_free_port()
        self.started: list[RunningCommand] = []

    def start(self, address: str = "127.0.0.1", **environ: str) -> RunningCommand:
        launches = self._folder / f"node-{len(self.started)}"
        launches.mkdir()
        argv = [
            str(BIN / "torchrun"),
            f"--nnodes={self.range}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=elastic",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            f"--rdzv-conf=is_host={int(not self.started)},last_call_timeout={self.last_call_seconds},"
            "keep_alive_interval=2",
            f"--local-addr={address}",
            "--max-restarts=3",
            str(ROOT / "launch/train.py"),
            *KEYS,
            "+hooks.pace.target=tests.launch.paced_steps.PacedSteps",
            f"run.dir={self.run_dir}",
            *self._words,
        ]
        ours = {
            "PYTHONPATH": str(ROOT),
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.started.append(RunningCommand(argv, self.run_dir, cwd=launches, environ={**ours, **environ}))
        return self.started[-1]

    def wait_for_step(self, attempt: int, step: int, seconds: float) -> None:
        """Wait until an attempt has done a step."""

        def reached() -> bool:
            status = read_status(self.run_dir)
            running = status is not None and status.state is RunState.RUNNING and status.attempt == attempt
            return running and ((status and status.step) or 0) >= step

        self.started[0].wait_until(reached, seconds, f"at step {step} of attempt {attempt}")

    def kill(self, node: RunningCommand) -> None:
        """Kill a node's agent and its rank at once, as the loss of a machine does."""
        ranks = [rank for rank in node.ranks().values() if rank.ppid() == node.process.pid]
        assert ranks
        send_signal(signal.SIGKILL, node.process.pid)
        for rank in ranks:
            send_signal(signal.SIGKILL, rank.pid)

    @property
    def worlds(self) -> list[int]:
        """The number of ranks of each attempt."""
        plans = (self.run_dir / "attempts").glob("*/plan.json")
        return [json.loads(plan.read_text())["world"]["ranks"] for plan in sorted(plans)]

    def times(self, attempt: int) -> AttemptTimes:
        times = read_times(RunDirectory(self.run_dir).attempt_folder(attempt))
        assert times is not None
        return times

    def end_of(self, attempt: int) -> tuple[str | None, str | None]:
        """State and reason that an attempt has recorded."""
        return self.times(attempt).state, self.times(attempt).reason

    @property
    def losses(self) -> dict[int, float]:
        found = read_losses(self.run_dir / "metrics.jsonl")
        assert [step for step, _ in found] == list(range(1, len(found) + 1)), "every step once, in order"
        return dict(found)

    @property
    def output(self) -> str:
        return "\n".join(f"---- node {number}\n{node.output}" for number, node in enumerate(self.started))


@contextmanager
def elastic_nodes(folder: Path, data: Path, *words: str) -> Iterator[Nodes]:
    nodes = Nodes(folder, (f"data.path={data}", *words))
    try:
        yield nodes
    finally:
        for node in nodes.started:
            node.__exit__()


def train_unbroken(folder: Path, data: Path, *words: str) -> dict[int, float]:
    """Return the losses of an uninterrupted run in this process."""
    config = compose([*KEYS, f"data.path={data}", f"run.dir={folder}", "engine=local", *words])
    plan = make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CPU))
    directory = RunDirectory(folder)
    run(plan, rank=0, local_rank=0, stop=lambda: None, attempt=directory.begin(config, to_json(plan)))
    directory.release()
    return dict(read_losses(directory.metrics_file))


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    found = train_unbroken(tmp_path_factory.mktemp("unbroken") / "run", data)
    assert abs(found[STEPS] - found[STEPS - 1]) > 1e-5, "control: one step late is outside of the tolerance"
    return found


@pytest.mark.full
def test_control_another_order_of_samples_gives_other_losses(
    data: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    other = train_unbroken(tmp_path / "run", data, "data.shuffle_seed=1")
    assert other != pytest.approx(unbroken, abs=1e-5)


def check_completed(nodes: Nodes, unbroken: dict[int, float], steps: int = STEPS) -> None:
    expected = {step: loss for step, loss in unbroken.items() if step <= steps}
    assert list(nodes.losses) == list(expected) == list(range(1, steps + 1))
    assert nodes.losses == pytest.approx(expected, abs=1e-5)
    status = read_status(nodes.run_dir)
    assert status is not None
    assert (status.state, status.exit_code, status.step) == (RunState.DONE, 0, steps)
    nodes.started[0].wait_until_gone(60)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engine", ENGINES)
def test_elastic_run_survives_loss_and_return_of_a_node(
    engine: str, data: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """With Megatron-core the node that is lost, and the one that returns, have rank 0.

    ``resume=never`` concerns the first start only, whichever node has rank 0 later.
    """
    first_address = "127.0.0.2" if engine == "megatron" else "127.0.0.1"
    with elastic_nodes(tmp_path, data, *ENGINES[engine], "resume=never") as nodes:
        first, second = nodes.start(first_address), nodes.start()
        nodes.wait_for_step(1, SAVE_EVERY + 2, START_SECONDS)
        assert ("attempt 1" in second.output) is (engine == "megatron")
        began = time.monotonic()
        nodes.kill(second)
        nodes.wait_for_step(2, SAVE_EVERY + 1, CHANGE_SECONDS)
        print(f"{engine}: {time.monotonic() - began:.1f} s from the loss to the next step")
        assert nodes.worlds == [2, 1]
        assert nodes.end_of(1)[0] == "failed"
        began = time.monotonic()
        third = nodes.start()
        nodes.wait_for_step(3, SAVE_EVERY, CHANGE_SECONDS)
        print(f"{engine}: {time.monotonic() - began:.1f} s from the start of the agent to the next step")
        codes = [node.wait_for_exit(END_SECONDS) for node in (first, third)]
        assert codes == [0, 0], nodes.output
        assert nodes.worlds == [2, 1, 2], nodes.output
        assert nodes.times(3).first == nodes.times(2).step, "no step is repeated when a node joins"
        assert nodes.end_of(2) == (
            "stopped",
            "1 node joined the run: torchrun restarts the ranks with more nodes",
        )
        check_completed(nodes, unbroken)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("departure", ["gce", "aws", "azure", "agent"])
def test_node_that_leaves_does_not_end_an_elastic_run(
    departure: str, data: Path, metadata: Metadata, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """A cloud takes a machine back, or the kernel kills an agent: its rank saves, and the others go on."""
    killed = departure == "agent"
    steps = STEPS // 3 if killed else STEPS  # the notice is read every five seconds
    words = ("zero=stage1", f"cluster.notice={'gce' if killed else departure}", f"train.steps={steps}")
    with elastic_nodes(tmp_path, data, *words) as nodes:
        first = nodes.start(TOOLKIT_METADATA_URL="http://127.0.0.1:9")
        second = nodes.start(TOOLKIT_METADATA_URL=metadata.url)
        nodes.wait_for_step(1, 3, START_SECONDS)
        if killed:
            send_signal(signal.SIGKILL, second.process.pid)
        else:
            metadata.answers |= preemption_answers(departure)
        assert first.wait_for_exit(CHANGE_SECONDS + END_SECONDS) == 0, nodes.output
        assert second.wait_for_exit() != 0
        assert nodes.worlds == [2, 1]
        state, reason = nodes.end_of(1)
        assert state == "stopped"
        assert reason is not None
        assert reason.startswith("node 1 left the run, which continues on the others: ")
        assert nodes.times(2).first == nodes.times(1).step, "the ranks saved before the node left"
        check_completed(nodes, unbroken, steps)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_elastic_run_ends_if_one_agent_is_asked_to_stop(data: Path, tmp_path: Path) -> None:
    """The other agent would restart its rank: nothing is wrong with its node, and restarts are left."""
    with elastic_nodes(tmp_path, data, "zero=stage1") as nodes:
        first, second = nodes.start(), nodes.start()
        nodes.wait_for_step(1, 3, START_SECONDS)
        send_signal(signal.SIGTERM, second.process.pid)
        assert 0 not in (first.wait_for_exit(END_SECONDS), second.wait_for_exit(END_SECONDS))
        assert nodes.worlds == [2]
        status = read_status(nodes.run_dir)
        assert status is not None
        assert (status.state, status.exit_code) == (RunState.STOPPED, 75)
        assert status.reason == "SIGTERM (on node 1)"
        assert status.checkpoint is not None
        assert status.checkpoint.endswith(f"step-{status.step:08d}")
        first.wait_until_gone(60)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_elastic_run_continues_from_the_memory_of_the_node_that_is_left(
    data: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """The snapshots are in a folder that the run names, as on a local disk."""
    steps, every = STEPS // 3, 4
    (tmp_path / "disk").mkdir()
    snapshots = (f"checkpoint.memory_every={every}", f"checkpoint.memory_folder={tmp_path}/disk")
    root = snapshot_root(f"{tmp_path}/disk")
    with elastic_nodes(tmp_path, data, "zero=stage1", *snapshots, f"train.steps={steps}") as nodes:
        first, second = nodes.start(), nodes.start()

        def memory(node: RunningCommand) -> Path | None:
            return next(root.glob(f"dmt-*-agent-*-{node.process.pid}-*"), None)

        def has_later_snapshot() -> bool:
            folder = memory(first)
            return folder is not None and max(committed_checkpoints(folder), default=0) > SAVE_EVERY

        first.wait_until(has_later_snapshot, START_SECONDS, "with a snapshot that is newer than the disk")
        left = memory(second)
        assert left is not None
        nodes.kill(second)
        assert first.wait_for_exit(CHANGE_SECONDS + END_SECONDS) == 0, nodes.output
        assert nodes.worlds == [2, 1]
        resumed = nodes.times(2).first
        assert resumed is not None
        assert resumed > SAVE_EVERY, nodes.output
        assert resumed % every == 0
        check_completed(nodes, unbroken, steps)
        assert memory(first) is None
        remove_abandoned_folders(root)  # the next start on the lost node does this
        assert not left.exists()


FAULTY_STEPS, CHECK_EVERY, FAULTY_FROM = 30, 4, 14
THREE_NODES = (
    "zero=stage1",
    "train.global_batch=12",
    f"train.steps={FAULTY_STEPS}",
    "checkpoint.every=5",
    f"monitor.computation_every={CHECK_EVERY}",
    "+hooks.fault.target=tests.launch.faulty_node.WrongLogits",
)


def start_with_faulty_node(nodes: Nodes) -> tuple[RunningCommand, RunningCommand, RunningCommand]:
    """Start three nodes. The second one computes wrong values after some steps, and has rank 0."""
    nodes.range, nodes.last_call_seconds = "2:3", 15
    first = nodes.start("127.0.0.3")
    faulty = nodes.start("127.0.0.1", FAULTY_FROM=str(FAULTY_FROM))
    return first, faulty, nodes.start("127.0.0.2")


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("memory_every", "resumed"), [(7, 10), (11, 11)])
def test_node_that_computes_wrong_values_leaves_an_elastic_run(
    memory_every: int, resumed: int, data: Path, tmp_path: Path
) -> None:
    """The check after step 16 finds the fault. Step 15 is on disk, and step 14 or 11 is in memory, but only
    the check after step 12 agreed. So the run continues from the disk, or from step 11 in memory.
    """
    words = ("train.global_batch=12", f"train.steps={FAULTY_STEPS}")
    expected = train_unbroken(tmp_path / "unbroken", data, *words)
    (tmp_path / "elastic").mkdir()
    with elastic_nodes(
        tmp_path / "elastic",
        data,
        *THREE_NODES,
        "monitor.on_wrong_computation=leave",
        f"checkpoint.memory_every={memory_every}",
    ) as nodes:
        first, faulty, third = start_with_faulty_node(nodes)
        codes = [node.wait_for_exit(START_SECONDS + CHANGE_SECONDS) for node in (first, third)]
        assert codes == [0, 0], nodes.output
        assert faulty.wait_for_exit() != 0
        assert nodes.worlds == [3, 2], nodes.output
        state, reason = nodes.end_of(1)
        assert state == "stopped"
        assert reason is not None
        assert reason.startswith("node 0 left the run, which continues on the others: step 16: rank 0 "), (
            reason
        )
        assert (nodes.times(1).step, nodes.times(2).first) == (16, resumed)
        moved = RunDirectory(nodes.run_dir).attempt_folder(1) / "checkpoints"
        assert list(committed_checkpoints(moved)) == [15]
        (row,) = read_departures(RunDirectory(nodes.run_dir).departures_file)
        assert (row.leaving, row.facts.agreed_step, row.facts.checkpoint_step) == ((0,), 12, 10)
        assert row == decide_departure(row.facts)
        check_completed(nodes, expected, FAULTY_STEPS)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_control_run_that_keeps_its_faulty_node_has_other_losses(data: Path, tmp_path: Path) -> None:
    words = ("train.global_batch=12", f"train.steps={FAULTY_STEPS}")
    expected = train_unbroken(tmp_path / "unbroken", data, *words)
    (tmp_path / "elastic").mkdir()
    with elastic_nodes(
        tmp_path / "elastic", data, *THREE_NODES, "monitor.on_wrong_computation=alert"
    ) as nodes:
        codes = [node.wait_for_exit(START_SECONDS) for node in start_with_faulty_node(nodes)]
        assert codes == [0, 0, 0], nodes.output
        assert nodes.worlds == [3]
        different = {
            step for step, loss in nodes.losses.items() if loss != pytest.approx(expected[step], abs=1e-5)
        }
        assert different == set(range(FAULTY_FROM + 1, FAULTY_STEPS + 1))
