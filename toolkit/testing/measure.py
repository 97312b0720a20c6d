"""Measure what engines are compared by, through their protocol only.

Gradients need no hooks: the first step of plain SGD gives them as ``(w0 - w1) / lr``. With a learning rate of
2^20 the old weight is negligible, so the quotient has the gradient's own 24 bits; a power of two adds no
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import nn
from torch.nn import functional

from toolkit.checkpoint.shard import StateReader
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import Engine, MicroBatch, Objective, StepSettings
from toolkit.plan.types import RunPlan
from toolkit.testing.parity import STEPS, Batches, RunTrace, gather_weights, rank_samples, train_steps
from toolkit.testing.tiny import micro_batches
from toolkit.train.task import NextTokenTask, text_task

GRADIENT_LR = 2.0**20
OpenInitialWeights = Callable[[RunPlan], StateReader]
EVALUATION_STEP = 1000  # its global batch is held out, since no run trains that long


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Maximum differences over all steps and elements, or tolerances for them.

    Attributes:
        loss, norm: absolute, over the steps.
        gradient: of the first step, over parameters, relative to each parameter's largest gradient; None if
            the optimizer does not show it (Adam).
        weight: absolute, of the final weights.
        evaluation: absolute, of the mean loss on held-out samples after the last step.
    """

    loss: float
    norm: float
    gradient: float | None
    weight: float
    evaluation: float

    def over(self, allowed: Differences) -> list[str]:
        """Return the names of the figures that exceed ``allowed``; NaN always does."""
        pairs = ((item.name, getattr(self, item.name), getattr(allowed, item.name)) for item in fields(self))
        return [name for name, value, bound in pairs if value is not None and not value <= (bound or 0.0)]


@dataclass(frozen=True)
class Measured:
    """Results of one run. Tensors are whole, fp32, by canonical name; ranks other than 0 have none."""

    trace: RunTrace
    evaluation: float
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gaps: tuple[float, ...] = ()  # by step, for a reference with experts: see RoutingGaps

    def differences(self, reference: Measured, steps: int | None = None) -> Differences:
        """Differences over the first ``steps`` steps, with the final weights and evaluation."""
        ours, theirs = (
            RunTrace(side.trace.results[:steps], side.trace.weights) for side in (self, reference)
        )
        distance = ours.distance(theirs) if ours.results else None
        return Differences(
            loss=distance.loss if distance else 0.0,
            norm=distance.norm if distance else 0.0,
            gradient=relative_difference(self.gradients, reference.gradients)
            if reference.gradients
            else None,
            weight=max(
                float((self.trace.weights[name] - right).abs().max())
                for name, right in reference.trace.weights.items()
            ),
            evaluation=abs(self.evaluation - reference.evaluation),
        )

    def first_different_step(self, reference: Measured, loss: float) -> int | None:
        """Return the first step whose loss differs from the reference's by more than ``loss``, or None."""
        pairs = zip(self.trace.losses, reference.trace.losses, strict=True)
        return next((step for step, (a, b) in enumerate(pairs) if not abs(a - b) <= loss), None)


def relative_difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the maximum over tensors of the largest difference relative to the largest element in
    ``theirs``.
    """
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(_relative_tensor_difference(ours[name], right) for name, right in theirs.items())


def _relative_tensor_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return difference / largest if largest else (0.0 if difference == 0 else float("inf"))


def measure(
    rank: int,
    ranks: int,
    plan: RunPlan,
    *,
    steps: int = STEPS,
    gradients: bool = False,
    gaps: bool = False,
    first: OpenInitialWeights = open_initial_weights,
    task: Objective | None = None,
    batches: Batches = micro_batches,
) -> Measured:
    """Train from the first weights on this rank of ``testing/dist.py``. Collective.

    Args:
        gradients: also measure those of the first step; the plan's optimizer must be SGD without momentum,
            decay and clipping.
        gaps: record routing gaps; for the local engine only.
        first: returns the first weights.
        task, batches: replace the plan's own, for deliberately wrong runs.
    """
    assert ranks == plan.axes.size, f"{ranks} ranks for a plan of {plan.axes.size}"
    watch = RoutingGaps(batches) if gaps else None
    if watch is not None:
        task, batches = watch, watch.batches
    engine = build_engine(plan, task or text_task(plan), rank=rank, local_rank=rank)
    try:
        found = first_gradients(engine, plan, rank, batches, first) if gradients else {}
        engine.load(first(plan))
        results = train_steps(engine, plan, range(steps), rank=rank, batches=batches)
        weights = gather_weights(engine, plan, rank)
        evaluated = engine.eval_step(rank_samples(engine, plan, EVALUATION_STEP, rank))
    finally:
        engine.close()
    return Measured(
        RunTrace(tuple(results), weights),
        evaluated.loss_sum / evaluated.tokens,
        found,
        tuple(watch.gaps[step] for step in range(steps)) if watch is not None else (),
    )


def first_gradients(
    engine: Engine,
    plan: RunPlan,
    rank: int,
    batches: Batches = micro_batches,
    first: OpenInitialWeights = open_initial_weights,
) -> dict[str, torch.Tensor]:
    """Return the whole gradients of the first step, on rank 0. Leaves unusable weights: load again.
    Collective.
    """
    optim = plan.config.optim
    assert optim.momentum == optim.weight_decay == optim.clip == 0, (
        "the first step of plain SGD is the gradient"
    )
    engine.load(first(plan))
    before = gather_weights(engine, plan, rank)
    engine.train_step(rank_samples(engine, plan, 0, rank, batches), StepSettings(0, GRADIENT_LR))
    after = gather_weights(engine, plan, rank)
    return {name: (weight - after[name]) / GRADIENT_LR for name, weight in before.items()}


class RoutingGaps(NextTokenTask):
    """Records how close routers are to another choice.

    ``gaps`` has by step the minimum, over tokens and layers, of the difference between the logits of the last
    expert chosen and the first one not chosen. If it is as small as rounding, another order of summation may
    choose another expert, and two correct runs diverge.
    """

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._batches = batches
        self._step = 0
        self.gaps: dict[int, float] = {}

    def batches(self, plan: RunPlan, step: int, data_rank: int) -> Sequence[MicroBatch]:
        self._step = step
        return self._batches(plan, step, data_rank)

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        assert routers, "gaps are of models with experts"
        hooks = [router.register_forward_hook(self._record) for router in routers]
        try:
            return super().loss_sum(model, batch)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _record(self, router: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        chosen: int = router.top_k  # type: ignore[assignment]  # an attribute of transformers' routers
        logits = functional.linear(inputs[0].flatten(0, -2), router.weight)  # type: ignore[arg-type]
        top = logits.topk(chosen + 1, dim=-1).values
        gap = float((top[:, chosen - 1] - top[:, chosen]).min())
        self.gaps[self._step] = min(gap, self.gaps.get(self._step, gap))
