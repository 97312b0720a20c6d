"""Check the disk of the run directory: free space and the expected duration of a save."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.doctor.types import (
    CheckFinding,
    DoctorCheck,
    RunRequirements,
    fail,
    format_size,
    ok,
    warn,
)

BLOCK_BYTES = 8 * 2**20
MAX_BYTES = 256 * 2**20
MAX_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskProbe:
    """The measured file system.

    Attributes:
        folder: the run directory, or its nearest existing parent.
        problem: why nothing can be written there.
        written_bytes, seconds: of one file that was written and synced.
    """

    folder: str
    free_bytes: int = 0
    problem: str | None = None
    written_bytes: int = 0
    seconds: float = 0.0


def measure(requirements: RunRequirements) -> DiskProbe:
    folder = requirements.run_dir.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = os.statvfs(folder)
    free_bytes = free.f_bavail * free.f_frsize
    path = folder / f".doctor-{os.urandom(6).hex()}"
    most = min(MAX_BYTES, free_bytes // 4)  # so that the test does not fill the disk
    try:
        written, seconds = timed_write(path, most)
    except OSError as error:
        return DiskProbe(folder=str(folder), free_bytes=free_bytes, problem=error.strerror or str(error))
    return DiskProbe(folder=str(folder), free_bytes=free_bytes, written_bytes=written, seconds=seconds)


def timed_write(path: Path, most: int, seconds: float = MAX_SECONDS) -> tuple[int, float]:
    """Write up to ``most`` bytes for about ``seconds`` and return the bytes written and the seconds taken.

    Each block is synced, so that the disk is measured and not its cache. The file is unlinked immediately, so
    nothing is left behind however this process ends.
    """
    block = os.urandom(BLOCK_BYTES)  # some file systems compress zeros to nothing
    began, written = time.perf_counter(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        while written + BLOCK_BYTES <= most and time.perf_counter() - began < seconds:
            written += os.write(descriptor, block)
            os.fdatasync(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written, time.perf_counter() - began


def assess(disk: DiskProbe, requirements: RunRequirements) -> Iterator[CheckFinding]:
    if disk.problem is not None:
        yield fail(
            f"{disk.folder}: {disk.problem}",
            "make it writable for this user and free some space, or set run.dir=FOLDER",
        )
        return
    size = requirements.checkpoint_bytes
    room = f"{disk.folder}: {format_size(disk.free_bytes)} free"
    if size is None:
        yield ok(f"{room}; size of a checkpoint unknown")
    elif disk.free_bytes < size:
        yield fail(
            f"{room}; one checkpoint takes {format_size(size)}",
            "free some space, or set run.dir=FOLDER on a larger disk",
        )
    elif disk.free_bytes < size * (requirements.keep_checkpoints + 1):
        yield warn(
            f"{room}; {requirements.keep_checkpoints} checkpoints (checkpoint.keep_last) and the one being "
            f"written take {format_size(size * (requirements.keep_checkpoints + 1))}",
            "free some space, or reduce checkpoint.keep_last",
        )
    else:
        yield ok(f"{room}; one checkpoint takes {format_size(size)}")
    yield from _assess_speed(disk, requirements)


def _assess_speed(disk: DiskProbe, requirements: RunRequirements) -> Iterator[CheckFinding]:
    if not disk.written_bytes:
        yield warn(f"{disk.folder}: too full to measure its speed", "free some space")
        return
    speed = disk.written_bytes / disk.seconds
    text = f"{format_size(disk.written_bytes)} written and synced at {speed / 1e6:,.0f} MB/s"
    if requirements.checkpoint_bytes is None:
        yield ok(text)
        return
    save_seconds = requirements.checkpoint_bytes / requirements.nodes / speed
    text += (
        f": a save takes about {save_seconds:,.0f} s"
        if save_seconds >= 1
        else ": a save takes less than a second"
    )
    if save_seconds > requirements.grace_seconds:
        yield warn(
            f"{text}, more than cluster.grace_seconds={requirements.grace_seconds}: a run stopped by a "
            "signal cannot finish saving",
            f"set cluster.grace_seconds={round(1.5 * save_seconds)} if the cluster allows it, use a "
            "faster run.dir, or save more often",
        )
    else:
        yield ok(text)


CHECK = DoctorCheck(
    name="disk",
    how=(
        f"free space; write a file of up to {format_size(MAX_BYTES)} or {MAX_SECONDS:g} s, synced every "
        f"{format_size(BLOCK_BYTES)}, on all machines at about the same time; a save writes each "
        "machine's share of the checkpoint at that speed"
    ),
    measure=measure,
    assess=assess,
    hang_remedy=(
        "the file system of run.dir hangs: check its server and mounts (mount, dmesg), or set run.dir=FOLDER"
    ),
)
