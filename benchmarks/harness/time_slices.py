"""Run two jobs in short slices of time, each stopped with all its processes while the other runs.

Background work of a job falls into its own slices, and both see the same machine within a tenth of a second.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.step_marks import Marks, read_marks
from harness.torchrun_job import TorchrunJob

# Drawn for each pair of slices, so that periodic work does not synchronise with them.
SLICE_SECONDS = (0.05, 0.11)
START_SECONDS = 120.0
POLL_SECONDS = 0.2


class SlicedJob(TorchrunJob):
    """A job that runs in slices once it has started; ``slices`` are their times on the monotonic clock, in
    seconds."""

    def __init__(
        self,
        name: str,
        script: str,
        spec: Mapping[str, Any],
        folder: Path,
        *,
        ranks: int,
        environ: Mapping[str, str],
    ) -> None:
        self._file = folder / name / "marks"
        super().__init__(
            name, script, {**spec, "marks": str(self._file)}, folder, ranks=ranks, environ=environ
        )
        self.slices: list[tuple[float, float]] = []
        self._members: list[int] = []

    def wait_for_a_step(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (self._file.exists() and self._file.stat().st_size):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} does not start:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def slice(self, seconds: float) -> None:
        """Run for this many seconds."""
        self._signal(signal.SIGCONT)
        begun = time.perf_counter()
        time.sleep(seconds)
        self.slices.append((begun, self.stop()))
        if self.process.poll() is not None:
            raise SystemExit(f"{self.name} ended early:\n{self.log_tail()}")

    def stop(self) -> float:
        """Stop all processes; return the time at which stopping began."""
        # Ranks are stopped before torchrun, which waits for them.
        self._members = [*process_tree(self.process.pid)][::-1]
        begun = time.perf_counter()
        self._signal(signal.SIGSTOP)
        return begun

    def marks(self) -> Marks:
        return read_marks(self._file)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all living processes of the job."""
        return sum(map(cpu_seconds, process_tree(self.process.pid)))

    def __exit__(self, *error: object) -> None:
        self._signal(signal.SIGCONT)
        super().__exit__(*error)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._members:
            with suppress(ProcessLookupError):
                os.kill(process, number)


def take_slices(jobs: Sequence[SlicedJob], pairs: int, seed: int) -> None:
    """Run this many slices of each job, equally long within a pair, in random order."""
    draw = random.Random(seed)
    for _ in range(pairs):
        seconds = draw.uniform(*SLICE_SECONDS)
        for job in draw.sample(jobs, len(jobs)):
            job.slice(seconds)


def process_tree(process: int) -> Iterator[int]:
    """Return a process and all its descendants, parents first."""
    yield process
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from process_tree(int(child))


def cpu_seconds(process: int) -> float:
    """Return user and system time, to 10 ms, from fields 14 and 15 of proc(5)'s stat."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
