"""The measured steps of a finished run, for the calibration of its machines.

The median over the steps of the newest attempt with the full batch, without the first ones, which warm up,
and without those in which other processes occupied the rank's cores. If too few steps are calm, as on a busy
machine, the time in which a rank was ready but had no core is subtracted from each.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Problem
from toolkit.goodput import read_times
from toolkit.rows import read_rows
from toolkit.step_parts import UNDIVIDED_PARTS

WARM_UP_STEPS = 3
LEAST_STEPS = 5
MAX_STARVED = 0.05  # of a step: time in which the slowest rank was ready but had no core


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """The steps of one attempt, from which a machine is calibrated.

    Attributes:
        id: identifies the attempt: 12 hexadecimal digits.
        config: its configuration as YAML.
        plan: the content of its plan.json.
        environment: of its environment.json: toolkit, host, cores, packages.
        steps: that were measured.
        seconds: of the median step, without UNDIVIDED_PARTS.
        parts: seconds of the median rank in the median step.
    """

    id: str
    config: str
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: int
    seconds: float
    parts: Mapping[str, float]


def read_measured_steps(run: Path) -> MeasuredSteps:
    """Read the newest attempt of a run.

    Raises:
        InputError: it has no ledger, no plan, or too few steps.
    """
    attempts = sorted((run / "attempts").glob("[0-9]*"), key=lambda folder: int(folder.name))
    if not attempts:
        raise _unusable(run, "no folder attempts/", "name the folder that training printed")
    attempt = attempts[-1]
    config = _read(run, attempt / "config.yaml")
    times = read_times(attempt)
    first = times.first if times is not None else None
    if times is None or first is None:
        raise _unusable(run, f"attempt {attempt.name} did not begin to train", "train it first")
    plan = json.loads(_read(run, attempt / "plan.json"))
    first = max(first, _ramp_end(plan))
    rows = _undisturbed(
        [
            row
            for row in read_rows(run / "ledger.jsonl")
            if _is_complete(row) and row["step"] > first + WARM_UP_STEPS
        ]
    )
    if len(rows) < LEAST_STEPS:
        raise _unusable(
            run,
            f"{len(rows)} steps in ledger.jsonl after {WARM_UP_STEPS} of warm-up",
            f"train at least {first + WARM_UP_STEPS + LEAST_STEPS} steps with monitor.ledger=true",
        )
    return MeasuredSteps(
        id=hashlib.sha256(f"{config}\0{times.began}".encode()).hexdigest()[:12],
        config=config,
        plan=plan,
        environment=json.loads(_read(run, attempt / "environment.json")).get("environment", {}),
        steps=len(rows),
        seconds=statistics.median(_step_seconds(row) for row in rows),
        parts=_median_parts(rows),
    )


def _ramp_end(plan: Mapping[str, Any]) -> int:
    """Return the number of steps before the first one with the full batch; 0 if the plan does not say."""
    stages = plan.get("batch", {}).get("stages") or [{}]
    return int(stages[-1].get("first_step", 0))


def _is_complete(row: Mapping[str, Any]) -> bool:
    return all(name in row for name in ("step", "wall_seconds", "parts"))


def _undisturbed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps in which the ranks had their cores; if too few, all steps without the other time."""
    calm = [row for row in rows if _starved(row) <= MAX_STARVED * row["wall_seconds"]]
    return calm if len(calm) >= LEAST_STEPS else [_without_starved(row) for row in rows]


def _starved(row: Mapping[str, Any]) -> float:
    """Return the seconds of the rank that was ready longest without having a core."""
    return float(row.get("delays", {}).get("starved", (0.0,))[0])


def _without_starved(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step as it had been without other processes, which took the same share of every part."""
    share = max(0.0, 1 - _starved(row) / row["wall_seconds"])
    parts = {name: [seconds * share for seconds in spread] for name, spread in row["parts"].items()}
    return {**row, "wall_seconds": row["wall_seconds"] * share, "parts": parts}


def _step_seconds(row: Mapping[str, Any]) -> float:
    outside = sum(middle for name, (_, middle, _) in row["parts"].items() if name in UNDIVIDED_PARTS)
    return float(row["wall_seconds"] - outside)


def _median_parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each part; a row without a part has zero seconds of it."""
    names = {name for row in rows for name in row["parts"]} - UNDIVIDED_PARTS
    medians = {
        name: statistics.median(row["parts"].get(name, (0.0, 0.0, 0.0))[1] for row in rows)
        for name in sorted(names)
    }
    return {name: seconds for name, seconds in medians.items() if seconds > 0}


def _read(run: Path, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise _unusable(run, f"{file.name}: {error.strerror}", "name the folder of a finished run") from error


def _unusable(run: Path, seen: str, remedy: str) -> InputError:
    return InputError(
        Problem("run", f"{run}: {seen}", "a calibration needs a run with measured steps", remedy)
    )
