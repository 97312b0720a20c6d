"""Let two jobs alternate blocks of steps, so that both see the same machine.

The benchmark writes a line to a job's ``go`` pipe. The job's rank 0 runs a block of steps and answers with a
line of JSON: the seconds of each step, and the peak memory of the GPU, or of the process on CPUs. Other
ranks wait in their next collective.
"""

from __future__ import annotations

import json
import resource
from typing import Any

import torch


class TurnClient:
    """Wait for turns. ``spec`` is {"go": FIFO, "done": FIFO, "block": steps per turn}; None on other
    ranks."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self._block = spec["block"] if spec else 0
        self._seconds: list[float] = []
        if spec:
            self._go = open(spec["go"])  # noqa: SIM115, PTH123  open as long as the job lives
            self._done = open(spec["done"], "w")  # noqa: SIM115, PTH123

    def before_step(self, step: int) -> None:
        """Wait for a turn if ``step`` (from 0) begins a block."""
        if self._block and step % self._block == 0:
            self._go.readline()

    def after_step(self, step: int, seconds: float) -> None:
        if not self._block:
            return
        self._seconds.append(seconds)
        if (step + 1) % self._block == 0:
            on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
            peak = (
                torch.cuda.max_memory_allocated()
                if on_gpu
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            )
            print(json.dumps({"seconds": self._seconds, "peak_bytes": peak}), file=self._done, flush=True)
            self._seconds = []
