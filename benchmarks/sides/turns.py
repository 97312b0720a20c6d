"""Jobs that take turns, so that both sides of a pair see the same machine, and what their pairs say.

The figure of a comparison is the median over pairs of (median step of one side / median step of the other), with the 95% bounds that
order statistics give for a median.
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

from sides.torchrun import ON_CPU, TorchrunJob

WARM_UP_BLOCKS = 2


class Job(TorchrunJob):
    """One side: a command of ``ranks`` ranks that runs a block of steps when told."""

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
        baton = {**{end: str(pipe) for end, pipe in self._pipes.items()}, "block": block}
        super().__init__(name, script, {**spec, "baton": baton}, folder, ranks=ranks, environ=environ)
        self._go: TextIO | None = None
        self._done: TextIO | None = None
        self.peak_bytes = 0  # of the GPU where there is one, else of the process

    def block(self) -> list[float]:
        """Seconds of each step of the next block."""
        if self._go is None or self._done is None:
            self._go = self._open_when_read(self._pipes["go"])
            self._done = self._pipes["done"].open()
        print("go", file=self._go, flush=True)
        line = self._done.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early:\n{self.told()}")
        answer = json.loads(line)
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        seconds: list[float] = answer["seconds"]
        return seconds

    def _open_when_read(self, pipe: Path, seconds: float = 300) -> TextIO:
        """Opening a pipe to write blocks until it is read; a job that died would never read it."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} does not start:\n{self.told()}") from None
                time.sleep(0.02)


def steps_of(pairs: int, block: int) -> int:
    """How many steps each side of :func:`compare` takes."""
    return (pairs + WARM_UP_BLOCKS) * block


def compare(ours: Job, theirs: Job, pairs: int) -> dict[str, Any]:
    """Blocks in turns; who begins alternates."""
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
    """The median, and between what it lies with at least 95%: by the binomial distribution of ranks."""
    ordered, count = sorted(sample), len(sample)
    low, tail = 0, 0.5**count
    while low < count // 2 and tail + math.comb(count, low + 1) * 0.5**count <= 0.025:
        low += 1
        tail += math.comb(count, low) * 0.5**count
    return statistics.median(ordered), (ordered[low], ordered[count - 1 - low])
