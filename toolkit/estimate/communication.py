"""Seconds of the collectives of one rank: which an engine starts, how large they are, and what hides them.

Sources are the engines themselves: Megatron-core 0.16's ``tensor_parallel/layers.py`` and
``distributed/param_and_grad_buffer.py``, DeepSpeed 0.19's ``runtime/zero``, and for traffic Rajbhandari et
al., "ZeRO" (1910.02054, section 7): stages 0 to 2 move twice the parameters, stage 3 three times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from toolkit.config.schema import EngineName, OffloadDevice, RunConfig
from toolkit.estimate.interconnects import topology_of
from toolkit.estimate.network import (
    Collective,
    Group,
    Link,
    Topology,
    collective_seconds,
    group_along,
    strided_group,
)
from toolkit.estimate.operators import FP32, RankShare
from toolkit.estimate.profile import HardwareProfile
from toolkit.families.base import ModelShape
from toolkit.layout.axes import ALL, EXPERT, ORDER, Axes, Axis
from toolkit.plan.deepspeed import LIVE, PERSISTENCE, accumulates_in_fp32
from toolkit.plan.memory_zero import zero3_setting
from toolkit.plan.types import RunPlan

DATA_AXES = (Axis.CONTEXT, Axis.DATA)  # ranks with the same parameters


@dataclass(frozen=True, slots=True)
class Exposed:
    """Seconds by name of the group (layout/axes.axis_name) that computing waits for."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def __add__(self, other: Exposed) -> Exposed:
        names = {**self.seconds, **other.seconds}
        return Exposed({name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names})

    def __mul__(self, factor: float) -> Exposed:
        return Exposed({name: value * factor for name, value in self.seconds.items()})


def hidden_behind(compute: float, collective: float, contention: float) -> float:
    """Return the seconds by which a ``collective`` prolongs ``compute`` seconds that run at the same time.

    It takes processors and memory bandwidth from the products that hide it: ``contention`` seconds for each
    of its seconds.
    """
    return max(0.0, collective - compute) + contention * min(compute, collective)


def group_name(axes: Axes, along: Collection[Axis]) -> str:
    """Name the group along these axes as :func:`layout.axes.axis_name` does, without its ranks."""
    spanned = [axis for axis in ORDER if axis in along and getattr(axes, axis) > 1]
    divided = [axis for axis in ORDER if getattr(axes, axis) > 1]
    return ALL if len(spanned) > 1 and spanned == divided else "+".join(spanned)


class Network:
    """Seconds of collectives along the axes of a plan."""

    def __init__(self, plan: RunPlan, profile: HardwareProfile) -> None:
        self.topology = measured_topology(topology_of(plan.config.cluster, plan.world), profile)
        self._axes, self._call = plan.axes, profile.call_seconds

    def along(self, kind: Collective, size: float, *axes: Axis) -> float:
        """Return the seconds of a collective of ``size`` bytes of the whole tensor, over ranks that differ
        along ``axes``; 0 for a single rank.
        """
        return self.over(kind, size, _group_along(axes, self._axes, self.topology.domain))

    def among_experts(self, kind: Collective, size: float) -> float:
        axes = self._axes
        group = strided_group(axes.expert, axes.tensor, axes.size, self.topology.domain)
        return self.over(kind, size, group)

    def over(self, kind: Collective, size: float, group: Group) -> float:
        if group.ranks == 1:
            return 0.0
        return self._call + collective_seconds(kind, size, group, self.topology)


def measured_topology(topology: Topology, profile: HardwareProfile) -> Topology:
    """Return ``topology`` with the factors of a calibrated profile."""
    switch = topology.switch_bandwidth
    return replace(
        topology,
        inside=Link(
            bandwidth=topology.inside.bandwidth * profile.inside_factor,
            latency=topology.inside.latency * profile.inside_latency_factor,
        ),
        between=Link(
            bandwidth=topology.between.bandwidth * profile.between_factor,
            latency=topology.between.latency * profile.between_latency_factor,
        ),
        host=replace(topology.host, bandwidth=topology.host.bandwidth * profile.host_factor),
        start=topology.start * profile.inside_latency_factor,
        switch_bandwidth=None if switch is None else switch * profile.inside_factor,
    )


@cache
def _group_along(along: tuple[Axis, ...], axes: Axes, domain: int) -> Group:
    return group_along(along, axes, domain)


@dataclass(frozen=True, slots=True)
class LayerExchanges:
    """Seconds that a decoder layer waits for with one micro-batch, in each direction."""

    forward: Exposed
    backward: Exposed
    recomputed: Exposed  # when its forward pass is repeated


