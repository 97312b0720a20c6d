"""The folder of a run's checkpoints: names, the pointer to the newest, which of them are complete, which may go.

    checkpoints/latest                 one line, the name of the newest: written last, atomically. After resume=PATH, until the
                                       next save, what PATH came to: by its absolute path where it lies elsewhere
    checkpoints/step-00000123/         complete: it got this name by a rename, after its bytes were durable
    checkpoints/.tmp-...               being written, or left by an attempt that died
    checkpoints/.removed-...           being removed

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import Damage
from toolkit.errors import CheckpointError, Problem
from toolkit.files import write_whole
from toolkit.paths import UnsafePath, inside

POINTER = "latest"
TEMPORARY = ".tmp-"
REMOVED = ".removed-"
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """None for a folder that is not named as a checkpoint of a step."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def committed(directory: Path) -> dict[int, Path]:
    """Checkpoints by step, in rising order: folders with a step's name and a manifest. Damaged ones are among them."""
    if not directory.is_dir():
        return {}
    steps = {step_of(entry): entry for entry in directory.iterdir() if (entry / manifest.NAME).is_file()}
    return {step: steps[step] for step in sorted(step for step in steps if step is not None)}


def pointed(directory: Path) -> Path | None:
    """What the pointer names: a checkpoint beside it, if it is there; or what the run went back to elsewhere, in whatever format, which
    is refused by name when it is opened and not there, never passed over for random weights."""
    path = directory / POINTER
    if not path.is_file():
        return None
    named = path.read_text(encoding="utf-8", errors="replace").strip()
    elsewhere = named.startswith("/")
    try:
        folder = inside(Path("/"), named.removeprefix("/")) if elsewhere else inside(directory, named)
    except UnsafePath:
        return None
    return folder if elsewhere or (folder / manifest.NAME).is_file() else None


def newest(directory: Path) -> Path | None:
    """The checkpoint that the pointer names; where it names none, that of the highest step. None if there is none.

    A damaged one is returned as well: it is refused by name when it is opened, never passed over in silence.
    """
    return pointed(directory) or next(reversed(committed(directory).values()), None)


def go_back(directory: Path, checkpoint: Path, step: int, aside: Path) -> list[Path]:
    """From now on, and until the next save, ``checkpoint`` of ``step`` is the newest: ``latest`` names it.

    Checkpoints of later steps move to the folder ``aside``: steps that are run again may come out differently, and a checkpoint
    that was left would pass for the new one. The pointer comes first, so that whenever this ends the newest is right.

    Returns:
        The folders that moved, under their new names.
    """
    checkpoint = checkpoint.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / POINTER, f"{checkpoint.name if checkpoint.parent == directory.absolute() else checkpoint}\n")
    later = [folder for number, folder in committed(directory).items() if number > step]
    for folder in later:
        aside.mkdir(parents=True, exist_ok=True)
        folder.rename(aside / folder.name)
    return [aside / folder.name for folder in later]


def checkpoint_at(path: Path) -> Path | None:
    """The checkpoint that ``path`` is, or the newest of the run directory or ``checkpoints`` folder that it is."""
    if (path / manifest.NAME).exists() or step_of(path) is not None:
        return path
    return newest(path) or newest(path / "checkpoints")


def is_whole(folder: Path) -> bool:
    """The manifest is intact and every file has its length. Flipped bytes are found when they are read, or by ``verify``."""
    try:
        manifest.check_files(folder, manifest.load(folder).files)
    except Damage:
        return False
    return True


def complete(directory: Path) -> list[Path]:
    """Checkpoints that are whole, in rising order of steps."""
    return [folder for folder in committed(directory).values() if is_whole(folder)]


def refusal(folder: Path, damage: Damage) -> CheckpointError:
    """What to tell of a damaged checkpoint, with the newest whole one before it, if there is one."""
    step = step_of(folder)
    others = [other for other in complete(folder.parent) if other != folder] if step is not None else []
    earlier = [other for other in others if (step_of(other) or 0) < (step or 0)]
    if earlier:
        remedy = f"continue from the one before: resume={earlier[-1]}"
    elif others:
        remedy = f"continue from another one: resume={others[-1]}"
    else:
        remedy = "bring the file back from a copy; no other complete checkpoint lies beside it"
    return CheckpointError(Problem(str(folder / damage.file), damage.seen, damage.rule, remedy))


def removable(steps: Collection[int], whole: Collection[int], *, saved: int, keep_last: int, keep_every: int) -> list[int]:
    """Steps whose checkpoints may go after step ``saved`` was saved.

    The ``keep_last`` newest whole ones up to ``saved`` stay, and every whole one at a multiple of ``keep_every``. Those
    beyond ``saved`` stay too: an attempt that died between a commit and its pointer left them, and the run comes to them again.
    """
    past = sorted(step for step in steps if step <= saved)
    sound = [step for step in past if step in whole]
    kept = {saved, *sound[-keep_last:], *(step for step in sound if keep_every and step % keep_every == 0)}
    return [step for step in past if step not in kept]
