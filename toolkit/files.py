"""Files that are whole or absent, whoever is killed and whenever the machine stops.

write_whole(path, "text")                     there and whole, even after a power failure
write_whole(path, "text", durable=False)      whole for every process; after a power failure perhaps the old one, or none
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """``path`` holds its old content until it holds all of ``content``.

    A temporary file in the same folder is written, synced and renamed over ``path``; then the folder is synced, since a rename
    lasts only when the folder's own entry is on disk. Each call has a temporary file of its own: two writers of one path,
    threads or machines, do not disturb each other, and the last rename stays. A killed writer may leave its own behind, hidden
    and ending in ``.writing``.

    Args:
        durable: without it nothing is synced, which saves two waits for the disk (milliseconds, on a busy one much more). That
            is enough against the death of any process, and right for what a power failure makes worthless anyway: the status of
            a run under way, messages between processes that live now, what can be made again (caches, plots).
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.writing")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def user_cache() -> Path:
    """Where this user keeps what can be made or fetched again."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "deepspeed-megatron-toolkit"
    )


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable: what was made, renamed or removed there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
