"""Restarts by standbys and from snapshots in memory: whole commands whose ranks are killed at a known step.
The supervisor restarts them, or torchrun.

pytest tests/launch/test_warm_restarts.py                               one rank, plain PyTorch
pytest tests/launch/test_warm_restarts.py -m "full or not full"         two ranks of both engines
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.damage import flip_byte
from tests.launch.processes import ROOT, TRAIN, RunningCommand, command, read_status, send_signal
from tests.launch.tiny_runs import KEYS, read_losses
from toolkit import checkpoint_folder
from toolkit.goodput import read_times
from toolkit.restart_phases import RestartPhase, RestartPhases, read_restart
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

pytestmark = pytest.mark.timeout(900)
STEPS, GATE_STEP, EVERY, ON_DISK = 8, 5, 2, 3  # memory has step 4 at the gate, and the disk step 3
SECONDS = 400  # for anything, on a busy machine
MEMORY = f"checkpoint.memory_every={EVERY}"


@dataclass(frozen=True)
class Layout:
    engine: str
    ranks: int = 2
    stage: int = 1

    def __str__(self) -> str:
        return f"{self.engine}-{self.ranks}"


LOCAL, DEEPSPEED, MEGATRON = Layout("local", 1, 0), Layout("deepspeed"), Layout("megatron")
FULL = pytest.mark.full


class Run:
    """A run that waits after step ``GATE_STEP`` until :meth:`open_gate`."""

    def __init__(
        self, layout: Layout, data: Path, folder: Path, *keys: str, launcher: str = "python"
    ) -> None:
        self.dir, self._gate, self._folder, self._ranks = (
            folder / "run",
            folder / "gate",
            folder,
            layout.ranks,
        )
        overrides = [
            *(key for key in KEYS if not key.startswith(("cluster.", "checkpoint.every", "train.steps"))),
            f"train.steps={STEPS}",
            f"checkpoint.every={ON_DISK}",
            f"engine={layout.engine}",
            f"zero=stage{layout.stage}",
            f"data.path={data}",
            f"run.dir={self.dir}",
            f"cluster.standbys={layout.ranks}",
            "+hooks.gate.target=tests.launch.gated_steps.GatedSteps",
            *keys,
        ]
        self._argv = command(launcher, TRAIN, *overrides, ranks=layout.ranks)
        if launcher == "torchrun":
            self._argv[1:1] = ["--max-restarts", "3"]

    def start(self) -> RunningCommand:
        environ = {"GATE": str(self._gate), "GATE_STEP": str(GATE_STEP), "PYTHONPATH": str(ROOT)}
        return RunningCommand(self._argv, self.dir, cwd=self._folder, environ=environ)

    def open_gate(self) -> None:
        self._gate.touch()

    def wait_at_gate(self, started: RunningCommand, *, standbys: int) -> None:
        def waits() -> bool:
            status = read_status(self.dir)
            stepped = status is not None and status.step is not None
            return stepped and self._has_saved() and len(started.standbys()) == standbys

        started.wait_until(waits, SECONDS, "at the gate with standbys")

    def _has_saved(self) -> bool:
        saved = RunDirectory(self.dir).saved_step() is not None
        return saved and (MEMORY not in self._argv or self.snapshot() is not None)

    def snapshot(self) -> Path | None:
        """The folder of the newest snapshot in memory."""
        handover = RunDirectory(self.dir).attempt_folder(1) / "handover.json"
        memory = Path(json.loads(handover.read_text())["memory"] or "/nonexistent")
        return checkpoint_folder.committed_checkpoints(memory).get(GATE_STEP - 1)

    def finish(self, started: RunningCommand, *, attempts: int = 2) -> None:
        """Open the gate for the attempt that follows, and wait for the end."""
        second = RunDirectory(self.dir).attempt_folder(attempts)
        started.wait_until(lambda: (second / "plan.json").exists(), SECONDS, "restarted")
        self.open_gate()
        assert started.wait_for_exit(SECONDS) == 0, started.output
        started.wait_until_gone(30)
        status = read_status(self.dir)
        assert status is not None
        assert (status.state, status.attempt, status.step) == (RunState.DONE, attempts, STEPS)

    def losses(self) -> list[float]:
        rows = read_losses(self.dir / "metrics.jsonl")
        assert [step for step, _ in rows] == list(range(1, STEPS + 1))
        return [loss for _, loss in rows]

    def resumed_from(self, attempt: int = 2) -> int | None:
        """The step from which an attempt continued."""
        times = read_times(RunDirectory(self.dir).attempt_folder(attempt))
        return None if times is None else times.first

    def restart(self, attempt: int = 2) -> RestartPhases:
        found = read_restart(RunDirectory(self.dir).attempt_folder(attempt))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], list[float]]:
    """The losses of a run that nothing disturbs, in the same layout."""
    found: dict[Layout, list[float]] = {}

    def losses(layout: Layout) -> list[float]:
        if layout not in found:
            run = Run(layout, data, tmp_path_factory.mktemp(str(layout)), "cluster.restarts=0")
            run.open_gate()
            with run.start() as started:
                assert started.wait_for_exit(SECONDS) == 0, started.output
            found[layout] = run.losses()
            assert found[layout][0] - found[layout][-1] > 0.3, "otherwise a wrong resume could pass"
        return found[layout]

    return losses


@pytest.mark.parametrize(
    "layout", [LOCAL, pytest.param(DEEPSPEED, marks=FULL), pytest.param(MEGATRON, marks=FULL)], ids=str
)
def test_killed_rank_continues_in_standbys_from_memory(
    layout: Layout, data: Path, unbroken: Callable[[Layout], list[float]], tmp_path: Path
) -> None:
    run = Run(layout, data, tmp_path, MEMORY)
    with run.start() as started:
        run.wait_at_gate(started, standbys=layout.ranks)
        memory = run.snapshot()
        assert memory is not None
        assert memory.parent.stat().st_mode & 0o777 == 0o700
        waiting = {process.pid for process in started.standbys().values()}
        send_signal(signal.SIGKILL, started.ranks()[layout.ranks - 1].pid)
        second = RunDirectory(run.dir).attempt_folder(2)
        started.wait_until(lambda: (second / "times.json").exists(), SECONDS, "restarted")
        started.wait_until(
            lambda: {process.pid for process in started.ranks().values()} == waiting, SECONDS, "in standbys"
        )
        run.finish(started)
    assert run.losses() == unbroken(layout)
    assert run.resumed_from() == GATE_STEP - 1, "at most checkpoint.memory_every steps are repeated"
    phases = run.restart()
    assert phases.standbys == phases.ranks == layout.ranks
    assert [name for name, _ in phases.ends] == list(RestartPhase)
    assert f"continues from {memory}" in started.output
    assert "attempt 2 starts now from the snapshot in memory of step 4" in started.output
    assert phases.describe() in started.output
    assert not memory.parent.exists()


@pytest.mark.full
def test_without_standbys_and_memory_the_restart_is_cold_and_from_disk(
    data: Path, unbroken: Callable[[Layout], list[float]], tmp_path: Path
) -> None:
    """The control: the standbys are killed first, and a byte of the snapshot is flipped."""
    run = Run(DEEPSPEED, data, tmp_path, MEMORY)
    with run.start() as started:
        run.wait_at_gate(started, standbys=2)
        for process in started.standbys().values():
            process.kill()
        snapshot = run.snapshot()
        assert snapshot is not None
        flip_byte(snapshot / "part-00001.safetensors")
        send_signal(signal.SIGKILL, started.ranks()[1].pid)
        run.finish(started)
    assert run.losses() == unbroken(DEEPSPEED)
    assert run.resumed_from() == ON_DISK
    assert run.restart().standbys == 0
    assert f"the snapshot {snapshot} is damaged and not used" in started.output
    assert f"continues from {run.dir / 'checkpoints' / 'step-00000003'}" in started.output


@pytest.mark.full
def test_second_kill_during_recovery(
    data: Path, unbroken: Callable[[Layout], list[float]], tmp_path: Path
) -> None:
    run = Run(DEEPSPEED, data, tmp_path, MEMORY)
    with run.start() as started:
        run.wait_at_gate(started, standbys=2)
        first = {process.pid for process in started.ranks().values()}
        send_signal(signal.SIGKILL, started.ranks()[0].pid)
        new: list[int] = []

        def is_recovering() -> bool:
            new[:] = (process.pid for process in started.ranks().values())
            return bool(new) and first.isdisjoint(new)

        started.wait_until(is_recovering, SECONDS, "in recovery")
        send_signal(signal.SIGKILL, new[0])
        run.finish(started, attempts=3)
    assert run.losses() == unbroken(DEEPSPEED)
    assert run.restart(3).standbys == 0
    assert run.restart(3).seconds()[RestartPhase.PREPARE] >= 2, "the second failure made no progress"


@pytest.mark.full
def test_killed_supervisor_leaves_no_process_and_no_snapshot(
    data: Path, unbroken: Callable[[Layout], list[float]], tmp_path: Path
) -> None:
    run = Run(DEEPSPEED, data, tmp_path, MEMORY)
    with run.start() as started:
        run.wait_at_gate(started, standbys=2)
        snapshot = run.snapshot()
        assert snapshot is not None
        started.process.send_signal(signal.SIGKILL)
        started.wait_until(lambda: not started.standbys(), SECONDS, "without standbys")
        time.sleep(3)  # the ranks look every half second, and stop after the next step
        run.open_gate()
        started.wait_until_gone(SECONDS)
    assert not snapshot.parent.exists(), "the ranks remove what the supervisor cannot"
    saved = RunDirectory(run.dir).saved_step()
    with run.start() as started:
        assert started.wait_for_exit(SECONDS) == 0, started.output
    assert run.losses() == unbroken(DEEPSPEED)
    assert (
        f"continues from {run.dir / 'checkpoints' / checkpoint_folder.step_name(saved or 0)}"
        in started.output
    )


# ---- torchrun


@pytest.mark.parametrize(
    "layout", [LOCAL, pytest.param(DEEPSPEED, marks=FULL), pytest.param(MEGATRON, marks=FULL)], ids=str
)
def test_torchrun_restarts_a_killed_rank_in_standbys(
    layout: Layout, data: Path, unbroken: Callable[[Layout], list[float]], tmp_path: Path
) -> None:
    run = Run(layout, data, tmp_path, launcher="torchrun")
    with run.start() as started:
        run.wait_at_gate(started, standbys=layout.ranks)
        waiting = {process.pid for process in started.standbys().values()}
        send_signal(signal.SIGKILL, started.ranks()[layout.ranks - 1].pid)
        run.open_gate()  # the other rank then notices
        started.wait_until(lambda: run.resumed_from() is not None, SECONDS, "restarted")
        ranks = {process.pid for process in started.ranks().values()}
        assert ranks == waiting or started.process.poll() is not None
        run.finish(started)
    assert run.losses() == unbroken(layout)
    assert run.resumed_from() == ON_DISK
    phases = run.restart()
    assert phases.standbys == phases.ranks == layout.ranks
    assert [name for name, _ in phases.ends] == [name for name in RestartPhase if name != RestartPhase.DETECT]
    assert phases.describe() in started.output
    assert "snapshots in memory" not in started.output


@pytest.mark.full
@pytest.mark.parametrize("killed", ["standbys", "relay"])
def test_torchrun_restarts_without_standbys_that_are_gone(
    killed: str, data: Path, unbroken: Callable[[Layout], list[float]], tmp_path: Path
) -> None:
    """The control: the ranks start cold. A relay, of the second attempt, takes its rank with it."""
    run = Run(DEEPSPEED, data, tmp_path, launcher="torchrun")
    with run.start() as started:
        run.wait_at_gate(started, standbys=2)
        if killed == "standbys":
            for process in started.standbys().values():
                process.kill()
        send_signal(signal.SIGKILL, started.ranks()[0].pid)
        send_signal(signal.SIGKILL, started.ranks()[1].pid)
        attempts = 2
        if killed == "relay":
            attempts = 3
            second = RunDirectory(run.dir).attempt_folder(2)
            started.wait_until(lambda: (second / "restart.json").exists(), SECONDS, "in the second attempt")
            rank = started.ranks()[1]
            started.named("relay-")["relay-1"].kill()
            started.wait_until(lambda: not rank.is_running(), SECONDS, "without the rank of the relay")
        run.finish(started, attempts=attempts)
    assert run.losses() == unbroken(DEEPSPEED)
    assert run.restart(2).standbys == (0 if killed == "standbys" else 2)


@pytest.mark.full
@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_stopped_agent_leaves_no_process(
    number: signal.Signals, attempt: int, data: Path, tmp_path: Path
) -> None:
    """The ranks save and end; in the second attempt they are standbys that took over."""
    run = Run(MEGATRON, data, tmp_path, launcher="torchrun")
    with run.start() as started:
        run.wait_at_gate(started, standbys=2)
        if attempt == 2:
            for rank in started.ranks().values():
                send_signal(signal.SIGKILL, rank.pid)
            second = RunDirectory(run.dir).attempt_folder(2)
            started.wait_until(lambda: (second / "restart.json").exists(), SECONDS, "in the second attempt")
            run.wait_at_gate(started, standbys=2)
        send_signal(number, started.process.pid)
        time.sleep(3)  # the ranks look every half second, and stop after the next step
        run.open_gate()
        started.wait_until_gone(SECONDS)
        status = read_status(run.dir)
        assert status is not None
        assert (status.state, status.attempt, status.exit_code) == (RunState.STOPPED, attempt, 75)
        assert status.checkpoint is not None
