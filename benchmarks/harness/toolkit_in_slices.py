"""Run launch/train.py for monitoring.py, with marks within its steps and more or fewer sinks.

    torchrun --nproc_per_node 2 benchmarks/harness/toolkit_in_slices.py spec.json

``without_sinks`` disables even files. ``nodes`` and ``metrics``: after each step the sinks get the rows of
this many nodes with this many numbers in total. ``sleep_share``: rank 0 sleeps for this share of its CPU
time.

Each rank's training thread is bound to one core from its first step on, as launchers bind ranks; other
threads run on any core.
"""

import json
import os
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from step_marks import StepMarker

import toolkit.hooks as hooks
import toolkit.train.build as training_build
import toolkit.train.run as rank_of_a_run
from toolkit.monitor.sink import Kind, Sink

spec = json.loads(Path(sys.argv[-1]).read_text())
sinks: list[Sink] = []
open_sinks = rank_of_a_run.open_sinks


def opened(*arguments: Any, **named: Any) -> Sink:
    sinks.append(Sink() if spec.get("without_sinks") else open_sinks(*arguments, **named))
    return sinks[-1]


class Flood(hooks.Hook):
    """Log the rows of the samplers of ``nodes`` nodes in every step."""

    def __init__(self, nodes: int, metrics: int) -> None:
        each = metrics // nodes  # create rows here, because other nodes would create them
        self._rows = [
            {f"gpu/{number}/of_node_{node}": random.random() for number in range(each)}
            for node in range(nodes)
        ]

    def on_step(self, done: hooks.CompletedStep) -> None:
        for node, row in enumerate(self._rows):
            sinks[-1].log(Kind.SYSTEM, {**row, "step": done.step, "time": time.time(), "node": node})


class Sleep(hooks.Hook):
    def __init__(self, share: float) -> None:
        self._share = share
        # The step's wall time would include the time for which the job was stopped.
        self._worked = time.thread_time()

    def on_step(self, done: hooks.CompletedStep) -> None:
        worked = time.thread_time()
        time.sleep(self._share * (worked - self._worked))
        self._worked = worked


class More(hooks.Hooks):
    def __init__(self, *others: hooks.Hook, **named: Any) -> None:
        first = os.environ["RANK"] == "0"
        flood = [Flood(spec["nodes"], spec["metrics"])] if first and "metrics" in spec else []
        sleep = [Sleep(spec["sleep_share"])] if first and "sleep_share" in spec else []
        super().__init__(*others, *flood, *sleep, **named)
        self._marker = StepMarker(Path(spec["marks"])) if first else None
        if self._marker:
            self._marker.watch_layers()

    def on_step(self, done: hooks.CompletedStep) -> None:
        if self._marker:
            self._marker.mark()
        super().on_step(done)
        if self._marker:
            self._marker.end_step()
        if done.step == 1:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})  # this thread only


sys.argv = [str(Path(__file__).resolve().parents[2] / "launch" / "train.py"), *spec["overrides"]]
with patch.object(rank_of_a_run, "open_sinks", opened), patch.object(training_build, "Hooks", More):
    runpy.run_path(sys.argv[0], run_name="__main__")
