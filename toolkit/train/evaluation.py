"""Evaluate losses on named sets, at intervals and at the end."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from toolkit.config.schema import OnNonfinite
from toolkit.engine.protocol import Engine
from toolkit.errors import InputError, Problem
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.sink import Row
from toolkit.plan.types import RunPlan
from toolkit.step_parts import EVALUATION
from toolkit.train.metrics import EvaluationMetrics
from toolkit.train.micro_batches import prepare_batch
from toolkit.train.task import Task

log = logging.getLogger(__name__)

Batches = Iterable[Sequence[np.ndarray]]  # this rank's micro-batches, a global batch at a time


class Evaluation(Hook):
    """Evaluate every set each ``eval.every`` steps, after the last step, and where the budget ends the run;
    never if ``eval.every`` is 0.

    It comes before ``Checkpoints`` among the hooks, so that the rows up to a checkpoint's step are written
    before it. After an agreed stop saving is more urgent, and the next start evaluates instead. Evaluation
    changes neither the order of the training samples nor the random state.

    Args:
        sets: by name; every call returns the same batches.
        missing: returns whether a step has no row yet. Collective.
        metrics: the user's own, which the task updates; None if there are none.
        on_eval: receives the row of each set.
        on_batch: receives a description of each completed batch.
    """

    part = EVALUATION

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        task: Task,
        sets: Mapping[str, Callable[[], Batches]],
        *,
        metrics: EvaluationMetrics | None = None,
        missing: Callable[[int], bool],
        on_eval: Callable[[Row], None],
        on_batch: Callable[[str], None] = lambda what: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every, self._steps, self._unit = plan.config.eval.every, plan.config.train.steps, plan.unit
        self._engine, self._task, self._sets, self._metrics = engine, task, sets, metrics
        self._stop_on_nonfinite = plan.config.train.on_nonfinite is not OnNonfinite.skip
        self._missing, self._on_eval, self._on_batch, self._clock = missing, on_eval, on_batch, clock

    def on_start(self, step: int) -> None:
        if step and self._due(step) and self._missing(step):
            self._evaluate_all(step)

    def on_step(self, completed: CompletedStep) -> None:
        ends = completed.last or completed.consensus.budget_spent
        due = self._due(completed.step) or (ends and self._every > 0)
        if due and not completed.consensus.stop:
            self._evaluate_all(completed.step)

    def _due(self, step: int) -> bool:
        return self._every > 0 and (step % self._every == 0 or step == self._steps)

    def _evaluate_all(self, step: int) -> None:
        for name, batches in self._sets.items():
            self._on_eval(self._evaluate(step, name, batches()))

    def _evaluate(self, step: int, name: str, batches: Batches) -> Row:
        start = self._clock()
        loss_sum, units = 0.0, 0
        others: defaultdict[str, float] = defaultdict(float)
        if self._metrics is not None:
            self._metrics.reset()
        for samples in batches:
            result = self._engine.eval_step(
                [prepare_batch(self._task, micro_batch, self._engine.device) for micro_batch in samples]
            )
            loss_sum, units = loss_sum + result.loss_sum, units + result.tokens
            for other, total in result.others.items():
                others[other] += total
            self._on_batch(f"a batch of the evaluation of {name} after step {step}")
        if units == 0:
            raise InputError(
                Problem(
                    "eval.sets",
                    f"eval.sets={name}: its samples have 0 {self._unit}",
                    "the loss of an evaluation is a mean over what the task counts",
                    "correct units of the task or the data of the set, or leave the set out of eval.sets",
                )
            )
        return {
            "step": step,
            "set": name,
            "loss": loss_sum / units,
            **{other: total / units for other, total in others.items()},
            **self._compute_metrics({*others, self._unit}),
            self._unit: units,
            "seconds": self._clock() - start,
        }

    def _compute_metrics(self, taken: set[str]) -> dict[str, float]:
        """Return the results of the user's metrics over all ranks. Collective.

        Raises:
            ConfigError: a result is NaN or infinite, and ``train.on_nonfinite`` is not skip.
        """
        if self._metrics is None:
            return {}
        results = self._metrics.compute(taken)
        problem = self._metrics.check_finite(results)
        if problem is not None and self._stop_on_nonfinite:
            raise problem
        if problem is not None:
            log.warning(str(problem))
        return results
