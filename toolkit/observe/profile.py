"""A window of steps seen by torch.profiler: every kernel and operator, for a person with a trace viewer."""

from __future__ import annotations

import gzip
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from toolkit.hooks import Hook, StepDone

WRITE_SECONDS = 300.0  # how long the end of the run waits for the file


class Profile(Hook):
    """Starts between two steps and stops between two steps: those outside the window run without a profiler.

    torch holds the interpreter while it writes what it saw, a second for some 200 MB, so that is done between steps too, where it shows as
    logging; a thread would stop training somewhere inside the next step. What a thread does is packing.

    Args:
        first, steps: of the window; the first step of a run is 1. A run that starts inside it sees what is left of it.
        file: ends in ``.json.gz``.
        say, tell: for results, for trouble.
    """

    def __init__(
        self,
        first: int,
        steps: int,
        file: Path,
        device: torch.device,
        *,
        say: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._window, self._file, self._device = range(first, first + steps), file, device
        self._plain = file.with_suffix("")
        self._say, self._tell = say, tell
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._seen: list[int] = []
        self._thread: threading.Thread | None = None

    def on_start(self, step: int) -> None:
        self._between(step)

    def on_step(self, done: StepDone) -> None:
        self._between(done.step, over=done.last or done.agreed.stop)

    def on_end(self, step: int) -> None:
        if self._thread is not None:
            self._thread.join(WRITE_SECONDS)

    def _between(self, done: int, over: bool = False) -> None:
        """``done`` steps are done, and unless it is ``over`` another one follows."""
        try:
            if self._step is not None:
                self._step.__exit__(None, None, None)
                self._step = None
            if done + 1 in self._window and not over:
                self._begin(done + 1)
            elif self._profile is not None:
                self._finish()
        except Exception as error:  # noqa: BLE001  a trace is no reason to end a training
            self._window, self._profile, self._step = range(0), None, None
            self._tell(f"no trace of the steps: {type(error).__name__}: {error}")

    def _begin(self, step: int) -> None:
        if self._profile is None:
            on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.start()
        self._step = record_function(f"step {step}")
        self._step.__enter__()
        self._seen.append(step)

    def _finish(self) -> None:
        assert self._profile is not None
        done, self._profile = self._profile, None
        done.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(self._plain))
        self._thread = threading.Thread(target=self._pack, name="trace", daemon=True)
        self._thread.start()

    def _pack(self) -> None:
        try:
            # By hand rather than by torch, whose temporary file may be on a small disk.
            with self._plain.open("rb") as source, gzip.open(self._file, "wb", compresslevel=5) as packed:
                shutil.copyfileobj(source, packed)
            self._plain.unlink()
            steps = (
                f"steps {self._seen[0]} to {self._seen[-1]}"
                if len(self._seen) > 1
                else f"step {self._seen[0]}"
            )
            self._say(f"trace of {steps}: {self._file} (for ui.perfetto.dev)")
        except Exception as error:  # noqa: BLE001  a trace is no reason to end a training
            self._tell(f"the trace of the steps could not be written: {type(error).__name__}: {error}")
