"""The folder in which the ranks of one node keep snapshots of the state, on tmpfs or a local disk.

    /dev/shm/dmt-UID-<hash of the run directory>-<random>/
        lock                 locked by the supervisor; its text is the run directory
        step-00000120/       the newest complete snapshot, in the format of a checkpoint
    /dev/shm/dmt-UID-<hash of the run directory>-agent-<PID namespace>-<PID>-<start time>/
        step-00000120/       the same, with the files of this node and of its partner only
    <checkpoint.memory_folder>/dmt-UID-<host name>/dmt-UID-...
                             the same folders in a folder that the user names

The first kind belongs to a supervisor. The random name is known only to the supervisor that made the folder
and to its ranks, so a snapshot of another run, of another start, or of a run directory that was moved is
never used. The supervisor removes the folder when the run ends, or its ranks do if it was killed. If they are
killed too, the lock is free, and the next start of a run by this user removes the folder.

The second kind belongs to torchrun's agent, which restarts the ranks and knows nothing of the folder. Its
name identifies the agent's process, so the ranks of a later attempt find it again, and those of another agent
do not. The ranks remove it when they end for good. If they are killed, the next start of a run by this user
removes the folder once the agent has ended.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from toolkit.checkpoint_folder import committed_checkpoints
from toolkit.config.checkpoint import SHARED_MEMORY
from toolkit.errors import InputError, Problem

AGENT = "agent-"  # in the name of a folder, before what identifies the agent
UNLOCKED_SECONDS = 600.0  # how old a folder without a lock becomes before it counts as abandoned
FOREIGN_SECONDS = 86400.0  # the same for a folder of an agent whose process cannot be seen from here


def snapshot_root(memory_folder: str) -> Path:
    """Return the folder that contains the folders of this node's runs.

    In a folder that the user names each node has a subfolder of its own. Without it, nodes that share the
    disk against the documentation would remove or use each other's snapshots.

    Args:
        memory_folder: ``checkpoint.memory_folder``.

    Raises:
        InputError: the user has named a folder that is missing here or cannot be written.
    """
    root = Path(memory_folder)
    if memory_folder == SHARED_MEMORY:
        return root
    host = socket.gethostname()
    if not os.access(root, os.W_OK | os.X_OK) or not root.is_dir():
        raise InputError(
            Problem(
                "checkpoint.memory_folder",
                f"checkpoint.memory_folder={memory_folder}",
                f"snapshots need a folder that this user can write; {host} has none with this name",
                f"create it on every node (mkdir -p {memory_folder}), or leave the key out",
            )
        )
    own = root / f"{_prefix()}{host}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own


class SnapshotFolder:
    """A folder for snapshots, until :meth:`remove`.

    Args:
        run_dir: the run directory.
        root: of :func:`snapshot_root`.

    Raises:
        OSError: ``root`` is missing or cannot be written.
    """

    def __init__(self, run_dir: Path, root: Path) -> None:
        run_dir = run_dir.absolute()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{_run_hash(run_dir)}-", dir=root))  # mode 0700
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


def open_agent_folder(run_dir: Path, agent: int, agent_started: str, root: Path) -> Path:
    """Return the folder for snapshots of a run on this node, which the first of its ranks makes.

    Args:
        agent, agent_started: PID and start time (a field of /proc/PID/stat) of torchrun's agent.
        root: of :func:`snapshot_root`.

    Raises:
        OSError: ``root`` is missing or cannot be written, or the folder is another user's.
    """
    owner = f"{AGENT}{_pid_namespace()}-{agent}-{agent_started}"
    folder = root / f"{_prefix()}{_run_hash(run_dir.absolute())}-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "not a private folder of this user", str(folder))
    return folder


def remove_snapshot_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned_folders(root: Path) -> list[Path]:
    """Remove this user's folders in ``root`` whose supervisor or agent has ended without their removal.

    Args:
        root: of :func:`snapshot_root`.

    Returns:
        The removed folders.
    """
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
    """Return whether the folder's agent lives, or a living process holds the folder's lock.

    A folder without a lock may be in the making, or ranks whose supervisor was killed wrote to it once more.
    """
    _, of_agent, owner = folder.name.partition(f"-{AGENT}")
    if of_agent:
        namespace, _, process = owner.partition("-")
        if namespace != _pid_namespace():
            return time.time() - folder.stat().st_mtime < FOREIGN_SECONDS
        pid, _, started = process.partition("-")
        return _start_time(pid) == started
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


def _run_hash(run_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]


def _pid_namespace() -> str:
    """Return the number of the namespace in which this process sees PIDs: a container has its own."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _start_time(pid: str) -> str | None:
    """Return the start time of a living process, in clock ticks since the machine's; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]