def layer_exchanges(
    plan: RunPlan,
    shape: ModelShape,
    share: RankShare,
    network: Network,
    *,
    backward: float,
    contention: float,
) -> LayerExchanges:
    """Return the collectives inside a layer, whose products take ``backward`` seconds in the backward
    pass.
    """
    megatron = plan.config.engine.name is EngineName.megatron
    stream = share.tokens * shape.hidden_size * share.element
    forward: dict[str, float] = {}
    back: dict[str, float] = {}
    if share.tensor > 1:
        seconds = network.along
        if share.sequence_ranks > 1:  # sequence parallelism: the same bytes as an all-reduce, in two halves
            gather = seconds(Collective.ALL_GATHER, stream, Axis.TENSOR)
            scatter = seconds(Collective.REDUCE_SCATTER, stream, Axis.TENSOR)
            forward[Axis.TENSOR] = 2 * (gather + scatter)
            # Inputs are gathered again, and their gradients scattered, behind products of weights.
            back[Axis.TENSOR] = 2 * gather + hidden_behind(backward / 2, 2 * (gather + scatter), contention)
        else:
            reduce = 2 * seconds(Collective.ALL_REDUCE, stream, Axis.TENSOR)
            forward[Axis.TENSOR] = reduce
            back[Axis.TENSOR] = hidden_behind(backward / 2, reduce, contention) if megatron else reduce
    if share.context > 1:
        queries = shape.num_attention_heads * shape.head_dim / share.tensor
        keys = shape.num_key_value_heads * shape.head_dim / share.tensor
        if megatron:  # keys and values of the whole sequence
            size = share.tokens * share.context * 2 * keys * share.element
            forward[Axis.CONTEXT] = network.along(Collective.ALL_GATHER, size, Axis.CONTEXT)
            back[Axis.CONTEXT] = forward[Axis.CONTEXT] + network.along(
                Collective.REDUCE_SCATTER, size, Axis.CONTEXT
            )
        else:  # queries, keys, values and output change from tokens to heads and back
            size = share.tokens * (2 * queries + 2 * keys) * share.element
            forward[Axis.CONTEXT] = network.along(Collective.ALL_TO_ALL, size, Axis.CONTEXT)
            back[Axis.CONTEXT] = forward[Axis.CONTEXT]
    if share.expert > 1:
        size = stream / share.sequence_ranks * shape.num_experts_per_tok
        forward[EXPERT] = back[EXPERT] = 2 * network.among_experts(Collective.ALL_TO_ALL, size)
    return LayerExchanges(Exposed(forward), Exposed(back), Exposed(forward))


@dataclass(frozen=True, slots=True)
class EndExchanges:
    """Seconds that the embedding and the output layer wait for with one micro-batch."""

    embedding: Exposed
    head_forward: Exposed
    head_backward: Exposed


def end_exchanges(plan: RunPlan, shape: ModelShape, share: RankShare, network: Network) -> EndExchanges:
    """Return the collectives of a vocabulary that tensor ranks divide.

    Each rank embeds the tokens of its rows, and the results are summed. The cross-entropy exchanges the
    maximum, the sum and the target's logit of each token. Backward sums the gradient of the hidden states.
    """
    stream = share.tokens * shape.hidden_size * share.element
    embedding: dict[str, float] = {}
    forward: dict[str, float] = {}
    back: dict[str, float] = {}

    def seconds(kind: Collective, size: float) -> float:
        return network.along(kind, size, Axis.TENSOR)

    if share.tensor > 1 and plan.megatron is not None:
        embedding[Axis.TENSOR] = seconds(
            Collective.REDUCE_SCATTER if share.sequence_ranks > 1 else Collective.ALL_REDUCE, stream
        )
    if share.head_ranks > 1:
        forward[Axis.TENSOR] = 3 * seconds(Collective.ALL_REDUCE, share.tokens * FP32)
        if share.sequence_ranks > 1:
            # Hidden states are gathered in both passes, and their gradients scattered.
            gather = seconds(Collective.ALL_GATHER, stream)
            forward[Axis.TENSOR] += gather
            back[Axis.TENSOR] = gather + seconds(Collective.REDUCE_SCATTER, stream)
        else:
            back[Axis.TENSOR] = seconds(Collective.ALL_REDUCE, stream)
    return EndExchanges(Exposed(embedding), Exposed(forward), Exposed(back))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateExchanges:
    """Seconds of collectives over parameters and gradients, before any of it is hidden.

    Attributes:
        name: of the group.
        gather_forward, gather_backward: parameters, in each micro-batch (ZeRO 3).
        reduce: gradients, in each micro-batch (ZeRO 2 and 3) or once a step.
        every_micro_batch: whether gradients are reduced in each micro-batch.
        gather_step: updated parameters, once a step.
        overlaps_reduce, overlaps_gather: whether they run behind forward and backward passes.
    """

    name: str
    gather_forward: float = 0.0
    gather_backward: float = 0.0
    reduce: float = 0.0
    every_micro_batch: bool = False
    gather_step: float = 0.0
    overlaps_reduce: bool = False
    overlaps_gather: bool = False


