"""Write files atomically: they are complete or absent even if a process is killed or the machine stops.

write_whole(path, "text")                   complete, even after a power failure
write_whole(path, "text", durable=False)    complete for every process; a power failure may restore the
                                            old content or none
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the content of ``path`` atomically.

    The content is written to a temporary file in the same folder, synced and renamed over ``path``; then the
    folder is synced, which makes the rename durable. Each call uses its own temporary file, so concurrent
    writers do not interfere, and the last rename wins. A killed writer may leave a hidden file ending in
    ``.writing``, which :func:`remove_unfinished` removes.

    Args:
        path: The file.
        content: The new content.
        durable: If false, nothing is synced, which saves two waits for the disk (milliseconds or much more).
            That is safe if any process dies, and suitable for content that a power failure makes worthless:
            the status of a running run, messages between processes, caches, plots.
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


def remove_unfinished(files: Iterable[Path]) -> None:
    """Remove what killed writers of ``files`` left behind. No live process may be writing them."""
    for file in files:
        for left in file.parent.glob(f".{glob.escape(file.name)}.*.writing"):
            left.unlink(missing_ok=True)


def user_cache() -> Path:
    """Return the folder for this user's cached files."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "deepspeed-megatron-toolkit"
    )


def sync_folder(folder: Path) -> None:
    """Make files that were created, renamed or removed in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
