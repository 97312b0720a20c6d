"""Names in a run's ``checkpoints`` folder, and which checkpoint is the newest.

    checkpoints/latest                 one line with the name of the newest checkpoint, written last and
                                       atomically. After resume=PATH, until the next save, the checkpoint at
                                       PATH: an absolute path, or a URL, if elsewhere
    checkpoints/best                   one line with the name of the best checkpoint: ``checkpoint.keep_best``
    checkpoints/step-00000123/         complete: renamed to this after its bytes were durable
    checkpoints/.tmp-...               being written, or left by an attempt that died
    checkpoints/.removed-...           being removed

A crash leaves a temporary folder, or one complete checkpoint that ``latest`` does not name yet. Any other
inconsistency means that files were lost or moved, and the user must choose. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import CheckpointError, Problem
from toolkit.paths import Location, UnsafePath, Url, inside

POINTER = "latest"
BEST_POINTER = "best"
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
REMOVED = ".removed-"
AGREE = (
    "latest, the folders of checkpoints, status.json, saves.jsonl and metrics.jsonl agree on the newest "
    "checkpoint of a run"
)
_STEP = re.compile(r"step-(\d{8,18})")
_STORED_STEP = re.compile(r"step-(\d{8,18})-[0-9a-f]{12}")  # in a store: checkpoint/remote


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Location) -> int | None:
    """Return the step of a folder named after one, otherwise None."""
    match = _STEP.fullmatch(folder.name)
    if match is None and isinstance(folder, Url):
        match = _STORED_STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def committed_checkpoints(directory: Path) -> dict[int, Path]:
    """Return checkpoints by step, in ascending order: folders with a step's name and a manifest, including
    damaged ones.
    """
    return {step: folder for step, folder in step_folders(directory).items() if (folder / MANIFEST).is_file()}


def step_folders(directory: Path) -> dict[int, Path]:
    """Return all folders with a step's name, by step in ascending order, with or without a manifest."""
    if not directory.is_dir():
        return {}
    steps = {
        step: entry
        for entry in directory.iterdir()
        if (step := step_of(entry)) is not None and entry.is_dir()
    }
    return {step: steps[step] for step in sorted(steps)}


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint of a folder.

    Attributes:
        checkpoint: None if there is none.
        disagreements: Inconsistencies, as sentences. If there are any, ``checkpoint`` is the best remaining
            one.
    """

    checkpoint: Location | None
    disagreements: tuple[str, ...] = ()


def find_newest(directory: Path, claims: Mapping[str, int] | None = None) -> NewestCheckpoint:
    """Find the newest checkpoint of ``directory``.

    Args:
        directory: The run's ``checkpoints`` folder.
        claims: Saved steps that the run's other files record, by name of the file.
    """
    while True:
        pointer, folders = read_pointer(directory), step_folders(directory)
        complete = {step: folder for step, folder in folders.items() if (folder / MANIFEST).is_file()}
        if read_pointer(directory) == pointer:  # otherwise a run has saved meanwhile
            break
    if (
        pointer is not None
        and not folders
        and step_of(Path(pointer)) is None
        and not Path(pointer).is_absolute()
        and "://" not in pointer
    ):
        pointer = None  # DeepSpeed's pointer, whose folders have other names
    chosen, disagreements = _follow_pointer(directory, pointer, complete)
    step = step_of(chosen) if chosen is not None else -1
    if step is not None:  # None: a checkpoint elsewhere, whose name has no step
        broken = [
            folder.name for number, folder in folders.items() if number > step and number not in complete
        ]
        disagreements += [f"{name} has no {MANIFEST}" for name in broken if pointer != name]
        disagreements += [
            f"{file} records that step {claimed} was saved"
            for file, claimed in (claims or {}).items()
            if claimed > step
        ]
    return NewestCheckpoint(chosen, tuple(disagreements))


def _follow_pointer(
    directory: Path, pointer: str | None, complete: Mapping[int, Path]
) -> tuple[Location | None, list[str]]:
    """Return the checkpoint that ``latest`` leads to, and its inconsistencies. Without ``latest``: the
    last complete checkpoint.
    """
    fallback = complete[max(complete)] if complete else None
    if pointer is None:
        return fallback, []
    if "://" in pointer:
        folder: Location = Url(pointer)  # it is not accessed here
    else:
        elsewhere = pointer.startswith("/")
        try:
            local = inside(Path("/"), pointer.removeprefix("/")) if elsewhere else inside(directory, pointer)
        except UnsafePath as error:
            return fallback, [f"{POINTER} names no checkpoint: {error}"]
        if not elsewhere and local not in complete.values():
            missing = (
                f"{local.name} has no {MANIFEST}"
                if _is_folder(local) and step_of(local) is not None
                else "which does not exist"
            )
            return fallback, [f"{POINTER} names {pointer[:200]!r}, {missing}"]
        if not _is_folder(local):
            return fallback, [f"{POINTER} names {pointer[:200]!r}, which does not exist"]
        folder = local
    step = step_of(folder)
    later = [number for number in complete if step is not None and number > step]
    if len(later) > 1:
        return fallback, [f"{POINTER} names {folder.name}, and {len(later)} later checkpoints are complete"]
    # One later checkpoint: the process died between renaming the folder and writing the pointer.
    return (complete[later[0]] if later else folder), []


def newest_checkpoint(directory: Path) -> Location | None:
    """Return the newest checkpoint of the folder, or None. Damage is detected when it is opened.

    Raises:
        CheckpointError: The folder's files disagree.
    """
    found = find_newest(directory)
    if found.disagreements:
        raise disagreement_error(directory, found)
    return found.checkpoint


def disagreement_error(directory: Path, found: NewestCheckpoint) -> CheckpointError:
    """Return the error for files that disagree, with what exists and how to choose."""
    names = [folder.name for folder in committed_checkpoints(directory).values()]
    listed = (
        f"complete in {directory}: {', '.join(names)}"
        if names
        else f"no complete checkpoint is in {directory}"
    )
    if found.checkpoint is not None:
        remedy = f"give the path of a checkpoint; in training, resume={found.checkpoint} continues from it"
    else:
        remedy = (
            "restore the checkpoints from a backup; in training, resume=PATH continues from a "
            "checkpoint elsewhere"
        )
    return CheckpointError(
        Problem(
            "resume",
            f"{'; '.join(found.disagreements)}; {listed}",
            AGREE,
            f"{remedy}, and resume=never trains from the beginning (remaining checkpoints move to attempts/)",
        )
    )


def read_pointer(directory: Path) -> str | None:
    """Return the line of ``latest``, or None without the file."""
    path = directory / POINTER
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def resolve_pointer(path: Path) -> Path:
    """Return the checkpoint that ``checkpoints/best`` or ``latest`` names; other paths unchanged."""
    if path.name not in (POINTER, BEST_POINTER) or not path.is_file():
        return path
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    return path.parent / name if step_of(Path(name)) is not None and name == Path(name).name else path


def moved_steps(attempts: Path) -> Iterator[int]:
    """Yield steps of the checkpoints that ``resume=PATH``, ``resume=never`` and rollbacks have moved to
    attempts.
    """
    for folder in attempts.glob("*/checkpoints*/step-*"):
        if (step := step_of(folder)) is not None:
            yield step


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # an impossible file name
        return False
