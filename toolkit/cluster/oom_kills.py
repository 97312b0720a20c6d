"""Whether the kernel killed processes for want of memory: a rank that it kills has no time to say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Files that count kills, the nearest to this process first: memory.events of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst),
# memory.oom_control of v1, and the whole machine's in /proc/vmstat, all since the system or the group began.
GROUPS = Path("/sys/fs/cgroup")


def count_oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """How many there were so far, by the file that counts them. A file that is not there or cannot be read counts nothing."""
    found = {}
    for path in _files(root):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        counts = [
            words[1]
            for words in map(str.split, lines)
            if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit()
        ]
        if counts:
            found[str(path)] = int(counts[0])
    return found


def describe_oom_kills(before: dict[str, int], now: dict[str, int]) -> str:
    """What to say of kills between two looks; empty where there was none."""
    for path, count in now.items():
        killed = count - before.get(path, count)
        if killed > 0:
            where = "on this machine" if path.endswith("vmstat") else "in its container or job"
            return f"out of host memory: the kernel killed {killed} process{'es' * (killed > 1)} {where} meanwhile (oom_kill of {path})"
    return ""


def _files(root: Path) -> Iterator[Path]:
    groups = root / GROUPS.relative_to("/")
    own = root / "proc/self/cgroup"
    for line in own.read_text(encoding="utf-8", errors="replace").splitlines() if own.exists() else []:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"
    yield groups / "memory.events"
    yield groups / "memory/memory.oom_control"
    yield root / "proc/vmstat"