def state_exchanges(
    plan: RunPlan, network: Network, elements: float, experts: float, element: int
) -> StateExchanges:
    """Return the exchanges of a rank with ``elements`` parameters, and ``experts`` that fewer ranks share.

    Args:
        element: bytes of an element.
    """
    name, stage = group_name(plan.axes, DATA_AXES), plan.config.zero.stage
    if not name:
        return StateExchanges(name="")
    # Experts are reduced over the ranks that have them, which move less.
    whole = elements + experts / plan.axes.expert

    def seconds(kind: Collective, bytes_each: float) -> float:
        return network.along(kind, whole * bytes_each, *DATA_AXES)

    if plan.megatron is not None:
        ddp = plan.megatron["ddp"]
        return StateExchanges(
            name=name,
            reduce=seconds(Collective.REDUCE_SCATTER if stage else Collective.ALL_REDUCE, FP32),
            gather_step=seconds(Collective.ALL_GATHER, element) if stage else 0.0,
            overlaps_reduce=bool(ddp["overlap_grad_reduce"]),
            overlaps_gather=bool(stage and ddp["overlap_param_gather"]),
        )
    zero = (plan.deepspeed or {}).get("zero_optimization", {})
    if stage == 3:
        return _zero3_exchanges(plan, network, whole, element, zero)
    all_reduce = stage == 0 or zero.get("use_multi_rank_bucket_allreduce", True)
    return StateExchanges(
        name=name,
        reduce=seconds(Collective.ALL_REDUCE if all_reduce else Collective.REDUCE_SCATTER, element),
        every_micro_batch=stage == 2,
        gather_step=seconds(Collective.ALL_GATHER, element) if stage else 0.0,
        overlaps_reduce=bool(zero.get("overlap_comm")),
    )


def _zero3_exchanges(
    plan: RunPlan, network: Network, whole: float, element: int, zero: Mapping[str, Any]
) -> StateExchanges:
    """Return the exchanges of a rank with ``whole`` parameters under ZeRO 3, with DeepSpeed's settings
    ``zero``.
    """
    config = plan.config.zero
    compressed = element * (0.5 if config.quantized_weights else 1.0)
    # Small parameters stay gathered from step to step. The others stay from the forward to the backward pass
    # if it needs them soon, which it does for the last layers.
    threshold = zero3_setting(zero, "param_persistence_threshold", PERSISTENCE)
    kept = min(whole, sum(spec.numel for spec in plan.known_parameters if spec.numel <= threshold))
    soon = zero3_setting(zero, "max_reuse_distance", LIVE) / 2
    missing = max(0.0, whole - kept - soon) * compressed
    if config.hpz_partition_size > 1:
        node = Group(config.hpz_partition_size, config.hpz_partition_size)
        again = network.over(Collective.ALL_GATHER, missing, node)
    else:
        again = network.along(Collective.ALL_GATHER, missing, *DATA_AXES)
    reduced = element * (0.25 if config.quantized_gradients else 1.0)
    gathered = (whole - kept) * compressed
    return StateExchanges(
        name=group_name(plan.axes, DATA_AXES),
        gather_forward=network.along(Collective.ALL_GATHER, gathered, *DATA_AXES) if gathered else 0.0,
        gather_backward=again if missing else 0.0,
        reduce=network.along(Collective.REDUCE_SCATTER, whole * reduced, *DATA_AXES),
        every_micro_batch=True,
        gather_step=network.along(Collective.ALL_GATHER, kept * element, *DATA_AXES) if kept else 0.0,
        overlaps_reduce=bool(zero.get("overlap_comm")),
    )


def transfer_seconds(config: RunConfig, network: Network, elements: float, element: int) -> float:
    """Return the seconds per step in which gradients move to the host and parameters back, for offloaded
    optimizer states of ``elements`` parameters of the rank.
    """
    if config.offload.optimizer is OffloadDevice.none:
        return 0.0
    gradient = FP32 if accumulates_in_fp32(config) else element
    return elements * (gradient + element) / network.topology.host.bandwidth
