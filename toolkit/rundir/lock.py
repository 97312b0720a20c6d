"""One process at a time: a lock that ends with its last holder, however that one dies."""

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
    """Take the lock ``path`` for this process: the open file, which holds it; or None and its owner {pid, host, since}, if known.

    The kernel frees the lock with its last holder, however that one dies; a child that inherits the open file is one. pid and host are
    for people, and for file systems without locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    owner = _read_owner(path)
    if not _locked(descriptor, owner):
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
    except ValueError:  # empty: its owner is between opening and writing, or died there
        return None
    return owner if isinstance(owner, dict) else None


def _locked(descriptor: int, owner: Mapping[str, Any] | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise
        # A file system without locks: believe the recorded owner if it is of this machine.
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
