"""Compare the training trace of an engine with that of the local engine, the reference.

    reference = run_trace(tiny_plan())                       # the local engine
    traces = pool.run(trace_on_rank, tiny_plan(ranks=2, zero__stage=2))
    check_parity(traces[0], reference)

A control is a deliberately wrong run; :func:`check_control` asserts that its difference is large, since
otherwise the test would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import MASTER, WEIGHT, Shard, TensorKey
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import Engine, MicroBatch, Objective, StepResult, StepSettings
from toolkit.plan.schedule import learning_rate
from toolkit.plan.types import RunPlan
from toolkit.testing.tiny import micro_batches
from toolkit.train.task import NextTokenTask, text_task

STEPS = 20
# The minimum decrease of the reference's loss in nats, because runs that learn nothing always agree.
REQUIRED_FALL = 0.3

Batches = Callable[[RunPlan, int, int], Sequence[MicroBatch]]  # plan, step, data rank


@dataclass(frozen=True)
class Distance:
    """Maximum absolute differences over all steps, and over all elements of the final weights."""

    loss: float
    norm: float
    weight: float

    def times(self, tolerance: Distance) -> float:
        """Return the largest of the three as a multiple of its tolerance."""
        return max(self.loss / tolerance.loss, self.norm / tolerance.norm, self.weight / tolerance.weight)


TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-4)


@dataclass(frozen=True)
class RunTrace:
    """Results of a run. ``weights`` are whole, fp32, by canonical name; empty on ranks other than 0."""

    results: tuple[StepResult, ...]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def norms(self) -> list[float]:
        return [result.grad_norm for result in self.results]

    def distance(self, other: RunTrace) -> Distance:
        assert len(self.results) == len(other.results), "traces of the same steps"
        assert self.weights.keys() == other.weights.keys(), self.weights.keys() ^ other.weights.keys()
        weight = max(
            float((self.weights[name] - theirs).abs().max()) for name, theirs in other.weights.items()
        )
        return Distance(
            _max_difference(self.losses, other.losses), _max_difference(self.norms, other.norms), weight
        )


def run_trace(
    plan: RunPlan,
    *,
    rank: int = 0,
    steps: int = STEPS,
    task: Objective | None = None,
    batches: Batches = micro_batches,
) -> RunTrace:
    """Train from the first weights. Collective."""
    engine = build_engine(plan, task or text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    results = train_steps(engine, plan, range(steps), rank=rank, batches=batches)
    weights = gather_weights(engine, plan, rank)
    engine.close()
    return RunTrace(tuple(results), weights)


def gather_weights(engine: Engine, plan: RunPlan, rank: int) -> dict[str, torch.Tensor]:
    """Whole weights by canonical name on rank 0, masters if there are any. Collective."""
    state = gather_tensors(engine.shards(), rank, plan.axes.size)
    weights = {key.name: value.float() for key, value in state.items() if key.state == WEIGHT}
    return weights | {key.name: value for key, value in state.items() if key.state == MASTER}


def trace_on_rank(rank: int, ranks: int, plan: RunPlan, **settings: Any) -> RunTrace:
    """:func:`run_trace` as a function for ``testing/dist.py``."""
    assert ranks == plan.axes.size
    return run_trace(plan, rank=rank, **settings)


def train_steps(
    engine: Engine, plan: RunPlan, steps: range, *, rank: int = 0, batches: Batches = micro_batches
) -> list[StepResult]:
    return [
        engine.train_step(
            rank_samples(engine, plan, step, rank, batches), StepSettings(step, learning_rate(plan, step))
        )
        for step in steps
    ]


def rank_samples(
    engine: Engine, plan: RunPlan, step: int, rank: int, batches: Batches = micro_batches
) -> list[MicroBatch]:
    """Return the micro-batches of ``rank`` in ``step``, on the engine's device."""
    data_rank = plan.axes.coordinates(rank).data
    return [
        {name: tensor.to(engine.device) for name, tensor in batch.items()}
        for batch in batches(plan, step, data_rank)
    ]


def check_parity(trace: RunTrace, reference: RunTrace, tolerance: Distance = TOLERANCE) -> None:
    """Assert that the traces agree and that the reference's loss decreased."""
    fall = reference.losses[0] - reference.losses[-1]
    assert fall >= REQUIRED_FALL, f"invalid cell: the reference's loss fell by {fall:.3f} only"
    distance = trace.distance(reference)
    assert distance.times(tolerance) <= 1, f"{distance} against {tolerance}"


def check_control(trace: RunTrace, reference: RunTrace, tolerance: Distance = TOLERANCE) -> None:
    """Assert that a deliberately wrong run differs from the reference by more than 10 tolerances."""
    distance = trace.distance(reference)
    assert distance.times(tolerance) > 10, f"a wrong run passes as correct: {distance} against {tolerance}"


class DoubledGradients(NextTokenTask):
    """A control: the loss is right, but its gradient is doubled. Adam does not show this."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        loss = super().loss_sum(model, batch)
        return loss + (loss - loss.detach())


def repeat_first_rank(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """Return the samples of a control, in which data rank 1 gets those of data rank 0."""
    return micro_batches(plan, step, 0 if data_rank == 1 else data_rank)


def gather_tensors(shards: Sequence[Shard], rank: int, ranks: int) -> dict[TensorKey, torch.Tensor]:
    """Assemble every tensor from all ranks' shards on rank 0; other ranks get nothing. Collective.

    Raises:
        AssertionError: an element is not covered by exactly the replicas that its shards declare.
    """
    mine = [
        (shard.key, shard.global_shape, shard.box, shard.data.detach().cpu().clone(), shard.replicas)
        for shard in shards
        if not shard.mirror
    ]
    every: list[Any] | None = [None] * ranks if rank == 0 else None
    if ranks == 1:
        every = [mine]
    else:
        torch.distributed.gather_object(mine, every)
    found: dict[TensorKey, torch.Tensor] = {}
    covered: dict[TensorKey, torch.Tensor] = {}
    for key, shape, box, data, replicas in (shard for of_rank in every or () for shard in of_rank):
        index = tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
        found.setdefault(key, torch.empty(shape, dtype=data.dtype))[index] = data
        covered.setdefault(key, torch.zeros(shape, dtype=torch.float64))[index] += 1 / replicas
    for key, share in covered.items():
        assert torch.allclose(share, torch.ones_like(share)), (
            f"{key} is covered {share.min():g} to {share.max():g} times"
        )
    return found


def _max_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
