"""Started runs, for tests of their folder."""

from __future__ import annotations

from pathlib import Path

from toolkit.config.schema import RunConfig, RunSection, TrainConfig
from toolkit.rundir.directory import RunDirectory

PLAN = {"identity": "0"}


def config(*, seed: int = 0, fork: Path | None = None, resume: str = "auto", steps: int = 10) -> RunConfig:
    return RunConfig(
        run=RunSection(fork=str(fork) if fork else None),
        resume=resume,
        train=TrainConfig(seed=seed, steps=steps),
    )


def begin_run(path: Path, **keys: object) -> RunDirectory:
    """A directory with one ended attempt."""
    directory = RunDirectory(path)
    directory.begin(config(**keys), PLAN)  # type: ignore[arg-type]
    directory.release()
    return directory


def make_checkpoint(directory: RunDirectory, name: str = "step-00000010") -> Path:
    folder = directory.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder
