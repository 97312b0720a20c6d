"""A fake engine, clock and sample stream, which test the order of events in microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoint.shard import Shard, StateReader
from toolkit.engine.protocol import EvalResult, MicroBatch, ReplicaSet, StepResult, StepSettings
from toolkit.engine.rank_sync import FlagReduce, StepConsensus, single_rank_reduce
from toolkit.hooks import CompletedStep
from toolkit.observe.context import RankContext
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory


class FakeEngine:
    """Return losses of 5 - step / 10, and append each call to ``events``."""

    device = torch.device("cpu")

    def __init__(
        self, events: list[Any] | None = None, clock: FakeClock | None = None, step_seconds: float = 0.0
    ) -> None:
        self.events = [] if events is None else events
        self.settings: list[StepSettings] = []
        self.batches: list[Sequence[MicroBatch]] = []
        self._clock, self._step_seconds = clock, step_seconds

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        self.events.append(f"train {settings.step}")
        self.settings.append(settings)
        self.batches.append(micro_batches)
        if self._clock is not None:
            self._clock.now += self._step_seconds
        tokens = sum(batch["labels"].numel() for batch in micro_batches)
        return StepResult(loss=5 - settings.step / 10, grad_norm=1 / 3, tokens=tokens)

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        self.events.append("eval")
        tokens = sum(batch["labels"].numel() for batch in micro_batches)
        return EvalResult(loss_sum=2.5 * tokens, tokens=tokens)

    def forward_hashes(self, micro_batch: MicroBatch) -> dict[str, int]:
        self.events.append("hash")
        return {"loss": 1}

    def shards(self) -> list[Shard]:
        return []

    def replica_sets(self) -> list[ReplicaSet]:
        return []

    def scalars(self) -> dict[str, object]:
        return {"optimizer_step": len(self.settings)}

    def load(self, reader: StateReader) -> None:
        self.events.append("load")

    def close(self) -> None:
        self.events.append("close")


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def samples(
    first_step: int = 0, clock: FakeClock | None = None, wait_seconds: float = 0.0
) -> Iterator[list[np.ndarray]]:
    """Yield two micro-batches [2, 5] per step, whose first token is the step."""
    step = first_step
    while True:
        if clock is not None:
            clock.now += wait_seconds
        yield [np.full((2, 5), step), np.full((2, 5), step + 1)]
        step += 1


def completed_step(step: int, *, stop: bool = False, save: bool = False, last: bool = False) -> CompletedStep:
    result = StepResult(loss=4.5, grad_norm=0.1, tokens=16)
    return CompletedStep(step, 1e-3, result, 0.5, StepConsensus(stop=stop, save_due=save), last)


def context_of(
    plan: RunPlan, folder: Path, rank: int = 0, all_reduce_flags: FlagReduce = single_rank_reduce
) -> RankContext:
    directory = RunDirectory(folder)
    return RankContext(
        plan=plan, directory=directory, rank=rank, attempt=1, all_reduce_flags=all_reduce_flags
    )
