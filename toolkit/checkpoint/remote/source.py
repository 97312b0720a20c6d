"""Open a checkpoint in a store from its manifest, and find the checkpoints that are complete."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.remote.pointer import (
    POINTER,
    SUBJECT,
    StoredCheckpoint,
    folder_step,
    hash_manifest,
    lost_pointer_error,
    parse_pointer,
    steps_with_manifest,
)
from toolkit.checkpoint.source import CheckpointSource, source_from_manifest
from toolkit.checkpoint_folder import step_of
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.paths import Url
from toolkit.remote.objects import StoreObjects


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint's manifest and where it is.

    Attributes:
        url: The folder of the checkpoint.
        checkpoint: Step and hash of the manifest.
    """

    url: Url
    checkpoint: StoredCheckpoint
    manifest: manifest.Manifest


def locate(url: Url) -> LocatedCheckpoint:
    """Find the checkpoint that ``url`` is, or the one that its pointer names, and read its manifest.

    Raises:
        CheckpointError: There is none, its manifest is damaged, or the pointer is lost. InputError: The store
            refuses. StorageError: The store does not answer.
    """
    objects = StoreObjects(url, SUBJECT)
    try:
        found = None if _is_folder(url) else objects.read(POINTER)
        if found is None:
            whole = objects.read(manifest.NAME)
            if whole is None:
                raise _absence_error(objects)
            return _parsed(url, whole[0], None)
        pointer = parse_pointer(found[0], str(url / POINTER))
        if pointer.checkpoint is None:
            raise lost_pointer_error(url, None)
        return load(objects, pointer.checkpoint)
    except DamagedFile as damage:
        raise stored_damage_error(url, damage) from damage


def load(objects: StoreObjects, checkpoint: StoredCheckpoint) -> LocatedCheckpoint:
    """Read the manifest of ``checkpoint``. Raises DamagedFile if it is absent or another one."""
    name = f"{checkpoint.folder}/{manifest.NAME}"
    content = objects.read(name)
    if content is None:
        raise DamagedFile(name, f"{objects.url / name} is missing", manifest.RULE)
    return _parsed(objects.url / checkpoint.folder, content[0], checkpoint)


def _parsed(url: Url, content: bytes, expected: StoredCheckpoint | None) -> LocatedCheckpoint:
    file = url / manifest.NAME
    loaded = manifest.parse(content, file)
    manifest.check_consistency(loaded, manifest.NAME)
    found = StoredCheckpoint(loaded.step, hash_manifest(content))
    if expected not in (None, found) or (folder_step(url.name) is not None and url.name != found.folder):
        seen = f"{file} is of step {loaded.step} with the hash {found.manifest_hash}"
        raise DamagedFile(manifest.NAME, seen, "the pointer and the folder's name agree with the manifest")
    return LocatedCheckpoint(url, found, loaded)


def open_url(url: Url, model: ModelShape | None = None) -> CheckpointSource:
    """Open the checkpoint that ``url`` leads to. Reads its manifest but no tensor. Raises as ``locate``."""
    located = locate(url)
    return source_from_manifest(located.url, located.manifest, model)


def complete_checkpoints(objects: StoreObjects, before: int | None = None) -> list[Url]:
    """Return the checkpoints below the URL whose objects are all there with their sizes, the newest first.

    Args:
        objects: The store.
        before: Only checkpoints of earlier steps than this.
    """
    sizes = {entry.name: entry.bytes for entry in objects.listing()}
    found = []
    for folder, step in sorted(steps_with_manifest(sizes).items(), key=lambda item: item[1], reverse=True):
        content = objects.read(f"{folder}/{manifest.NAME}") if before is None or step < before else None
        if content is None:
            continue
        try:
            loaded = _parsed(objects.url / folder, content[0], None).manifest
        except DamagedFile:
            continue
        if all(sizes.get(f"{folder}/{record.file}") == record.bytes for record in loaded.files):
            found.append(objects.url / folder)
    return found


def stored_damage_error(url: Url, damage: DamagedFile) -> CheckpointError:
    """Return the error for a damaged checkpoint; its remedy names the newest complete one before it."""
    prefix = Url(url.rpartition("/")[0]) if _is_folder(url) else url
    try:
        others = complete_checkpoints(StoreObjects(prefix, SUBJECT), folder_step(url.name))
    except (ValueError, OSError):  # the store refuses or does not answer: the damage matters more
        others = []
    remedy = "copy the files to the store again; no other complete checkpoint was found there"
    if others:
        remedy = f"continue from another one: resume={others[0]}"
    return CheckpointError(Problem(str(url / damage.file), damage.seen, damage.rule, remedy))


def _is_folder(url: Url) -> bool:
    """Return whether the URL has the name of a checkpoint's folder, in a store or in a run's folder."""
    return step_of(url) is not None


def _absence_error(objects: StoreObjects) -> CheckpointError:
    """Return the error for a URL without a pointer and a manifest. Stores without listings name nothing."""
    found = complete_checkpoints(objects) if not objects.url.startswith("http") else []
    return lost_pointer_error(objects.url, str(found[0]) if found else None)
