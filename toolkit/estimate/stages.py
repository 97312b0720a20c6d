"""Seconds of a micro-batch in each pipeline stage: the passes through its layers, and what they wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.kernels import AttentionKernel
from toolkit.estimate.communication import Exposed, LayerExchanges, Network, end_exchanges, layer_exchanges
from toolkit.estimate.compute import device_seconds, pass_seconds
from toolkit.estimate.operators import (
    Elementwise,
    Operator,
    RankShare,
    TracedCalls,
    Work,
    attention_work,
    embedding_work,
    head_work,
    layer_work,
)
from toolkit.estimate.profile import HardwareProfile
from toolkit.families.base import ModelShape
from toolkit.plan.megatron import virtual_stages
from toolkit.plan.pipeline_stages import stage_chunks, stage_layers
from toolkit.plan.rank_parameters import is_expert_parameter, rank_parameters
from toolkit.plan.recomputation import recomputation_keys
from toolkit.plan.trace import ModuleTrace, OperatorWork
from toolkit.plan.types import Device, RunPlan

LOCAL_LAYERS = "megatron-core"  # the name of kernels.layers without Transformer Engine
# Bytes for each parameter and micro-batch: a 16-bit gradient is written, read, and added to the fp32 sum.
GRADIENT_WRITE_BYTES = 2
GRADIENT_BYTES = GRADIENT_WRITE_BYTES + 2 + 2 * 4
# Operators that take the host as long as exchanging the messages of one pass with the neighbouring stages,
# and the schedule's own work.
MESSAGE_OPERATORS = 5
NOTHING = Exposed()
# Modules of a layer without parameters: layer, attention, feed-forward, activation function.
MODULES_AROUND = 4
MODULES_OUTSIDE = 6  # of the layers: the model and its base, embedding, rotary embedding, norm, output layer
ATTENTION = "scaled_dot_product"  # in the names of torch's fused kernels of attention


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one direction of a micro-batch through a model chunk."""

    compute: float
    exposed: Exposed

    @property
    def total(self) -> float:
        return self.compute + self.exposed.total

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.compute + other.compute, self.exposed + other.exposed)

    def __mul__(self, factor: float) -> Pass:
        return Pass(self.compute * factor, self.exposed * factor)


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: the passes of its chunks, and the parameters of one of its ranks."""

    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    elements: float
    experts: float
    updated: float  # parameters that its optimizer updates


def sum_passes(passes: tuple[Pass, ...]) -> Pass:
    total = passes[0]
    for part in passes[1:]:
        total += part
    return total


def pipeline_of_stages(
    plan: RunPlan, shape: ModelShape, share: RankShare, profile: HardwareProfile, network: Network
) -> list[Stage]:
    """Return the stages of a family's model; one without pipeline parallelism."""
    clock = DeviceClock(profile, share.element, 1.0 if plan.megatron is not None else profile.torch_layers)
    chunks = _chunks(plan, shape)
    elements = _rank_elements(plan, shape)
    gradients = (elements.layer + elements.experts) * GRADIENT_BYTES
    layer = _layer_passes(plan, shape, share, network, clock, gradients)
    if plan.kernels.layers.name == LOCAL_LAYERS and on_gpus(plan):
        dated = replace(share, attention=AttentionKernel.eager.value, sequence_ranks=1, dropout=True)
        layer = layer.mixed(
            _layer_passes(plan, shape, dated, network, clock, gradients), profile.local_layers_of_2022
        )
    head, embedding = head_work(shape, share), embedding_work(shape, share)
    ends = end_exchanges(plan, shape, share, network)
    outside = MODULES_OUTSIDE / 2 * profile.module_seconds if _fetches_modules(plan) else 0.0
    messages = Pass(MESSAGE_OPERATORS * profile.host_seconds if len(chunks) > 1 else 0.0, NOTHING)
    stages = []
    for number, blocks in enumerate(chunks):
        ahead, back = [], []
        for position, chunk in enumerate(blocks):
            count, recomputed = len(chunk), _recomputed_layers(plan, shape, chunk)
            one, two = layer.forward * count, layer.backward * count + layer.recomputed * recomputed
            if number == 0 and position == 0:
                one += clock.seconds(embedding.forward, ends.embedding, outside)
                two += clock.seconds(embedding.backward, hooks=outside)
            if number == len(chunks) - 1 and position == len(blocks) - 1:
                one += clock.seconds(head.forward, ends.head_forward, outside)
                two += clock.seconds(head.backward, ends.head_backward, outside)
            ahead.append(one + messages)
            back.append(two + messages)
        dense, experts = elements.of_stage(
            sum(map(len, blocks)), first=number == 0, last=number == len(chunks) - 1
        )
        stages.append(Stage(tuple(ahead), tuple(back), dense, experts, _updated(plan, dense, experts)))
    return stages


