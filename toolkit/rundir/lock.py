"""A file lock that the kernel releases when its last holder exits."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def acquire_lock(path: Path) -> tuple[int | None, dict[str, Any] | None]:
    """Lock ``path`` for this process.

    The kernel releases the lock with its last holder, including children that inherit the open file. The
    recorded pid and host are for messages, and for file systems without locks.

    Returns:
        The descriptor of the open file, which keeps the lock, and None; or None and the owner {pid, host,
        since} if known.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    owner = _read_owner(path)
    if not _try_lock(descriptor, owner):
        os.close(descriptor)
        return None, owner
    record = json.dumps(
        {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, record.encode(), 0)
    return descriptor, None


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # empty: the owner is about to write it, or died before
        return None
    return owner if isinstance(owner, dict) else None


def _try_lock(descriptor: int, owner: Mapping[str, Any] | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise
        # The file system has no locks: trust the recorded owner if it is on this machine.
        return owner is None or owner["host"] != socket.gethostname() or not _alive(owner["pid"])
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
