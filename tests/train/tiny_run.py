"""Whole runs on one process, on a small part of the standard library."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.shard import Box, Shard
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EvalConfig, RunConfig, RunSection
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.tiny import tiny_config
from toolkit.train import build, process_setup
from toolkit.train.run import run

WORLD = World(ranks=1, ranks_per_node=1, device=Device.CPU)
STEPS = 6


@contextmanager
def without_fixed_costs() -> Iterator[None]:
    """Skip the loss plot, and the collection of what all tests of this process have created.

    They take longer than the steps of a tiny run. ``TinyRun(plot=True)`` and test_process_setup.py test them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "plot_loss", lambda *arguments: None)
        patch.setattr(process_setup, "gc", SimpleNamespace(**vars(gc) | {"collect": lambda: 0}))
        yield


class TinyRun:
    """One attempt of a run in ``folder`` on one rank, with a GPT-2 that has every kind of dropout.

    Args:
        stop_after: ask it to stop after so many of its own steps.
        plot: run with everything that :func:`without_fixed_costs` skips.
    """

    def __init__(
        self,
        folder: Path,
        data: Path,
        stop_after: int | None = None,
        config: Callable[[RunConfig], None] = lambda config: None,
        generation: Path | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
        plot: bool = False,
        **changes: Any,
    ) -> None:
        settings = tiny_config(
            "gpt2", **{"train__steps": STEPS, "model__dropout": 0.1, "checkpoint__every": "never", **changes}
        )
        settings.run = RunSection(dir=str(folder))
        settings.data.path, settings.data.vocab_size = str(data), 264
        settings.monitor, settings.debug.threads = MonitorConfig(wandb=WandbMode.disabled), 1
        settings.eval = EvalConfig(every=2, batches=2)
        config(settings)
        self.directory = RunDirectory(folder)
        plan = make_plan(settings, WORLD)
        self.attempt = self.directory.begin(settings, to_json(plan))
        steps = 0

        def stop() -> str | None:
            nonlocal steps
            steps += 1
            return "SIGTERM" if stop_after is not None and steps >= stop_after else None

        try:
            with nullcontext() if plot else without_fixed_costs():
                self.code = run(
                    plan,
                    rank=0,
                    local_rank=0,
                    stop=stop,
                    attempt=self.attempt,
                    data=generation and str(generation),
                    seconds_left=seconds_left,
                )
        finally:
            self.directory.release()
        status = self.directory.status()
        assert status is not None
        self.status = status

    def rows(self) -> list[dict[str, Any]]:
        """Return the metric rows without times and memory."""
        rows = read_jsonl(self.directory.metrics_file)
        return [
            {key: value for key, value in row.items() if "second" not in key and "bytes" not in key}
            for row in rows
        ]

    def evals(self) -> list[tuple[int, str, float]]:
        return [(row["step"], row["set"], row["loss"]) for row in read_jsonl(self.directory.eval_file)]

    def state(self) -> dict[str, torch.Tensor]:
        reader = open_reader(self.directory.path)
        shards = [
            Shard(
                key,
                info.shape,
                Box.whole(info.shape),
                torch.empty(info.shape, dtype=getattr(torch, info.dtype)),
            )
            for key, info in reader.tensors.items()
        ]
        reader.read(shards)
        return {str(shard.key): shard.data for shard in shards}


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def equal_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
