"""What a rank's process looks like from inside, in three integers a step: they travel with the exchange that each step has anyway."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import torch

PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessStats:
    """One process has one. ``close`` takes its callback back from the garbage collector."""

    def __init__(self) -> None:
        self._collected = 0.0  # seconds since the last reading
        self._began = 0.0
        # Kept open: each reading of the file at its start is new.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        gc.callbacks.append(self._on_collection)

    def read(self, device: torch.device) -> list[int]:
        """Microseconds of garbage collection since the last reading; bytes of the process that belong to no file (what it maps of data and
        libraries comes and goes with the page cache); bytes that tensors hold on ``device``, 0 on CPU."""
        collected, self._collected = self._collected, 0.0
        _, resident, shared, *_ = os.pread(
            self._statm, 128, 0
        ).split()  # proc(5): pages; shared are those of files and shared memory
        held = 0
        if device.type == "cuda":
            held = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return [round(collected * 1e6), (int(resident) - int(shared)) * PAGE, held]

    def close(self) -> None:
        gc.callbacks.remove(self._on_collection)
        os.close(self._statm)

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._collected += time.perf_counter() - self._began
