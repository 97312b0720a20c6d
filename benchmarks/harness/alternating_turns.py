"""Run two jobs in turns, so that both see the same machine, and compare their pairs.

The figure of a comparison is the median over pairs of (median step of one side / median step of the other),
with 95% bounds from order statistics.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from harness.torchrun_job import ON_CPU, TorchrunJob

WARM_UP_BLOCKS = 2


class TurnJob(TorchrunJob):
    """One side of a comparison: a command on ``ranks`` ranks that runs a block of steps per turn."""

    def __init__(
        self,
        name: str,
        script: str,
        spec: Mapping[str, Any],
        folder: Path,
        block: int,
        *,
        ranks: int,
        environ: Mapping[str, str] = ON_CPU,
    ) -> None:
        self._pipes = {end: folder / name / end for end in ("go", "done")}
        (folder / name).mkdir()
        for pipe in self._pipes.values():
            os.mkfifo(pipe)
        turns = {**{end: str(pipe) for end, pipe in self._pipes.items()}, "block": block}
        super().__init__(name, script, {**spec, "turns": turns}, folder, ranks=ranks, environ=environ)
        self._go: TextIO | None = None
        self._done: TextIO | None = None
        self.peak_bytes = 0  # of the GPU if there is one, else of the process

    def block(self) -> list[float]:
        """Return the seconds of each step of the next block."""
        if self._go is None or self._done is None:
            self._go = self._open_when_read(self._pipes["go"])
            self._done = self._pipes["done"].open()
        print("go", file=self._go, flush=True)
        line = self._done.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early:\n{self.log_tail()}")
        answer = json.loads(line)
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        seconds: list[float] = answer["seconds"]
        return seconds

    def _open_when_read(self, pipe: Path, seconds: float = 300) -> TextIO:
        """Open a pipe for writing as soon as the job reads it; fail if the job ends."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} does not start:\n{self.log_tail()}") from None
                time.sleep(0.02)


def steps_of(pairs: int, block: int) -> int:
    """Return the number of steps that each side of :func:`compare` takes."""
    return (pairs + WARM_UP_BLOCKS) * block


def compare(ours: TurnJob, theirs: TurnJob, pairs: int) -> dict[str, Any]:
    """Run blocks in turns, with alternating order."""
    jobs = (ours, theirs)
    for job in jobs * WARM_UP_BLOCKS:
        job.block()
    seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
    for pair in range(pairs):
        for job in jobs if pair % 2 == 0 else reversed(jobs):
            seconds[job.name].append(statistics.median(job.block()))
    ratios = [a / b for a, b in zip(seconds[ours.name], seconds[theirs.name], strict=True)]
    ratio, bounds = median_with_bounds(ratios)
    return {
        "pairs": pairs,
        "ratio": ratio,
        "ratio_95": bounds,
        "step_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "peak_bytes": {job.name: job.peak_bytes for job in jobs},
    }


def median_with_bounds(sample: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and its bounds with at least 95% confidence, by the binomial distribution of
    ranks."""
    ordered, count = sorted(sample), len(sample)
    low, tail = 0, 0.5**count
    while low < count // 2 and tail + math.comb(count, low + 1) * 0.5**count <= 0.025:
        low += 1
        tail += math.comb(count, low) * 0.5**count
    return statistics.median(ordered), (ordered[low], ordered[count - 1 - low])
