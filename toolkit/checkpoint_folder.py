"""The names in a run's ``checkpoints`` folder, and which checkpoint is the newest.

    checkpoints/latest                 one line, the name of the newest: written last, atomically. After resume=PATH, until the
                                       next save, the checkpoint at PATH: by its absolute path if it lies elsewhere
    checkpoints/step-00000123/         complete: it got this name by a rename, after its bytes were durable
    checkpoints/.tmp-...               being written, or left by an attempt that died
    checkpoints/.removed-...           being removed

A crash leaves a temporary folder, or a single complete checkpoint that ``latest`` does not name yet. Everything else that does not fit
together means that files were lost or moved, and then a person has to choose. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import CheckpointError, Problem
from toolkit.paths import UnsafePath, inside

POINTER = "latest"
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
REMOVED = ".removed-"
AGREE = "latest, the folders of checkpoints, status.json, saves.jsonl and metrics.jsonl agree on the newest checkpoint of a run"
_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """None for a folder that is not named as a checkpoint of a step."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def committed_checkpoints(directory: Path) -> dict[int, Path]:
    """Checkpoints by step, in rising order: folders with a step's name and a manifest. Damaged ones are among them."""
    return {step: folder for step, folder in step_folders(directory).items() if (folder / MANIFEST).is_file()}


def step_folders(directory: Path) -> dict[int, Path]:
    """All folders with a step's name, by step, in rising order, with or without a manifest."""
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
    """The newest checkpoint of a folder, as far as its files agree on one.

    Attributes:
        checkpoint: None: there is none.
        disagreements: what does not fit together, as sentences; then ``checkpoint`` is the best of what is left.
    """

    checkpoint: Path | None
    disagreements: tuple[str, ...] = ()


def find_newest(directory: Path, claims: Mapping[str, int] | None = None) -> NewestCheckpoint:
    """Which checkpoint of ``directory`` is the newest.

    Args:
        claims: steps that the run's other files say were saved, by the name of the file.
    """
    while True:
        pointer, folders = read_pointer(directory), step_folders(directory)
        complete = {step: folder for step, folder in folders.items() if (folder / MANIFEST).is_file()}
        if read_pointer(directory) == pointer:  # else a run saved meanwhile
            break
    if (
        pointer is not None
        and not folders
        and step_of(Path(pointer)) is None
        and not Path(pointer).is_absolute()
    ):
        pointer = None  # DeepSpeed's, whose folders have names of its own
    chosen, wrong = _pointed(directory, pointer, complete)
    step = step_of(chosen) if chosen is not None else -1
    if step is not None:  # None: a checkpoint elsewhere, under a name that says no step
        broken = [
            folder.name for number, folder in folders.items() if number > step and number not in complete
        ]
        wrong += [f"{name} has no {MANIFEST}" for name in broken if pointer != name]
        wrong += [
            f"{who} says that step {claimed} was saved"
            for who, claimed in (claims or {}).items()
            if claimed > step
        ]
    return NewestCheckpoint(chosen, tuple(wrong))


def _pointed(
    directory: Path, pointer: str | None, complete: Mapping[int, Path]
) -> tuple[Path | None, list[str]]:
    """What ``latest`` leads to, and what is wrong with it. Without ``latest``: the last of the complete checkpoints."""
    fallback = complete[max(complete)] if complete else None
    if pointer is None:
        return fallback, []
    elsewhere = pointer.startswith("/")
    try:
        folder = inside(Path("/"), pointer.removeprefix("/")) if elsewhere else inside(directory, pointer)
    except UnsafePath as error:
        return fallback, [f"{POINTER} names no checkpoint: {error}"]
    if not elsewhere and folder not in complete.values():
        missing = (
            f"{folder.name} has no {MANIFEST}"
            if _is_folder(folder) and step_of(folder) is not None
            else "which is not there"
        )
        return fallback, [f"{POINTER} names {pointer[:200]!r}, {missing}"]
    if not _is_folder(folder):
        return fallback, [f"{POINTER} names {pointer[:200]!r}, which is not there"]
    step = step_of(folder)
    later = [number for number in complete if step is not None and number > step]
    if len(later) > 1:
        return fallback, [f"{POINTER} names {folder.name}, and {len(later)} later checkpoints are complete"]
    # One later checkpoint: the process died after the rename of the folder and before it wrote the pointer.
    return (complete[later[0]] if later else folder), []


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of the folder; None if there is none. A damaged one is refused when it is opened.

    Raises:
        CheckpointError: the files of the folder do not agree on one.
    """
    found = find_newest(directory)
    if found.disagreements:
        raise disagreement_error(directory, found)
    return found.checkpoint


def disagreement_error(directory: Path, found: NewestCheckpoint) -> CheckpointError:
    """The error for files that do not agree, which says what is there and how to choose."""
    there = [folder.name for folder in committed_checkpoints(directory).values()]
    listed = (
        f"complete in {directory}: {', '.join(there)}"
        if there
        else f"no complete checkpoint is in {directory}"
    )
    if found.checkpoint is not None:
        remedy = f"name a checkpoint by its path; in training, resume={found.checkpoint} continues from it"
    else:
        remedy = "bring the checkpoints back from a copy; in training, resume=PATH continues from a checkpoint elsewhere"
    return CheckpointError(
        Problem(
            "resume",
            f"{'; '.join(found.disagreements)}; {listed}",
            AGREE,
            f"{remedy}, and resume=never trains from the beginning (what is left of the checkpoints moves to attempts/)",
        )
    )


def read_pointer(directory: Path) -> str | None:
    """The line of ``latest``; None without the file."""
    path = directory / POINTER
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def moved_steps(attempts: Path) -> Iterator[int]:
    """Steps of the checkpoints that ``resume=PATH`` and ``resume=never`` have moved to the run's attempts."""
    for folder in attempts.glob("*/checkpoints/step-*"):
        if (step := step_of(folder)) is not None:
            yield step


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that no file can have
        return False
