"""Manage a run's ``checkpoints`` folder: go back to a checkpoint, find complete ones, apply retention.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.scalars import SOUND
from toolkit.checkpoint_folder import (
    BEST_POINTER,
    POINTER,
    committed_checkpoints,
    newest_checkpoint,
    resolve_pointer,
    step_folders,
    step_of,
)
from toolkit.errors import CheckpointError, Problem
from toolkit.files import sync_folder, write_whole
from toolkit.paths import Location


def rewind_to_checkpoint(directory: Path, checkpoint: Location, step: int, destination: Path) -> list[Path]:
    """Make ``checkpoint`` of ``step`` the newest one, to which ``latest`` points, until the next save.

    Folders of later steps move to ``destination``: repeated steps may give other results, and a leftover
    checkpoint could be mistaken for a new one. The latest folder moves first and the pointer is written last.
    If the process is killed in between, the pointer names a missing folder and the next start asks which
    checkpoint to use.

    Returns:
        The moved folders, at their new paths.
    """
    name = str(checkpoint)
    if isinstance(checkpoint, Path):
        checkpoint = checkpoint.absolute()
        name = checkpoint.name if checkpoint.parent == directory.absolute() else str(checkpoint)
    directory.mkdir(parents=True, exist_ok=True)
    moved = _move(directory, step, destination)
    write_whole(directory / POINTER, f"{name}\n")
    return moved


def move_all_checkpoints(directory: Path, destination: Path) -> list[Path]:
    """Move all checkpoints to ``destination``. Returns the moved folders, at their new paths."""
    moved = _move(directory, -1, destination)
    (directory / POINTER).unlink(missing_ok=True)
    return moved


def _move(directory: Path, step: int, destination: Path) -> list[Path]:
    later = [folder for number, folder in step_folders(directory).items() if number > step]
    best = directory / BEST_POINTER
    if resolve_pointer(best) in later:
        best.unlink()
    if later:
        destination.mkdir(parents=True, exist_ok=True)
    for folder in reversed(later):
        folder.rename(destination / folder.name)
    if later:
        for changed in (destination.parent, destination, directory):
            sync_folder(changed)
    return [destination / folder.name for folder in later]


def find_checkpoint(path: Path) -> Location | None:
    """Return ``path`` if it is a checkpoint, the one that ``checkpoints/best`` names, or the newest one of
    the run directory or ``checkpoints`` folder ``path``.
    """
    path = resolve_pointer(path)
    if (path / manifest.NAME).exists() or step_of(path) is not None:
        return path
    return newest_checkpoint(path) or newest_checkpoint(path / "checkpoints")


def load_manifest(folder: Path, name: str = manifest.NAME) -> manifest.Manifest:
    """Load the manifest. Raises DamagedFile, also if its step is not that of the folder's name."""
    found, step = manifest.load(folder, name), step_of(folder)
    if name == manifest.NAME and step not in (None, found.step):
        raise DamagedFile(
            name, f"{folder / name} is of step {found.step}", "a checkpoint's folder is named after its step"
        )
    return found


def is_complete(folder: Path) -> bool:
    """Return whether the manifest is intact and every file has its recorded length. Only reading or
    ``verify`` detects flipped bytes.
    """
    return _complete_manifest(folder) is not None


def is_sound(folder: Path) -> bool:
    """Return whether the checkpoint is complete, and the run was sound when it was saved."""
    found = _complete_manifest(folder)
    return found is not None and found.scalars.get(SOUND) is True


def _complete_manifest(folder: Path) -> manifest.Manifest | None:
    try:
        found = load_manifest(folder)
        manifest.check_files(folder, found.files)
    except DamagedFile:
        return None
    return found


def newest_sound_step(directory: Path, up_to: int | None = None) -> int | None:
    """Return the step of the newest checkpoint of the folder that is complete and sound, or None.

    Args:
        up_to: leave out the checkpoints of later steps; None: there is no limit.
    """
    newest_first = reversed(committed_checkpoints(directory).items())
    return next(
        (step for step, folder in newest_first if (up_to is None or step <= up_to) and is_sound(folder)), None
    )


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in ascending order of steps."""
    return [folder for folder in committed_checkpoints(directory).values() if is_complete(folder)]


def damage_error(folder: Path, damage: DamagedFile) -> CheckpointError:
    """Return the error for a damaged checkpoint; its remedy names the newest complete checkpoint before
    it."""
    step = step_of(folder)
    others = (
        [other for other in complete_checkpoints(folder.parent) if other != folder]
        if step is not None
        else []
    )
    earlier = [other for other in others if (step_of(other) or 0) < (step or 0)]
    if earlier:
        remedy = f"continue from the one before: resume={earlier[-1]}"
    elif others:
        remedy = f"continue from another one: resume={others[-1]}"
    else:
        remedy = "restore the file from a backup; there is no other complete checkpoint in the same folder"
    return CheckpointError(Problem(str(folder / damage.file), damage.seen, damage.rule, remedy))


def removable_steps(
    steps: Collection[int],
    complete_steps: Collection[int],
    *,
    saved: int,
    keep_last: int,
    keep_every: int,
    best: Collection[int] = (),
    sound: int | None = None,
) -> list[int]:
    """Return the steps whose checkpoints may be removed after step ``saved`` was saved.

    The ``keep_last`` newest complete checkpoints up to ``saved`` stay, every complete one at a multiple of
    ``keep_every``, those of the steps ``best``, and ``sound``, the newest one that is sound. Those after
    ``saved`` stay too: an attempt that died between commit and pointer left them, and the run will reach
    them again.
    """
    past = sorted(step for step in steps if step <= saved)
    complete = [step for step in past if step in complete_steps]
    keep = {
        saved,
        sound,
        *best,
        *complete[-keep_last:],
        *(step for step in complete if keep_every and step % keep_every == 0),
    }
    return [step for step in past if step not in keep]
