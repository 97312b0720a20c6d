"""Profile a window of steps with ``torch.profiler`` and write a trace of every kernel and operator."""

from __future__ import annotations

import gzip
import logging
import shutil
import threading
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit.hooks import CompletedStep, Hook

log = logging.getLogger(__name__)

WRITE_SECONDS = 300.0  # how long the end of the run waits for the file


class StepProfiler(Hook):
    """Start and stop the profiler between steps, so that steps outside the window run without it.

    torch holds the interpreter's lock while it exports the trace, about a second for 200 MB. The export
    therefore happens between steps, where it counts as logging; a thread compresses the file.

    Args:
        first, steps: the window; the first step of a run is 1. A run that starts inside the window profiles
            the rest of it.
        file: ends in ``.json.gz``.
    """

    def __init__(self, first: int, steps: int, file: Path, device: torch.device) -> None:
        self._window, self._file, self._device = range(first, first + steps), file, device
        self._uncompressed = file.with_suffix("")
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._profiled: list[int] = []
        self._thread: threading.Thread | None = None

    def on_start(self, step: int) -> None:
        self._between_steps(step)

    def on_step(self, completed: CompletedStep) -> None:
        self._between_steps(completed.step, ending=completed.last or completed.consensus.stop)

    def on_end(self, step: int) -> None:
        if self._thread is not None:
            self._thread.join(WRITE_SECONDS)

    def _between_steps(self, completed: int, ending: bool = False) -> None:
        """``completed`` steps are completed, and another one follows unless the run is ``ending``."""
        try:
            if self._step is not None:
                self._step.__exit__(None, None, None)
                self._step = None
            if completed + 1 in self._window and not ending:
                self._begin_step(completed + 1)
            elif self._profile is not None:
                self._finish()
        except Exception as error:  # noqa: BLE001  a failed trace must not end training
            self._window, self._profile, self._step = range(0), None, None
            log.warning(f"the steps are not profiled: {type(error).__name__}: {error}")

    def _begin_step(self, step: int) -> None:
        if self._profile is None:
            on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.start()
        self._step = record_function(f"step {step}")
        self._step.__enter__()
        self._profiled.append(step)

    def _finish(self) -> None:
        assert self._profile is not None
        finished, self._profile = self._profile, None
        finished.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._uncompressed))
        self._thread = threading.Thread(target=self._compress, name="trace", daemon=True)
        self._thread.start()

    def _compress(self) -> None:
        try:
            # torch can compress too, but through a temporary file that may be on a small disk.
            with (
                self._uncompressed.open("rb") as source,
                gzip.open(self._file, "wb", compresslevel=5) as packed,
            ):
                shutil.copyfileobj(source, packed)
            self._uncompressed.unlink()
            first, last = self._profiled[0], self._profiled[-1]
            steps = f"steps {first} to {last}" if first != last else f"step {first}"
            log.info(f"trace of {steps}: {self._file} (for ui.perfetto.dev)")
        except Exception as error:  # noqa: BLE001  a failed trace must not end training
            log.warning(f"the trace of the steps could not be written: {type(error).__name__}: {error}")