def traced_stage(plan: RunPlan, trace: ModuleTrace, profile: HardwareProfile) -> Stage:
    """Return the only stage of a model from a trace of its operators (models/trace.py) instead of the layers
    of a family.

    The trace has every operation of torch, so the layers are not slower than the sum of their operators.
    """
    element = plan.config.precision.element_bytes
    clock = DeviceClock(profile, element, 1.0)
    hooks = len(_owners(trace)) * profile.module_seconds if _fetches_modules(plan) else 0.0
    elements = float(trace.numel)
    # The trace has the write of each gradient, which the engine then adds to its own.
    gradients = Elementwise(elements * (GRADIENT_BYTES - GRADIENT_WRITE_BYTES))
    forward = clock.seconds(_traced_calls(trace.forward_work, backward=False), hooks=hooks)
    backward = clock.seconds((*_traced_calls(trace.backward_work, backward=True), gradients), hooks=hooks)
    return Stage((forward,), (backward,), elements, 0.0, _updated(plan, elements, 0.0))


def _traced_calls(works: Mapping[str, OperatorWork], *, backward: bool) -> tuple[Operator, ...]:
    return tuple(
        TracedCalls(work, attention=ATTENTION in name, backward=backward) for name, work in works.items()
    )


def _owners(trace: ModuleTrace) -> set[str]:
    """Return the modules of a trace that have parameters, and those around them."""
    found = {""}
    for spec in trace.parameters:
        owner = spec.name.rpartition(".")[0]
        while owner not in found:
            found.add(owner)
            owner = owner.rpartition(".")[0]
    return found


def _updated(plan: RunPlan, dense: float, experts: float) -> float:
    """Return parameters of a rank that its optimizer updates."""
    ranks = plan.axes.data * plan.axes.context if plan.config.zero.stage else 1
    return dense / ranks + experts / max(1.0, ranks / plan.axes.expert)


@dataclass(frozen=True, slots=True)
class LayerPasses:
    """The passes of one micro-batch through one decoder layer."""

    forward: Pass
    backward: Pass
    recomputed: Pass

    def mixed(self, other: LayerPasses, share: float) -> LayerPasses:
        """Return these passes with a ``share`` of them replaced by ``other``."""
        return LayerPasses(
            self.forward * (1 - share) + other.forward * share,
            self.backward * (1 - share) + other.backward * share,
            self.recomputed * (1 - share) + other.recomputed * share,
        )


def _layer_passes(
    plan: RunPlan, shape: ModelShape, share: RankShare, network: Network, clock: DeviceClock, gradients: float
) -> LayerPasses:
    """``gradients`` are the bytes that gradients of weights move."""
    work = layer_work(shape, share, gradients)
    hooks = _modules_of_layer(plan) * clock.profile.module_seconds if _fetches_modules(plan) else 0.0
    exchanges = layer_exchanges(
        plan,
        shape,
        share,
        network,
        backward=device_seconds(work.backward, clock.profile, share.element),
        contention=clock.profile.contention,
    )
    return LayerPasses(
        clock.seconds(work.forward, exchanges.forward, hooks),
        clock.seconds(work.backward, exchanges.backward, hooks),
        _recomputed(plan, shape, share, work, exchanges, clock, hooks),
    )


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """Seconds of operators on a device, with ``slower`` layers than the profile's."""

    profile: HardwareProfile
    element: int
    slower: float

    def seconds(
        self, operators: tuple[Operator, ...], exposed: Exposed = NOTHING, hooks: float = 0.0
    ) -> Pass:
        """Return a pass through ``operators``, between which the host spends ``hooks`` seconds."""
        computing = pass_seconds(
            operators, self.profile, self.element, slower=self.slower, hooks=hooks, waits=exposed.total
        )
        return Pass(computing, exposed)


