"""Losses on named sets, at intervals and at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from toolkit.engine.protocol import Engine
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.sink import Row
from toolkit.monitor.step_parts import EVALUATION
from toolkit.train.task import Task

Batches = Iterable[Sequence[np.ndarray]]  # this rank's micro-batches, a global batch at a time


class Evaluation(Hook):
    """Evaluates every set after each ``every`` steps and after the last of ``steps``; with ``every`` 0 never.

    It comes before ``Checkpoints`` among the hooks, so that a checkpoint finds the rows up to its step written. Where a stop is
    agreed saving is more urgent, and the next start evaluates. Training's order and random state are untouched: the sets are read
    on their own, and ``Engine.eval_step`` leaves random state as it was.

    Args:
        sets: by name; each call gives the same batches again.
        missing: whether a step has no row yet; equal on all ranks, which ask it together.
        announce: takes the row of each set.
        unit: ``RunPlan.unit``.
        progress: is told of what was evaluated, after each batch.
    """

    part = EVALUATION

    def __init__(
        self,
        engine: Engine,
        task: Task,
        sets: Mapping[str, Callable[[], Batches]],
        *,
        every: int,
        steps: int,
        missing: Callable[[int], bool],
        announce: Callable[[Row], None],
        unit: str = "tokens",
        progress: Callable[[str], None] = lambda what: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._task, self._sets, self._every, self._steps = engine, task, sets, every, steps
        self._missing, self._announce, self._unit, self._progress, self._clock = (
            missing,
            announce,
            unit,
            progress,
            clock,
        )

    def on_start(self, step: int) -> None:
        if step and self._due(step) and self._missing(step):
            self._evaluate_all(step)

    def on_step(self, done: StepDone) -> None:
        if self._due(done.step) and not done.agreed.stop:
            self._evaluate_all(done.step)

    def _due(self, step: int) -> bool:
        return self._every > 0 and (step % self._every == 0 or step == self._steps)

    def _evaluate_all(self, step: int) -> None:
        for name, batches in self._sets.items():
            self._announce(self._evaluate(step, name, batches()))

    def _evaluate(self, step: int, name: str, batches: Batches) -> Row:
        began = self._clock()
        loss_sum, units = 0.0, 0
        others: defaultdict[str, float] = defaultdict(float)
        for samples in batches:
            result = self._engine.eval_step(
                [self._task.collate(micro_batch, self._engine.device) for micro_batch in samples]
            )
            loss_sum, units = loss_sum + result.loss_sum, units + result.tokens
            for other, total in result.others.items():
                others[other] += total
            self._progress(f"a batch of the evaluation of {name} after step {step}")
        means = {other: total / units for other, total in others.items()}
        return {
            "step": step,
            "set": name,
            "loss": loss_sum / units,
            **means,
            self._unit: units,
            "seconds": self._clock() - began,
        }
