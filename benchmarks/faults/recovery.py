"""Measure the time from a fault to the next new step of the run, and its phases.

The witness within the ranks dates the steps (``witness.py``); the run's ``times.json`` dates its attempts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from toolkit.rundir.directory import RunDirectory

# The phases of a recovery, in order.
NOTICING = "noticing"  # from the fault to the recorded end of the attempt
WAITING = "waiting"  # until the last attempt begins: back-off, further failed attempts, the repeated command
STARTING = "starting"  # until its first step is complete: imports, rendezvous, engine, loading
REPEATING = "repeating"  # until the first step that no earlier attempt had completed
PAUSED = "paused"  # the attempt went on by itself
PHASES = (NOTICING, WAITING, STARTING, REPEATING, PAUSED)


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


def read_witness(folder: Path, rank: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a rank, or of all ranks in turn. An incomplete last row is skipped."""
    for file in sorted(folder.glob("rank-*.jsonl" if rank is None else f"rank-{rank}.jsonl")):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def recovery_of(run: Path, witness: Path, moment: float) -> dict[str, Any] | None:
    """Return the recovery from a fault at ``moment`` (seconds since 1970); None without a new step.

    A process may complete a few more steps before it notices the fault. If another process follows it, the
    next new step is the first that the follower completes and that process had not.
    """
    rows = [row for row in read_witness(witness, 0) if "ended" in row]
    hit_pid = next((row["pid"] for row in reversed(rows) if row["time"] <= moment), None)
    followed = any(row["pid"] != hit_pid for row in rows if row["time"] > moment)
    lost = [row for row in rows if (row["pid"] == hit_pid if followed else row["time"] <= moment)]
    before = max((row["ended"] for row in lost), default=0)
    ended = [(row["time"], row["ended"]) for row in rows if not followed or row["pid"] != hit_pid]
    after = next(((seconds, step) for seconds, step in ended if seconds > moment and step > before), None)
    if after is None:
        return None
    whole = after[0] - moment
    attempts = [attempt.times for attempt in RunDirectory(run).attempt_times()]
    hit = max((number for number, times in enumerate(attempts) if times.began <= moment), default=None)
    last = max((number for number, times in enumerate(attempts) if times.began <= after[0]), default=None)
    repeated = sum(seconds > moment and step <= before for seconds, step in ended)
    phases = {PAUSED: whole}
    if hit is not None and last is not None and last > hit:
        first_step = attempts[last].first_step or after[0]
        points = (moment, attempts[hit].end, attempts[last].began, first_step, after[0])
        phases = {
            phase: max(0.0, later - earlier)
            for phase, earlier, later in zip(PHASES, points, points[1:], strict=False)
        }
    return asdict(Recovery(seconds=whole, phases=phases, repeated=repeated))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below ``share`` of all values (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