def _recomputed(
    plan: RunPlan,
    shape: ModelShape,
    share: RankShare,
    work: Work,
    exchanges: LayerExchanges,
    clock: DeviceClock,
    hooks: float,
) -> Pass:
    """Repeating the forward pass of a layer, or a part of it, in the backward pass."""
    recomputation = plan.config.train.recomputation
    keys = recomputation_keys(plan.config, shape) if plan.megatron is not None else {}
    if recomputation.full or keys.get("recompute_granularity") == "full":
        return clock.seconds(work.forward, exchanges.recomputed, hooks)
    if "core_attn" in _recomputed_modules(keys):
        return clock.seconds(attention_work(shape, share).forward)
    if recomputation.selective or keys:
        cheap = tuple(operator for operator in work.forward if isinstance(operator, Elementwise))
        return clock.seconds(cheap)
    return Pass(0.0, NOTHING)


def _recomputed_modules(keys: Mapping[str, Any]) -> Sequence[str]:
    """Return the submodules that Megatron-core recomputes; its own default is attention."""
    if keys.get("recompute_granularity") != "selective":
        return ()
    return keys.get("recompute_modules") or ("core_attn",)


def _recomputed_layers(plan: RunPlan, shape: ModelShape, chunk: range) -> int:
    """Return the number of a chunk's layers that are recomputed, in full or in part."""
    recomputation = plan.config.train.recomputation
    if plan.megatron is None:
        return len(chunk) if recomputation.selective else recomputation.count(chunk)
    keys = recomputation_keys(plan.config, shape)
    if keys.get("recompute_method") == "block":
        return min(len(chunk), int(keys["recompute_num_layers"]))
    return len(chunk) if keys.get("recompute_granularity") else 0


def _fetches_modules(plan: RunPlan) -> bool:
    """Return whether the engine fetches the parameters of each module before its passes."""
    return plan.deepspeed is not None and plan.config.zero.stage == 3


def _modules_of_layer(plan: RunPlan) -> int:
    """Modules of a decoder layer: those with parameters, and ``MODULES_AROUND``."""
    names = {spec.name.rpartition(".")[0] for spec in plan.parameters if spec.layer == 0}
    return len(names) + MODULES_AROUND


def _chunks(plan: RunPlan, shape: ModelShape) -> list[list[range]]:
    """Global block indices of each chunk of each stage."""
    if plan.megatron is not None:
        layers = stage_layers(shape, plan.axes.pipeline, plan.config.engine.megatron)
        return stage_chunks(layers, virtual_stages(plan.config))
    if plan.axes.pipeline == 1:
        return [[range(shape.num_hidden_layers)]]
    return [[blocks] for blocks, _ in rank_parameters(shape, plan.parameters, plan.axes)]


@dataclass(frozen=True, slots=True)
class RankElements:
    """Parameters of a rank: of one layer, of its experts, before and after the layers, and tied ones."""

    layer: float
    experts: float
    before: float
    after: float
    tied: float

    def of_stage(self, layers: int, *, first: bool, last: bool) -> tuple[float, float]:
        """Dense parameters and experts of a stage with ``layers`` layers."""
        tied = self.tied if last and not first else 0.0
        ends = (self.before if first else 0.0) + (self.after if last else 0.0)
        return self.layer * layers + ends + tied, self.experts * layers


def _rank_elements(plan: RunPlan, shape: ModelShape) -> RankElements:
    """Every layer is like the first one."""
    layer = experts = before = after = tied = 0.0
    tensor, seen = plan.axes.tensor, False
    for spec in plan.parameters:
        if spec.layer is not None:
            seen = True
            if spec.layer > 0:
                continue
        size = spec.numel / (tensor if len(spec.shape) > 1 else 1)
        if spec.layer is None:
            after, before = (after + size, before) if seen else (after, before + size)
            tied += size if shape.tie_word_embeddings and not seen else 0.0
        elif is_expert_parameter(spec):
            experts += size / plan.axes.expert
        else:
            layer += size
    return RankElements(layer, experts, before, after, tied)


def on_gpus(plan: RunPlan) -> bool:
    return plan.world.device is Device.CUDA
