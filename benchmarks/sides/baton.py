"""Lets two jobs take turns, block by block, so that both see the same machine: a drift hits both sides of a pair.

The benchmark writes a line to a job's ``go`` pipe; the job's rank 0 runs a block of steps and answers with a line of JSON: the
seconds of each step, and peak memory: of the GPU where it uses one, else of its process. Its other ranks sleep in their next
collective meanwhile.
"""

from __future__ import annotations

import json
import resource
from typing import Any

import torch


class Baton:
    """``spec``: {"go": FIFO, "done": FIFO, "block": steps a turn}, or None on ranks that only follow."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self._block = spec["block"] if spec else 0
        self._seconds: list[float] = []
        if spec:
            self._go = open(spec["go"])  # noqa: SIM115, PTH123  open as long as the job lives
            self._done = open(spec["done"], "w")  # noqa: SIM115, PTH123

    def before_step(self, step: int) -> None:
        """``step`` counts from 0."""
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
