"""Remove the checkpoints of a store that are no longer needed, by the rules of the run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.directory import removable_steps
from toolkit.checkpoint.manifest import NAME as MANIFEST
from toolkit.checkpoint.manifest import parse
from toolkit.checkpoint.remote.pointer import (
    POINTER,
    Pointer,
    StoredCheckpoint,
    folder_step,
    steps_with_manifest,
)
from toolkit.checkpoint.scalars import SOUND
from toolkit.remote.objects import Conflict, StoreObjects


class StoreRetention:
    """Applies retention to one store.

    Args:
        keep_last, keep_every: See ``directory.removable_steps``.
        on_delete: Called before each object is removed; for crash tests.
    """

    def __init__(
        self, objects: StoreObjects, *, keep_last: int, keep_every: int, on_delete: Callable[[], None]
    ) -> None:
        self._objects, self._keep_last, self._keep_every = objects, keep_last, keep_every
        self._on_delete = on_delete
        self._soundness: dict[str, bool] = {}  # by folder, whose name has the hash of the manifest

    def apply(self, pointer: Pointer, current: StoredCheckpoint, scalars: Mapping[str, object]) -> None:
        """Remove what need not be kept once the pointer names ``current``.

        Args:
            pointer: As this attempt has written it.
            scalars: Those of ``current``.

        Raises:
            Conflict: The store has another pointer. A process that was paused since it wrote its own must not
                remove what a newer attempt writes.
        """
        names = [entry.name for entry in self._objects.listing()]
        self._soundness[current.folder] = scalars.get(SOUND) is True
        removable = removable_folders(
            names,
            current,
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            is_sound=self._is_sound,
            agreed=agreed_step(scalars),
            best=best_steps(scalars),
        )
        if not removable:
            return
        found = self._objects.read(POINTER)
        if found is None or found[0] != pointer.encode():
            raise Conflict(POINTER)
        for folder in removable:
            # The manifest first: what is left is not mistaken for a checkpoint.
            objects = sorted(
                (name for name in names if name.startswith(f"{folder}/")),
                key=lambda name: not name.endswith(f"/{MANIFEST}"),
            )
            for name in objects:
                self._on_delete()
                self._objects.delete(name)

    def _is_sound(self, folder: str) -> bool:
        if folder not in self._soundness:
            name = f"{folder}/{MANIFEST}"
            found = self._objects.read(name)
            try:
                scalars = parse(found[0], self._objects.url / name).scalars if found else {}
            except DamagedFile:
                scalars = {}
            self._soundness[folder] = scalars.get(SOUND) is True
        return self._soundness[folder]


def removable_folders(
    names: Iterable[str],
    current: StoredCheckpoint,
    *,
    keep_last: int,
    keep_every: int,
    is_sound: Callable[[str], bool],
    agreed: int | None = None,
    best: Iterable[int] = (),
) -> list[str]:
    """Return the folders of a store that may be removed once the pointer names ``current``.

    Those of complete checkpoints follow the rule of the run directory (``directory.removable_steps``).
    Leftovers of dead uploads, which have no manifest, are removed up to that step: a later one may be in
    progress, if another attempt has replaced the pointer meanwhile.

    Args:
        names: Every object below the URL.
        current: The checkpoint of the pointer.
        keep_last, keep_every, best: See ``directory.removable_steps``.
        is_sound: Takes the folder of a complete checkpoint. It may read the manifest, so it is asked about
            the newest ones only, until one is sound.
        agreed: The step of the last check in which all ranks agreed. The newest sound checkpoint up to it
            stays too. None: no check is known.
    """
    objects = list(names)
    folders = {name.partition("/")[0] for name in objects if "/" in name}
    steps = {folder: step for folder in folders if (step := folder_step(folder)) is not None}
    complete = steps_with_manifest(objects)

    def newest_sound(up_to: int) -> int | None:
        newest_first = sorted(complete.items(), key=lambda item: item[1], reverse=True)
        return next((step for folder, step in newest_first if step <= up_to and is_sound(folder)), None)

    confirmed = None if agreed is None else newest_sound(min(agreed, current.step))
    gone = set(
        removable_steps(
            set(complete.values()),
            set(complete.values()),
            saved=current.step,
            keep_last=keep_last,
            keep_every=keep_every,
            best={*best, *(() if confirmed is None else (confirmed,))},
            sound=newest_sound(current.step),
        )
    )
    return sorted(
        folder
        for folder, step in steps.items()
        if folder != current.folder and (step in gone if folder in complete else step <= current.step)
    )


def best_steps(scalars: Mapping[str, object]) -> list[int]:
    """Return the steps of the best checkpoints that a checkpoint records (``checkpoint.keep_best``)."""
    saved = _hook_state(scalars, "checkpoint.keep_best").get("saved")
    return [int(step) for step, _ in saved] if isinstance(saved, list) else []


def agreed_step(scalars: Mapping[str, object]) -> int | None:
    """Return the step of the last check in which all ranks agreed (``monitor.computation_every``), which a
    checkpoint records; None if it records none."""
    step = _hook_state(scalars, "monitor.computation_every").get("equal_at")
    return step if isinstance(step, int) else None


def _hook_state(scalars: Mapping[str, object], name: str) -> Mapping[str, object]:
    hooks = scalars.get("hooks")
    state = hooks.get(name) if isinstance(hooks, Mapping) else None
    return state if isinstance(state, Mapping) else {}
