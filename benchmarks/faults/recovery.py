"""Measure the time from a fault to the next new step of the run, and its phases.

The ranks record when steps begin and end (``instrumentation.py``). The run's ``times.json`` has the times of
its attempts, and ``restart.json`` the phases of a restart by the toolkit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from toolkit.goodput import read_times
from toolkit.restart_phases import RestartPhase, read_restart
from toolkit.rundir.directory import RunDirectory

# The phases of a recovery, in order: those of restart.json, and two more. Where no attempt records them, for
# example because the command was repeated, "detect" includes "stop", "prepare" includes further failed
# attempts, "start" includes the rendezvous, and "build" includes loading.
REPEATING = "repeating"  # until the first step that no earlier attempt had completed
PAUSED = "paused"  # the attempt continued by itself
PHASES = (*RestartPhase, REPEATING, PAUSED)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """A recovery.

    Attributes:
        seconds: from the fault to the end of the next new step.
        phases: seconds by phase; they add up to ``seconds`` unless clocks jump.
        repeated: completed steps that were trained again.
    """

    seconds: float
    phases: Mapping[str, float]
    repeated: int


def read_rank_records(folder: Path, rank: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a rank, or of all ranks in turn. An incomplete last row is skipped."""
    for file in sorted(folder.glob("rank-*.jsonl" if rank is None else f"rank-{rank}.jsonl")):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def recovery_of(run: Path, rank_records: Path, moment: float) -> dict[str, Any] | None:
    """Return the recovery from a fault at ``moment`` (seconds since 1970); None without a new step.

    A process may complete a few more steps before it notices the fault. If another process follows it, the
    next new step is the first that the follower completes and that process had not.
    """
    recorded = list(read_rank_records(rank_records, 0))
    rows = [row for row in recorded if "ended" in row]
    hit_pid = next((row["pid"] for row in reversed(rows) if row["time"] <= moment), None)
    followed = any(row["pid"] != hit_pid for row in rows if row["time"] > moment)
    lost = [row for row in rows if (row["pid"] == hit_pid if followed else row["time"] <= moment)]
    before = max((row["ended"] for row in lost), default=0)
    ended = [row for row in rows if not followed or row["pid"] != hit_pid]
    after = next((row for row in ended if row["time"] > moment and row["ended"] > before), None)
    if after is None:
        return None
    repeated = sum(row["time"] > moment and row["ended"] <= before for row in ended)
    start = [row for row in recorded if row["pid"] == after["pid"]]
    phases = _phases(run, start, moment, after["time"]) or {PAUSED: after["time"] - moment}
    return asdict(Recovery(seconds=after["time"] - moment, phases=phases, repeated=repeated))


def _phases(run: Path, start: Sequence[Mapping[str, Any]], moment: float, after: float) -> dict[str, float]:
    """Return the seconds of each phase between a fault and the end of the next new step, ``after``; empty if
    the attempt continued.

    Args:
        start: rows of the process that completed that step.
    """
    directory = RunDirectory(run)
    attempts = {number: read_times(directory.attempt_folder(number)) for number in directory.attempts()}
    began = {number: times.began for number, times in attempts.items() if times is not None}
    hit = max((number for number, when in began.items() if when <= moment), default=None)
    last = max((number for number, when in began.items() if when <= after), default=None)
    if hit is None or last is None or last == hit:
        return {}
    before, times, restart = attempts[hit], attempts[last], read_restart(directory.attempt_folder(last))
    assert before is not None
    assert times is not None
    ends: list[tuple[str, float | None]]
    if restart is not None and last == hit + 1:
        ends = [*restart.ends]
    else:
        known = {name: row["time"] for row in start for name in ("connected", "resumed") if name in row}
        ends = [
            (RestartPhase.DETECT, before.end),
            (RestartPhase.PREPARE, times.began),
            (RestartPhase.START, known.get("connected")),
            (RestartPhase.BUILD, known.get("resumed")),
            (RestartPhase.FIRST_STEP, times.first_step),
        ]
    phases, earlier = {}, moment
    for name, end in [*ends, (REPEATING, after)]:
        if end is not None:
            phases[str(name)] = max(0.0, end - earlier)
            earlier = max(earlier, end)
    return phases


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below ``share`` of all values (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
