"""A run that is killed during a save resumes to the same result.

pytest tests/launch/test_killed_during_save.py -m full    every phase, of the local engine or two ZeRO 2 ranks

A save that is killed in each phase, without a training: tests/checkpoint/test_crash.py.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint.layouts import whole
from tests.launch.processes import RunningCommand, command, read_status
from tests.launch.tiny_runs import EVERY, KEYS, STEPS, read_losses
from toolkit import checkpoint_folder
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.commit import SavePhase
from toolkit.checkpoint.verify import verify
from toolkit.rundir.status import RunState

DRIVER = Path(__file__).with_name("killed_training.py")


@dataclass(frozen=True)
class Case:
    """``leaves``: step of the checkpoint to resume from; the second save is of step 4.

    ``ranks`` is 1 for the local engine, else 2 for ZeRO 2.
    """

    phase: SavePhase
    rank: int
    leaves: int
    entry: int = 1
    launcher: str = "torchrun"
    background: bool = False
    ranks: int = 2

    def __str__(self) -> str:
        options = f"{'-background' if self.background else ''}{'-local' if self.ranks == 1 else ''}"
        return f"{self.phase}-rank{self.rank}-{self.launcher}{options}"

    def argv(self, run_dir: Path, data: Path) -> list[str]:
        keys = (
            *KEYS,
            f"data.path={data}",
            f"run.dir={run_dir}",
            *(["zero=stage2"] if self.ranks > 1 else ["engine=local"]),
            f"checkpoint.background={self.background}".lower(),
            "cluster.grace_seconds=1",
        )
        return command(self.launcher, DRIVER, *keys, ranks=self.ranks)


# POINTER: the checkpoint is complete, but ``latest`` does not point to it yet.
CASES = [
    Case(SavePhase.POINTER, 0, leaves=2 * EVERY, launcher="python", background=True, ranks=1),
    Case(SavePhase.PIECES, 0, leaves=EVERY, entry=2),  # one shard is written
    Case(SavePhase.PIECES, 1, leaves=EVERY, entry=2, launcher="python", background=True),
    Case(SavePhase.FSYNC, 1, leaves=EVERY),
    Case(SavePhase.RENAME, 0, leaves=EVERY),
    Case(
        SavePhase.RETENTION, 0, leaves=2 * EVERY, entry=2, launcher="python", background=True
    ),  # the old checkpoint is no longer visible
]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_killed_during_a_save_resumes_to_same_result(
    case: Case, data: Path, uninterrupted: list[float], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    checkpoints, argv = run_dir / "checkpoints", case.argv(run_dir, data)
    environ = {"TORCHDYNAMO_DISABLE": "1"}
    kill = f"{case.phase}:{case.entry}:{case.rank}:2"
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ={**environ, "KILL": kill}) as started:
        code = started.wait_for_exit(150)
        started.wait_until_gone(15)
    if case.ranks == 1:  # this process itself
        assert code == -signal.SIGKILL, started.output
    else:
        assert code == 1, started.output
        killed = f"{started.output}{read_status(run_dir)}"
        assert "-9" in killed or "SIGKILL" in killed or "signal 9" in killed
    newest = checkpoint_folder.newest_checkpoint(checkpoints)
    assert newest == checkpoints / checkpoint_folder.step_name(case.leaves)
    assert verify(newest) == []
    assert whole(open_reader(run_dir))

    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=environ) as started:
        assert started.wait_for_exit(150) == 0, started.output
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step) == (RunState.DONE, 2, STEPS)
    losses = read_losses(run_dir / "metrics.jsonl")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses] == pytest.approx(uninterrupted, abs=1e-5)
    superseded = run_dir / "attempts" / "001" / "metrics.jsonl"  # steps that the second attempt repeated
    repeated = read_losses(superseded) if superseded.exists() else []
    assert repeated == [row for row in losses if row[0] in dict(repeated)], "bitwise equal"
    assert [step for step, _ in repeated] == list(range(case.leaves + 1, case.leaves + 1 + len(repeated)))
    assert repeated or case.leaves != EVERY
    assert sorted(entry.name for entry in checkpoints.iterdir()) == [
        "latest",
        checkpoint_folder.step_name(STEPS),
    ]
    assert verify(checkpoints / checkpoint_folder.step_name(STEPS)) == []
