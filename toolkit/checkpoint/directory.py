"""What happens in the folder of a run's checkpoints: going back, which are whole, which may go. Names are those of
``toolkit/checkpoint_folder.py``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint_folder import POINTER, committed_checkpoints, newest_checkpoint, step_folders, step_of
from toolkit.errors import CheckpointError, Problem
from toolkit.files import write_whole


def make_newest(directory: Path, checkpoint: Path, step: int, aside: Path) -> list[Path]:
    """From now on, and until the next save, ``checkpoint`` of ``step`` is the newest: ``latest`` names it.

    Folders of later steps move to the folder ``aside``: steps that are run again may come out differently, and a checkpoint that was
    left would pass for the new one. The latest moves first and the pointer is written last: if this is killed in between, the pointer
    names what is not there, and the next start asks which checkpoint is meant.

    Returns:
        The folders that moved, under their new names.
    """
    checkpoint = checkpoint.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    moved = _move(directory, step, aside)
    write_whole(
        directory / POINTER,
        f"{checkpoint.name if checkpoint.parent == directory.absolute() else checkpoint}\n",
    )
    return moved


def set_aside_all(directory: Path, aside: Path) -> list[Path]:
    """No checkpoint is there any more: what is left moves to the folder ``aside``. Returns the folders that moved."""
    moved = _move(directory, -1, aside)
    (directory / POINTER).unlink(missing_ok=True)
    return moved


def _move(directory: Path, step: int, aside: Path) -> list[Path]:
    later = [folder for number, folder in step_folders(directory).items() if number > step]
    for folder in reversed(later):
        aside.mkdir(parents=True, exist_ok=True)
        folder.rename(aside / folder.name)
    return [aside / folder.name for folder in later]


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that ``path`` is, or the newest of the run directory or ``checkpoints`` folder that it is."""
    if (path / manifest.NAME).exists() or step_of(path) is not None:
        return path
    return newest_checkpoint(path) or newest_checkpoint(path / "checkpoints")


def load_manifest(folder: Path, name: str = manifest.NAME) -> manifest.Manifest:
    """Raises Damage: as ``manifest.load``; or the manifest is of another step than the folder's name says."""
    found, step = manifest.load(folder, name), step_of(folder)
    if name == manifest.NAME and step not in (None, found.step):
        raise DamagedFile(
            name, f"{folder / name} is of step {found.step}", "a checkpoint's folder has the name of its step"
        )
    return found


def is_complete(folder: Path) -> bool:
    """The manifest is intact and of the folder's step, and every file has its length. Flipped bytes are found when they are read, or by
    ``verify``."""
    try:
        manifest.check_files(folder, load_manifest(folder).files)
    except DamagedFile:
        return False
    return True


def complete_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints that are whole, in rising order of steps."""
    return [folder for folder in committed_checkpoints(directory).values() if is_complete(folder)]


def damage_error(folder: Path, damage: DamagedFile) -> CheckpointError:
    """What to tell of a damaged checkpoint, with the newest whole one before it, if there is one."""
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
        remedy = "bring the file back from a copy; no other complete checkpoint lies beside it"
    return CheckpointError(Problem(str(folder / damage.file), damage.seen, damage.rule, remedy))


def removable_steps(
    steps: Collection[int], whole: Collection[int], *, saved: int, keep_last: int, keep_every: int
) -> list[int]:
    """Steps whose checkpoints may go after step ``saved`` was saved.

    The ``keep_last`` newest whole ones up to ``saved`` stay, and every whole one at a multiple of ``keep_every``. Those
    beyond ``saved`` stay too: an attempt that died between a commit and its pointer left them, and the run comes to them again.
    """
    past = sorted(step for step in steps if step <= saved)
    sound = [step for step in past if step in whole]
    kept = {saved, *sound[-keep_last:], *(step for step in sound if keep_every and step % keep_every == 0)}
    return [step for step in past if step not in kept]
