"""Detect the death of another rank during a save by a file that it keeps locked."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold_liveness_lock(file: Path) -> Iterator[None]:
    """Hold a lock on ``file``, which the kernel releases when this process dies, so that waiting ranks
    notice.

    The file is renamed to its name after it is locked. Without file locks only the timeout remains.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unnamed = file.with_name(f".{file.name}")
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, _boot_id())
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            unnamed.unlink()
        else:
            unnamed.rename(file)
        yield
    finally:
        os.close(descriptor)


def has_died(lock_file: Path) -> bool:
    """Return whether the process that created ``lock_file`` has died.

    False if unknown: it has not started, has finished its part, or runs on another machine whose locks are
    not visible here.
    """
    try:
        descriptor = os.open(lock_file, os.O_RDONLY)
    except OSError:
        return False
    try:
        if os.read(descriptor, 64) != _boot_id():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


@functools.cache
def _boot_id() -> bytes:
    """Return an id that all processes of a machine share until it reboots."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()
