"""The use of machines by earlier attempts of a run: hours of devices, hours of nodes, failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from toolkit.goodput import Attempt, read_attempt
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState


@dataclass(frozen=True, slots=True)
class AttemptUsage:
    """An attempt and its machines. Each rank has one device: a GPU, or its share of the CPU."""

    attempt: Attempt
    ranks: int
    nodes: int

    @property
    def seconds(self) -> float:
        """Wall time from the start of its processes to its end."""
        return max(0.0, self.attempt.times.end - self.attempt.times.began)

    @property
    def failed(self) -> bool:
        """Whether it trained and then failed. Mistakes that end an attempt before its first step, and stops,
        which save, do not count.
        """
        times = self.attempt.times
        return times.first_step is not None and times.state == RunState.FAILED


def read_usage(directory: RunDirectory, before: int | None = None) -> list[AttemptUsage]:
    """Return the attempts in order, without those that left no times.

    Args:
        before: only attempts before this one.
    """
    found = []
    for number in directory.attempts():
        folder = directory.attempt_folder(number)
        attempt = read_attempt(folder) if before is None or number < before else None
        if attempt is not None:
            world = json.loads((folder / directory.plan_file.name).read_text(encoding="utf-8"))["world"]
            found.append(AttemptUsage(attempt, world["ranks"], world["nodes"]))
    return found


def device_hours(usage: Sequence[AttemptUsage]) -> float:
    """Return the hours of all ranks. Time between attempts does not count."""
    return sum(each.seconds * each.ranks for each in usage) / 3600


def restart_seconds(usage: Sequence[AttemptUsage]) -> float | None:
    """Return the median seconds from the last step before a failure to the end of the next attempt's first
    step; None if no attempt has trained after a failure.
    """
    measured = [
        max(0.0, after.attempt.times.first_step - (before.attempt.times.active or before.attempt.times.end))
        for before, after in pairwise(usage)
        if before.failed and after.attempt.times.first_step is not None
    ]
    return median(measured) if measured else None
