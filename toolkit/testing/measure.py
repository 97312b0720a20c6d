"""What is compared between engines, taken through the engine's protocol alone: losses, norms, gradients, weights, evaluation.

Gradients need no hooks: plain SGD's first step gives them as ``(w0 - w1) / lr``. With a learning rate of 2^20 the old weight is lost
beside the update, so the quotient has the gradient's own 24 bits; a power of two adds no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import nn
from torch.nn import functional

from toolkit.checkpoint.shard import StateReader
from toolkit.engine.build import build_engine, first_weights
from toolkit.engine.protocol import Engine, MicroBatch, Objective, StepSettings
from toolkit.plan.types import RunPlan
from toolkit.testing.parity import STEPS, Batches, Trace, samples, step_all, whole_weights
from toolkit.testing.tiny import micro_batches
from toolkit.train.task import NextToken, text_task

GRADIENT_LR = 2.0**20
FirstWeights = Callable[[RunPlan], StateReader]
EVALUATION_STEP = 1000  # its global batch is held out: no run here comes so far


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest differences over all steps and elements; as a tolerance, the largest allowed ones.

    Attributes:
        loss, norm: absolute, over the steps.
        gradient: of the first step, over parameters, each relative to that parameter's largest gradient; None where the
            optimizer does not show it (Adam).
        weight: absolute, of the final weights.
        evaluation: absolute, of the mean loss on held-out samples after the last step.
    """

    loss: float
    norm: float
    gradient: float | None
    weight: float
    evaluation: float

    def over(self, allowed: Differences) -> list[str]:
        """Names of the figures that are not within ``allowed``; what is not a number is within nothing."""
        pairs = ((item.name, getattr(self, item.name), getattr(allowed, item.name)) for item in fields(self))
        return [name for name, value, bound in pairs if value is not None and not value <= (bound or 0.0)]


@dataclass(frozen=True)
class Measured:
    """What one run shows. Tensors are whole, fp32, by canonical name; on ranks other than 0 there are none."""

    trace: Trace
    evaluation: float
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gaps: tuple[float, ...] = ()  # by step, of an oracle with experts: see RoutingGaps

    def differences(self, oracle: Measured, steps: int | None = None) -> Differences:
        """Over the first ``steps`` steps. Weights and evaluation are those after the last step in any case."""
        ours, theirs = (Trace(side.trace.results[:steps], side.trace.weights) for side in (self, oracle))
        distance = ours.distance(theirs) if ours.results else None
        return Differences(
            loss=distance.loss if distance else 0.0,
            norm=distance.norm if distance else 0.0,
            gradient=relative(self.gradients, oracle.gradients) if oracle.gradients else None,
            weight=max(
                float((self.trace.weights[name] - right).abs().max())
                for name, right in oracle.trace.weights.items()
            ),
            evaluation=abs(self.evaluation - oracle.evaluation),
        )

    def departure(self, oracle: Measured, loss: float) -> int | None:
        """The first step whose loss is more than ``loss`` from the oracle's; None: there is none."""
        pairs = zip(self.trace.losses, oracle.trace.losses, strict=True)
        return next((step for step, (a, b) in enumerate(pairs) if not abs(a - b) <= loss), None)


def relative(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, as a part of its largest element in ``theirs``."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(_relative(ours[name], right) for name, right in theirs.items())


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    apart, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return apart / largest if largest else (0.0 if apart == 0 else float("inf"))


def measure(
    rank: int,
    ranks: int,
    plan: RunPlan,
    *,
    steps: int = STEPS,
    gradients: bool = False,
    gaps: bool = False,
    first: FirstWeights = first_weights,
    task: Objective | None = None,
    batches: Batches = micro_batches,
) -> Measured:
    """A run from its first weights, on this rank of ``testing/dist.py``. Collective.

    Args:
        gradients: take those of the first step too; the plan's optimizer is SGD without momentum, decay and clipping.
        gaps: watch the routers; ``local`` only.
        first: what gives the first weights.
        task, batches: other than the plan's own, for runs that are wrong on purpose.
    """
    assert ranks == plan.axes.size, f"{ranks} ranks for a plan of {plan.axes.size}"
    watch = RoutingGaps(batches) if gaps else None
    if watch is not None:
        task, batches = watch, watch.batches
    engine = build_engine(plan, task or text_task(plan), rank=rank, local_rank=rank)
    try:
        found = first_gradients(engine, plan, rank, batches, first) if gradients else {}
        engine.load(first(plan))
        results = step_all(engine, plan, range(steps), rank=rank, batches=batches)
        weights = whole_weights(engine, plan, rank)
        evaluated = engine.eval_step(samples(engine, plan, EVALUATION_STEP, rank))
    finally:
        engine.close()
    return Measured(
        Trace(tuple(results), weights),
        evaluated.loss_sum / evaluated.tokens,
        found,
        tuple(watch.gaps[step] for step in range(steps)) if watch is not None else (),
    )


def first_gradients(
    engine: Engine,
    plan: RunPlan,
    rank: int,
    batches: Batches = micro_batches,
    first: FirstWeights = first_weights,
) -> dict[str, torch.Tensor]:
    """Those of the first step, whole, on rank 0. Leaves useless weights: load again. Collective."""
    optim = plan.config.optim
    assert optim.momentum == optim.weight_decay == optim.clip == 0, (
        "the first step of plain SGD is the gradient"
    )
    engine.load(first(plan))
    before = whole_weights(engine, plan, rank)
    engine.train_step(samples(engine, plan, 0, rank, batches), StepSettings(0, GRADIENT_LR))
    after = whole_weights(engine, plan, rank)
    return {name: (weight - after[name]) / GRADIENT_LR for name, weight in before.items()}


class RoutingGaps(NextToken):
    """Notes how close routers come to another choice: by step, the smallest gap, over tokens and layers, between the logit of the
    last expert chosen and of the first one not chosen. Where it is as small as rounding, another order of summation may
    choose another expert, and the run goes another way from there without anything being wrong."""

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
        hooks = [router.register_forward_hook(self._note) for router in routers]
        try:
            return super().loss_sum(model, batch)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _note(self, router: nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        chosen: int = router.top_k  # type: ignore[assignment]  # an attribute of transformers' routers
        logits = functional.linear(inputs[0].flatten(0, -2), router.weight)  # type: ignore[arg-type]
        top = logits.topk(chosen + 1, dim=-1).values
        gap = float((top[:, chosen - 1] - top[:, chosen]).min())
        self.gaps[self._step] = min(gap, self.gaps.get(self._step, gap))
