"""Observe the ranks of a run from within, and carry out the faults that only a rank itself can cause.

The runs of benchmarks/campaign.py use both classes. ``FAULT_RECORDS`` names a folder outside of the run's:

    rank-N.jsonl     one row as each step begins (``samples``: their places in the order of the run) and one
                     as it ends, with the process and the wall clock; before the first step, one when the
                     ranks are connected, and one when the state is loaded
    order.json       a fault to carry out: {"kind", "ranks", "step"}; each rank obeys an order once
    hold             a step; while the file exists, rank 0 waits after that step and after later ones

The rows are independent of what the toolkit records, and compared with it.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from toolkit import Hook, NextTokenTask
from toolkit.hooks import CompletedStep

FOLDER, PAUSE, FIRST_PAUSE = "FAULT_RECORDS", "FAULT_STEP_SECONDS", "FAULT_FIRST_PAUSE"
HOLD = "hold"
CLOCK_JUMP_SECONDS = 3600.0
SLOW_SYNC_SECONDS = 0.5
MEMORY_ROOM, MEMORY_NEEDED = 64 << 20, 512 << 20  # bytes: what the limit leaves, and what the rank allocates
real_time = time.time


class InjectedFault(Exception):
    """The exception of a rank that was ordered to fail."""


class Recording:
    """The rows and orders of one rank."""

    def __init__(self) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.rank = int(os.environ.get("RANK", "0"))
        self.step = 0  # completed steps
        self.data_rank = 0
        self._rows = os.open(
            self.folder / f"rank-{self.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row with one write, so that a killed process leaves complete rows only."""
        whole = {"pid": os.getpid(), "rank": self.rank, "time": real_time(), **row}
        os.write(self._rows, (json.dumps(whole) + "\n").encode())

    def wait_while_held(self, step: int) -> None:
        """Wait after ``step`` while the file ``hold`` exists, if it has this or an earlier step."""
        with suppress(FileNotFoundError):
            while self.rank == 0 and step >= int((self.folder / HOLD).read_text()):
                time.sleep(0.02)

    def order(self, step: int, *kinds: str) -> str | None:
        """Return the kind of the order for this rank and step, if it is one of ``kinds`` and new."""
        try:
            order = json.loads((self.folder / "order.json").read_text())
        except FileNotFoundError:
            return None
        done = self.folder / f"obeyed-{self.rank}"
        if order["kind"] not in kinds or self.rank not in order["ranks"] or step < order["step"]:
            return None
        if done.exists():
            return None
        done.touch()
        self.write({"obeyed": order["kind"], "step": step})
        return str(order["kind"])


_recording: Recording | None = None


def recording() -> Recording:
    """Return this process' recording, which the task and the hook share."""
    global _recording
    if _recording is None:
        _recording = Recording()
    return _recording


class InstrumentedTask(NextTokenTask):
    """Predict the next token; record the samples of each step, and turn the loss into NaN if ordered.

    The task is built right after the process group.
    """

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get(FOLDER):
            recording().write({"connected": True})

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        batch = dict(super().collate(samples))
        weights = torch.ones(batch["labels"].shape)
        if self.sample_numbers is not None and os.environ.get(FOLDER):
            record = recording()
            step = record.step + 1
            record.write(
                {"begun": step, "data_rank": record.data_rank, "samples": self.sample_numbers.tolist()}
            )
            if record.order(step, "nan"):
                weights = weights * float("nan")
        return {**batch, "loss_weights": weights}


class InstrumentationHook(Hook):
    """Record the ends of steps, pause after each from the step of the fault on, and obey orders."""

    def on_start(self, step: int) -> None:
        record = recording()
        record.step = step
        record.data_rank = self.context.plan.axes.coordinates(self.context.rank).data
        record.write({"resumed": step})

    def on_step(self, completed: CompletedStep) -> None:
        record = recording()
        record.step = completed.step
        record.write({"ended": completed.step})
        match record.order(completed.step, "exception", "memory", "clock", "sync"):
            case "exception":
                raise InjectedFault(f"injected after step {completed.step}")
            case "memory":
                exhaust_memory()
            case "clock":
                time.time = lambda: real_time() + CLOCK_JUMP_SECONDS
            case "sync":
                slow_down_sync()
        record.wait_while_held(completed.step)
        if completed.step >= int(os.environ.get(FIRST_PAUSE, "0")):
            time.sleep(float(os.environ.get(PAUSE, "0")))


def exhaust_memory() -> None:
    """Allocate more host memory than a limit allows, which raises RuntimeError."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_ROOM, resource.RLIM_INFINITY))
    torch.empty(MEMORY_NEEDED, dtype=torch.uint8)


def slow_down_sync() -> None:
    """Make each fsync take SLOW_SYNC_SECONDS more, as on a disk that is overloaded."""
    sync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SLOW_SYNC_SECONDS)
        sync(descriptor)

    os.fsync = slow
