"""Claim a store when a run starts, as the writer of its pointer."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.remote.pointer import (
    POINTER,
    Pointer,
    StoreClaim,
    claimed_pointer,
    lost_pointer_error,
    parse_pointer,
    steps_with_manifest,
    writer_error,
)
from toolkit.checkpoint.remote.source import complete_checkpoints, load, stored_damage_error
from toolkit.paths import Url
from toolkit.remote.objects import Conflict, ObjectVersion, StoreObjects


@dataclass(frozen=True, slots=True)
class StoreState:
    """The pointer as this attempt wrote it last, with its version."""

    pointer: Pointer
    version: ObjectVersion


@dataclass(frozen=True, slots=True)
class ClaimedStore:
    """A store that this attempt writes to.

    Attributes:
        newest: The checkpoint that the run continues from by itself, because it is later than the run
            directory's; None: it does not.
        steps: The steps of the checkpoints in the store.
    """

    state: StoreState
    newest: Url | None
    steps: tuple[int, ...]


def claim_store(objects: StoreObjects, claim: StoreClaim) -> ClaimedStore:
    """Replace the store's pointer with one that names this attempt as its writer (``claimed_pointer``).

    That shows whether the store can be written before training starts, and an earlier attempt that is still
    alive is refused when it writes next.

    Raises:
        UserError: The store refuses, another run writes there, or the pointer is lost or damaged.
        StorageError: The store does not answer.
    """
    url = objects.url
    content = objects.read(POINTER)
    steps = set(steps_with_manifest(entry.name for entry in objects.listing()).values())
    try:
        found = parse_pointer(content[0], str(url / POINTER)) if content is not None else None
        if found is None and claim.explicit is None and steps:
            complete = complete_checkpoints(objects)
            raise lost_pointer_error(url, str(complete[0]) if complete else None)
        pointer, follows = claimed_pointer(found, claim, url)
        newest = None
        if follows and pointer.checkpoint is not None:
            newest = load(objects, pointer.checkpoint).url
    except DamagedFile as damage:
        raise stored_damage_error(url, damage) from damage
    try:
        version = objects.replace(POINTER, pointer.encode(), None if content is None else content[1])
    except Conflict:
        raise writer_error(url, None) from None
    return ClaimedStore(StoreState(pointer, version), newest, tuple(sorted(steps)))
