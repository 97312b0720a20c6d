"""A whole training of two ZeRO 2 ranks, one of them killed with -9 inside a save: the same command goes on to the same end.

pytest tests/launch/test_killed.py            one phase
pytest tests/launch/test_killed.py -m full    every phase of a save
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoint.layouts import whole
from tests.launch.processes import Started, command, status_of
from toolkit import checkpoint_folder
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.commit import Phase
from toolkit.checkpoint.verify import verify
from toolkit.config.compose import compose
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.plan import make_plan
from toolkit.plan.present import to_json
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.train.run import run

DRIVER = Path(__file__).with_name("killed_training.py")
STEPS, EVERY = 6, 2
KEYS = (
    "model=gpt2",
    "model.vocab_size=264",
    "model.max_position_embeddings=32",
    "data=prepared",
    "train.sequence_length=32",
    "train.global_batch=8",
    f"train.steps={STEPS}",
    "optim.lr=3e-3",
    "optim.eps=1e-4",
    "schedule=constant",
    "schedule.warmup=0",
    "eval.every=0",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=1",
    "monitor=files",
    "debug.threads=1",
    "cluster.restarts=0",
)


@dataclass(frozen=True)
class Case:
    """``leaves`` is the step of the checkpoint to continue from: the second save is of step 4."""

    phase: Phase
    rank: int
    leaves: int
    entry: int = 1
    launcher: str = "torchrun"
    background: bool = False

    def __str__(self) -> str:
        return f"{self.phase}-rank{self.rank}-{self.launcher}{'-background' if self.background else ''}"

    def argv(self, run_dir: Path, data: Path) -> list[str]:
        keys = (
            *KEYS,
            f"data.path={data}",
            f"run.dir={run_dir}",
            "zero=stage2",
            f"checkpoint.background={self.background}".lower(),
            "cluster.grace_seconds=1",
        )
        return command(self.launcher, DRIVER, *keys)


QUICK = [
    Case(Phase.POINTER, 0, leaves=2 * EVERY, launcher="python", background=True)
]  # complete, though not yet pointed to
FULL = [
    Case(Phase.PIECES, 0, leaves=EVERY, entry=2),  # one piece is written
    Case(Phase.PIECES, 1, leaves=EVERY, entry=2, launcher="python", background=True),
    Case(Phase.FSYNC, 1, leaves=EVERY),
    Case(Phase.RENAME, 0, leaves=EVERY),
    Case(
        Phase.RETENTION, 0, leaves=2 * EVERY, entry=2, launcher="python", background=True
    ),  # the old checkpoint is out of sight
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that this is a test of, as text."""
    folder = tmp_path_factory.mktemp("data") / "toolkit"
    ensure_stdlib(folder, 264, root=Path(__file__).resolve().parents[2] / "toolkit")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The oracle's losses, in this process: local engine, one rank, the same samples."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = compose([*KEYS, f"data.path={data}", f"run.dir={folder}", "engine=local"])
    plan = make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CPU))
    run_directory = RunDirectory(folder)
    run(plan, rank=0, local_rank=0, stop=lambda: None, attempt=run_directory.begin(config, to_json(plan)))
    run_directory.release()
    losses = [loss for _, loss in rows(run_directory.metrics_file)]
    assert losses[0] - losses[-1] > 0.3, "one that began anew or left out a step could pass for this run"
    return losses


def rows(file: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, file.read_text().splitlines())]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str
)
def test_a_run_killed_in_a_save_goes_on_to_the_same_end(
    case: Case, data: Path, uninterrupted: list[float], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    checkpoints, argv = run_dir / "checkpoints", case.argv(run_dir, data)
    environ = {"TORCHDYNAMO_DISABLE": "1"}
    kill = f"{case.phase}:{case.entry}:{case.rank}:2"
    with Started(argv, run_dir, cwd=tmp_path, environ={**environ, "KILL": kill}) as started:
        assert started.ended(150) == 1, started.output
        started.gone(15)
    assert "-9" in started.output or "SIGKILL" in started.output or "signal 9" in str(status_of(run_dir)), (
        started.output
    )
    newest = checkpoint_folder.newest(checkpoints)
    assert newest == checkpoints / checkpoint_folder.step_name(case.leaves)
    assert verify(newest) == []
    assert whole(open_reader(run_dir))

    with Started(argv, run_dir, cwd=tmp_path, environ=environ) as started:
        assert started.ended(150) == 0, started.output
    end = status_of(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step) == (RunState.DONE, 2, STEPS)
    losses = rows(run_dir / "metrics.jsonl")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses] == pytest.approx(uninterrupted, abs=1e-5)
    again = run_dir / "attempts" / "001" / "metrics.jsonl"
    ran_twice = rows(again) if again.exists() else []
    assert ran_twice == [row for row in losses if row[0] in dict(ran_twice)], "to the bit"
    assert [step for step, _ in ran_twice] == list(range(case.leaves + 1, case.leaves + 1 + len(ran_twice)))
    assert (case.leaves == EVERY) <= bool(ran_twice)
    assert sorted(entry.name for entry in checkpoints.iterdir()) == [
        "latest",
        checkpoint_folder.step_name(STEPS),
    ]
    assert verify(checkpoints / checkpoint_folder.step_name(STEPS)) == []
