"""The pointer object of a store, and the decisions about it. Pure functions.

The pointer is one JSON object: which checkpoint is the newest one, and which attempt of which run writes.
Every start of a run replaces it with itself as the writer, and so does every upload. Each replacement names
the version that it replaces, so an older attempt that is still alive is refused at its next one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import xxhash

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.manifest import NAME as MANIFEST
from toolkit.checkpoint_folder import step_name, step_of
from toolkit.errors import CheckpointError, ConfigError, Problem
from toolkit.paths import Url
from toolkit.remote.errors import Subject

POINTER = "latest"
FORMAT, FORMAT_VERSION = "toolkit-checkpoint-pointer", 1
CHECKPOINT_URL = "checkpoint.url"
SUBJECT = Subject(
    CHECKPOINT_URL,
    "checkpoint",
    "the store holds the checkpoint with every file of its manifest",
    "continue from another checkpoint: resume=URL of its folder in the store",
)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in a store.

    Attributes:
        step: Completed optimizer steps.
        manifest_hash: xxh3-128 of the bytes of ``manifest.json``.
    """

    step: int
    manifest_hash: str

    @property
    def folder(self) -> str:
        return f"{step_name(self.step)}-{self.manifest_hash[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attempt of a run. ``run`` is random for each run directory, ``identity`` that of its plan."""

    run: str
    identity: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """The content of the pointer.

    Attributes:
        writer: Who wrote it last.
        checkpoint: None before the first upload.
        went_back: The writer continued from an earlier state, by ``resume=PATH``, and has not uploaded since.
            The checkpoint is complete, but that run does not continue from it by itself.
    """

    writer: Writer
    checkpoint: StoredCheckpoint | None = None
    went_back: bool = False

    def encode(self) -> bytes:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return (json.dumps(content, indent=1) + "\n").encode()


def hash_manifest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def folder_step(name: str) -> int | None:
    """Return the step of a checkpoint's folder in a store; None for any other name."""
    return step_of(Url(name)) if "-" in name.removeprefix("step-") else None


def steps_with_manifest(names: Iterable[str]) -> dict[str, int]:
    """Return the folders of checkpoints that have a manifest, with their steps.

    Args:
        names: Every object below the URL.
    """
    folders = {name.partition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
    return {folder: step for folder in folders if (step := folder_step(folder)) is not None}


def parse_pointer(content: bytes, shown: str) -> Pointer:
    """Parse the pointer. Raises DamagedFile. ``shown`` is its URL."""
    rule = "the pointer is the JSON object that this toolkit wrote"
    try:
        found = json.loads(content)
        if found["format"] != FORMAT or found["format_version"] != FORMAT_VERSION:
            raise ValueError(f"{found['format']} of version {found['format_version']}")
        writer, checkpoint = Writer(**found["writer"]), found["checkpoint"]
        named = None if checkpoint is None else StoredCheckpoint(**checkpoint)
        texts = [writer.run, writer.identity, *([named.manifest_hash] if named else [])]
        numbers = [writer.attempt, *([named.step] if named else [])]
        if not all(type(text) is str for text in texts) or any(
            type(number) is not int or number < 0 for number in numbers
        ):
            raise ValueError("a field has another type")
        if named is not None and folder_step(named.folder) != named.step:
            raise ValueError("manifest_hash is not a hash")
        return Pointer(writer=writer, checkpoint=named, went_back=bool(found["went_back"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        seen = f"{shown} is not a pointer ({type(error).__name__}: {str(error)[:100]})"
        raise DamagedFile(POINTER, seen, rule) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreClaim:
    """The facts with which an attempt claims a store, before it reads the pointer.

    Attributes:
        resume: The value of ``resume``.
        local_step: The step of the run directory's newest checkpoint; None: it has none.
        explicit: The checkpoint below the URL that ``resume`` names, if it names one there.
        forks: The configuration has ``run.fork``.
    """

    writer: Writer
    resume: str
    local_step: int | None
    explicit: StoredCheckpoint | None = None
    forks: bool = False


def claimed_pointer(found: Pointer | None, claim: StoreClaim, url: str) -> tuple[Pointer, bool]:
    """Return the pointer with which an attempt claims the store, and whether its run continues from the
    checkpoint of the pointer by itself (``resume=auto``).

    It does if the pointer's checkpoint is later than the run directory's newest.

    Raises:
        ConfigError: Another run writes there, or ``resume=never`` would pass over a checkpoint.
    """
    if found is None:
        return Pointer(writer=claim.writer, checkpoint=claim.explicit), False
    claimed, own = replace(found, writer=claim.writer), found.writer.run == claim.writer.run
    another = "write another checkpoint.url for this run"
    if found.writer.identity != claim.writer.identity:
        raise ConfigError(
            Problem(
                CHECKPOINT_URL,
                f"{CHECKPOINT_URL}={url} belongs to a run of identity {found.writer.identity}, here "
                f"{claim.writer.identity}",
                "a prefix of a store belongs to one model, data, optimizer, schedule and batch",
                another,
            )
        )
    if claim.forks and not own:
        raise writer_error(url, found.writer)
    if claim.resume not in ("auto", "never"):
        if claim.explicit is not None:
            return replace(claimed, checkpoint=claim.explicit, went_back=False), False
        return replace(claimed, went_back=found.checkpoint is not None), False
    if found.checkpoint is None:
        return claimed, False
    if claim.resume == "never" and claim.local_step is None:
        raise ConfigError(
            Problem(
                "resume",
                f"resume=never, but {url} has a checkpoint of step {found.checkpoint.step}",
                "resume=never does not continue a run",
                f"write resume=auto to continue, or {another}",
            )
        )
    if claim.resume == "never":
        return replace(claimed, went_back=True), False
    if not own and claim.local_step is not None:
        raise writer_error(url, found.writer)
    if own and found.went_back:
        return claimed, False
    if found.checkpoint.step > (-1 if claim.local_step is None else claim.local_step):
        return replace(claimed, went_back=False), True
    return claimed, False


def writer_error(url: str, other: Writer | None) -> ConfigError:
    """Return the error for a pointer that another run or attempt has changed."""
    who = "another process" if other is None else f"attempt {other.attempt} of run {other.run}"
    return ConfigError(
        Problem(
            CHECKPOINT_URL,
            f"{CHECKPOINT_URL}={url}: {who} has replaced the pointer {POINTER}",
            "only one attempt of one run may write below a URL at a time",
            f"stop this run or the other one; to continue here from the other's state, write resume={url}, "
            "or write another checkpoint.url for this run",
        )
    )


def removed_pointer_error(url: str) -> ConfigError:
    """Return the error for a pointer that was removed while this attempt wrote to the store."""
    return ConfigError(
        Problem(
            CHECKPOINT_URL,
            f"{CHECKPOINT_URL}={url}: the pointer {POINTER} was removed while this run was writing there",
            "nothing but the run that writes below a URL removes objects there",
            "find out what removes objects; to continue from the run's folder, write another checkpoint.url",
        )
    )


def lost_pointer_error(url: str, newest: str | None) -> CheckpointError:
    """Return the error for a prefix without a pointer. ``newest``: the newest complete checkpoint's URL."""
    if newest is None:
        seen, remedy = f"{url} contains no checkpoint", "correct the URL"
    else:
        seen = f"{url} has no pointer {POINTER}; the newest complete checkpoint there is {newest}"
        remedy = f"continue from it: resume={newest}"
    return CheckpointError(
        Problem("resume", seen, f"the pointer {POINTER} names the newest checkpoint of a store", remedy)
    )
