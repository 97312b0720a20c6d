"""Faults of the catalogue that damage files: a checkpoint, a snapshot in memory, the data."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.cases import SAVE_EVERY
from benchmarks.faults.live_run import LiveRun
from toolkit import checkpoint_folder


def invert_byte(file: Path, place: int) -> None:
    """Invert the bits of one byte of a file; a second call restores it."""
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 0xFF]))


def damage_checkpoint(run: LiveRun) -> None:
    """Wait for a checkpoint, stop the ranks, damage a file of it, and kill a rank."""
    run.wait_for(lambda: run.newest_checkpoint() is not None)
    _damage_newest(run, run.newest_checkpoint)


def damage_snapshot(run: LiveRun) -> None:
    """Wait for a snapshot that is newer than the newest checkpoint, stop the ranks, damage a file of it, and
    kill a rank.
    """

    def newer_than_checkpoint() -> bool:
        snapshot, saved = run.newest_snapshot(), run.directory.saved_step() or 0
        step = 0 if snapshot is None else checkpoint_folder.step_of(snapshot) or 0
        return step > saved and step % SAVE_EVERY > 0

    run.wait_for(newer_than_checkpoint)
    _damage_newest(run, run.newest_snapshot)


def _damage_newest(run: LiveRun, find: Callable[[], Path | None]) -> None:
    for rank in run.ranks:
        run.kill(rank, signal.SIGSTOP)  # so that nothing newer is written between the two faults
    newest = find()
    assert newest is not None
    file = run.random.choice(sorted(newest.glob("*.safetensors")))
    run.damaged_byte = (file, run.random.randrange(file.stat().st_size))
    invert_byte(*run.damaged_byte)
    run.damaged_step = checkpoint_folder.step_of(newest)
    run.moment = time.time()
    run.kill(run.random.choice(sorted(run.ranks)))
    for rank in run.ranks:
        run.kill(rank, signal.SIGCONT)


def restore_sole_checkpoint(run: LiveRun) -> None:
    """Restore the damaged file if no other checkpoint is left, as the error asks for."""
    if not _undamaged_checkpoints(run):
        restore_byte(run)
        run.damaged_step = None


def older_checkpoint(run: LiveRun) -> tuple[str, ...]:
    """Return the remedy of a damaged checkpoint: resume from the one before."""
    return (f"resume={_undamaged_checkpoints(run)[-1]}",) if run.damaged_step is not None else ()


def _undamaged_checkpoints(run: LiveRun) -> list[Path]:
    steps = checkpoint_folder.committed_checkpoints(run.directory.checkpoints)
    return [folder for step, folder in steps.items() if step != run.damaged_step]


def copy_data(run: LiveRun) -> None:
    run.data = str(shutil.copytree(run.data, run.folder / "data"))


def damage_data(run: LiveRun) -> None:
    file = run.random.choice(sorted(Path(run.data).rglob("train-*.bin")))
    run.damaged_byte = (file, run.random.randrange(file.stat().st_size))
    invert_byte(*run.damaged_byte)
    run.kill(run.random.choice(sorted(run.ranks)))


def restore_byte(run: LiveRun) -> None:
    assert run.damaged_byte is not None
    invert_byte(*run.damaged_byte)
