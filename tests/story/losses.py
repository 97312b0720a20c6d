"""Losses of runs, and whether two runs are equal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.story.steps import StoryFailed

TOLERANCE = 1e-5  # of the repository, between engines and layouts


def losses(file: Path) -> dict[int, float]:
    """Return the losses of metrics.jsonl by step. Raises StoryFailed if a step is repeated or the file is
    missing.
    """
    if not file.exists():
        raise StoryFailed(f"{file} is missing")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = {row["step"]: row["loss"] for row in rows}
    if len(found) != len(rows):
        raise StoryFailed(f"{file} has {len(rows)} rows of {len(found)} steps")
    return found


def apart(found: Mapping[int, float], expected: Mapping[int, float], steps: Iterable[int]) -> float:
    """Return the largest difference over ``steps``. Raises StoryFailed if a run lacks a step, or there are
    none.
    """
    steps = list(steps)
    missing = [step for step in steps if step not in found or step not in expected]
    if missing or not steps:
        raise StoryFailed(f"no loss of step {missing[0]}" if missing else "no steps to compare")
    return max(abs(found[step] - expected[step]) for step in steps)
