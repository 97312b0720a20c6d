"""The folder in memory in which the ranks of one supervisor keep snapshots of the state.

    /dev/shm/dmt-UID-<hash of the run directory>-<random>/
        lock                 locked by the supervisor; its text is the run directory
        step-00000120/       the newest complete snapshot, in the format of a checkpoint

The random name is known only to the supervisor that made the folder and to its ranks, so a snapshot of
another run, of another start, or of a run directory that was moved is never used. The supervisor removes the
folder when the run ends. If it is killed, its lock is free, and the next supervisor of this user removes the
folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from toolkit.checkpoint_folder import committed_checkpoints

SHARED_MEMORY = Path("/dev/shm")
UNLOCKED_SECONDS = 600.0  # how old a folder without a lock becomes before it counts as abandoned


class MemoryFolder:
    """A folder for snapshots, until :meth:`remove`.

    Args:
        run_dir: the run directory.
        root: a folder on a file system in memory.

    Raises:
        OSError: ``root`` is missing or cannot be written.
    """

    def __init__(self, run_dir: Path, root: Path = SHARED_MEMORY) -> None:
        run_dir = run_dir.absolute()
        run_hash = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
        self.path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{run_hash}-", dir=root))  # mode 0700
        unlocked = self.path / ".lock"  # another start must not find a lock that is not locked yet
        self._lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, os.fsencode(run_dir))
        unlocked.rename(self.path / "lock")

    def newest_step(self) -> int | None:
        """Return the step of the newest snapshot; None if there is none."""
        return max(committed_checkpoints(self.path), default=None)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def remove_abandoned(root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's folders whose supervisor has ended without removing them; return them."""
    removed = []
    for folder in root.glob(f"{_prefix()}*"):
        with suppress(FileNotFoundError):  # another start removes it at this moment
            found = folder.lstat()
            own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if own and not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_in_use(folder: Path) -> bool:
    """Return whether a living process holds the folder's lock.

    A folder without a lock may be in the making, or ranks whose supervisor was killed wrote to it once more.
    """
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return time.time() - folder.stat().st_mtime < UNLOCKED_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _prefix() -> str:
    return f"dmt-{os.getuid()}-"
