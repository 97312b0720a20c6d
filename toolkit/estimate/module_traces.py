"""Traces of a model without a family for every micro-batch of a search, from a few of them.

What a pass computes, moves and stores grows by the same with each sample, so two micro-batches give a line,
and a third one between them checks it. The peak is the largest of several sums, each on a line of its own: in
a small micro-batch that with the gradient of the largest weight, in a large one that with the most
activations. It is interpolated between neighbours of the three, which gives at least the peak. A micro-batch
of one sample is traced: torch does not copy a tensor for another order of dims of size 1. Modules that are
not on the line, such as those that compare all samples of a micro-batch with each other, are traced with
every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from toolkit.config.schema import (
    EngineConfig,
    EngineName,
    OffloadConfig,
    ParallelConfig,
    RunConfig,
    ZeroConfig,
)
from toolkit.errors import PlanError, Problem, Severity
from toolkit.plan.make import draft_plan, make_plan
from toolkit.plan.trace import ModuleTrace, NotTraced, OperatorWork
from toolkit.plan.types import RunPlan, World

Tracer = Callable[[RunPlan], ModuleTrace | NotTraced]

LOW, HIGH = 2, 32  # micro-batches of the line; it is shorter if the global batch is smaller
TOLERANCE = 0.01  # relative difference of the micro-batch between them from the line
NO_WORK = OperatorWork(0.0, 0.0, 0.0)


class ModuleTraces:
    """Traces of the model of one run, each made when it is first needed.

    Args:
        config: the run, without a family.
        world: its machines.
        trace: of the model and the micro-batch of a plan (train/trace.py), which takes seconds.
        most: samples of the largest micro-batch.
    """

    def __init__(self, config: RunConfig, world: World, trace: Tracer, *, most: int) -> None:
        self._config, self._world, self._trace = config, world, trace
        self._high = min(HIGH, 1 << (most.bit_length() - 1))
        self._traced: dict[tuple[str, int], ModuleTrace] = {}

    @property
    def traced(self) -> tuple[tuple[str, int], ...]:
        """Recomputation and micro-batch of each trace that was made."""
        return tuple(self._traced)

    def get(self, recomputation: str, micro_batch: int) -> ModuleTrace:
        """Return the trace of a micro-batch with this ``train.activation_checkpointing``.

        Raises:
            PlanError: the model cannot be traced.
            UserError: the model, the task or the data cannot be built as configured.
        """
        if (recomputation, micro_batch) not in self._traced and micro_batch > LOW:
            line = self._line(recomputation)
            if line is not None:
                low, between, high = line
                ends = (low, between) if micro_batch < between.micro_batch else (between, high)
                return interpolate(*ends, micro_batch)
        return self._exact(recomputation, micro_batch)

    def plan(self, config: RunConfig, world: World) -> RunPlan:
        """Call :func:`make_plan` with the trace of a layout of the same run.

        Raises:
            UserError: as :func:`make_plan` and :meth:`get`.
        """
        plan = make_plan(config, world)
        trace = self.get(config.train.activation_checkpointing, plan.batch.micro_batch)
        return make_plan(config, world, trace)

    def _line(self, recomputation: str) -> tuple[ModuleTrace, ModuleTrace, ModuleTrace] | None:
        """Three traces on one line, by rising micro-batch; None if there is no such line."""
        middle = 1 << (self._high.bit_length() // 2)
        if not LOW < middle < self._high:
            return None
        low, between, high = (self._exact(recomputation, size) for size in (LOW, middle, self._high))
        line = interpolate(low, high, middle)
        bounded = between.peak_bytes <= (1 + TOLERANCE) * line.peak_bytes
        return (low, between, high) if bounded and _agree(line, between) else None

    def _exact(self, recomputation: str, micro_batch: int) -> ModuleTrace:
        key = recomputation, micro_batch
        if key not in self._traced:
            found = self._trace(self._plan_alone(recomputation, micro_batch))
            if isinstance(found, NotTraced):
                raise PlanError(_not_traced(self._config, found.reason))
            self._traced[key] = found
        return self._traced[key]

    def _plan_alone(self, recomputation: str, micro_batch: int) -> RunPlan:
        """Return the plan of one micro-batch on one rank, which computes the same as a rank of any layout."""
        train = replace(
            self._config.train,
            micro_batch=micro_batch,
            global_batch=micro_batch,
            batch_ramp=type(self._config.train.batch_ramp)(),
            activation_checkpointing=recomputation,
        )
        config = replace(
            self._config,
            engine=EngineConfig(name=EngineName.local),
            parallel=ParallelConfig(),
            zero=ZeroConfig(),
            offload=OffloadConfig(),
            train=train,
        )
        draft = draft_plan(config, replace(self._world, ranks=1, ranks_per_node=1))
        if draft.plan is None:
            raise PlanError(*(found for found in draft.problems() if found.severity is Severity.ERROR))
        return draft.plan


def interpolate(low: ModuleTrace, high: ModuleTrace, micro_batch: int) -> ModuleTrace:
    """Return the trace of ``micro_batch`` samples on the line through two others."""
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)

    def at(one: float, other: float) -> float:
        return one + share * (other - one)

    def flops(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {name: at(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}

    def work(one: Mapping[str, OperatorWork], other: Mapping[str, OperatorWork]) -> dict[str, OperatorWork]:
        found = {}
        for name in {**one, **other}:
            first, last = one.get(name, NO_WORK), other.get(name, NO_WORK)
            found[name] = first.plus(last.plus(first, -1), share)
        return found

    return replace(
        low,
        micro_batch=micro_batch,
        saved_bytes=round(at(low.saved_bytes, high.saved_bytes)),
        peak_bytes=round(at(low.peak_bytes, high.peak_bytes)),
        forward_flops=flops(low.forward_flops, high.forward_flops),
        backward_flops=flops(low.backward_flops, high.backward_flops),
        forward_work=work(low.forward_work, high.forward_work),
        backward_work=work(low.backward_work, high.backward_work),
        recomputed_flops=at(low.recomputed_flops, high.recomputed_flops),
        operators=round(at(low.operators, high.operators)),
    )


def _not_traced(config: RunConfig, reason: str) -> Problem:
    key, model = config.model.source_key, config.model
    return Problem(
        key,
        f"{key}={model.target or model.hf.architecture}: {reason}",
        "layouts of a model without a family are compared by traces of its forward and backward pass",
        "add --trace if samples must be read, or change the code at that line",
    )


def _agree(one: ModuleTrace, other: ModuleTrace) -> bool:
    return all(
        abs(left - right) <= TOLERANCE * right
        for left, right in zip(_figures(one), _figures(other), strict=True)
    )


def _figures(trace: ModuleTrace) -> tuple[float, ...]:
    """Return the figures from which memory and time are computed, except for the peak."""
    works = [*trace.forward_work.values(), *trace.backward_work.values()]
    return (
        trace.saved_bytes,
        trace.hardware_flops,
        trace.recomputed_flops,
        sum(work.moved_bytes for work in works),
        sum(work.calls for work in works),
    )
