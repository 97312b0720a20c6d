"""Counts of the processes that the kernel has killed for lack of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def count_oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return the number of OOM kills so far by counting file. Missing and unreadable files are skipped."""
    kills = {}
    for path in _oom_counter_files(root):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        counts = [
            fields[1]
            for fields in map(str.split, lines)
            if len(fields) == 2 and fields[0] == "oom_kill" and fields[1].isdigit()
        ]
        if counts:
            kills[str(path)] = int(counts[0])
    return kills


def describe_oom_kills(before: dict[str, int], now: dict[str, int]) -> str:
    """Describe the kills between two counts; empty if there were none."""
    for path, count in now.items():
        killed = count - before.get(path, count)
        if killed > 0:
            where = "on this machine" if path.endswith("vmstat") else "in its container or job"
            return (
                f"out of host memory: the kernel killed {killed} process{'es' * (killed > 1)} {where} "
                f"(oom_kill of {path})"
            )
    return ""


def _oom_counter_files(root: Path) -> Iterator[Path]:
    """Yield the files that count OOM kills since the system or cgroup started, nearest to this process first.

    They are memory.events of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst), memory.oom_control of v1,
    and /proc/vmstat for the whole machine.
    """
    groups = root / CGROUPS.relative_to("/")
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"
    yield groups / "memory.events"
    yield groups / "memory/memory.oom_control"
    yield root / "proc/vmstat"
