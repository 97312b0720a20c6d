"""Bytes of parameters, gradients and optimizer states on a rank under Megatron-core 0.16.

    parameters   without the distributed optimizer one tensor per parameter; with it one flat buffer per model
    chunk, in
                 which parameters begin at multiples of 64 elements and buckets end at multiples of lcm(ranks,
                 128)
    gradients    a flat fp32 buffer of the same length, replicated on every rank, in every precision; backward
    adds each
                 parameter's gradient to it and frees the gradient
    optimizer    an fp32 copy of 16-bit weights (fp32 weights are their own master copy) and the optimizer's
    tensors; with
                 the distributed optimizer only this rank's range of each bucket

Adam has moments of M = 8 bytes per element, SGD 4 with momentum and 0 without. The rank has n elements after
tensor, pipeline and expert parallelism, and N elements with padding. The range is shared by d ranks: data x
context, for experts data x context / expert.

                              parameters   gradients   optimizer
    stage 0, fp32             4 n          4 n         M n
    stage 0, 16 bits          2 n          4 n         (4 + M) n
    stages 1 and 2, fp32      4 N          4 N         M N / d
    stages 1 and 2, 16 bits   2 N          4 N         (4 + M) N / d

With tied embeddings and several stages, the last stage has its own copy of the embedding, its gradient and
its state.

Sources: megatron/core/distributed/param_and_grad_buffer.py (_ParamAndGradBuffer.__init__),
distributed_data_parallel.py, optimizer/distrib_optimizer.py (_build_model_and_main_param_groups),
transformer/transformer_block.py (get_num_layers_to_build), models/common/language_module/language_module.py
(setup_embeddings_and_output_layer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.config.data import DocumentMasking
from toolkit.config.schema import OptimConfig, OptimizerName, Precision, RunConfig
from toolkit.families import get_family
from toolkit.families.base import ModelShape
from toolkit.families.megatron import EMBEDDING, MegatronTensor, TensorCut
from toolkit.layout.axes import Axes
from toolkit.plan.activations_megatron import (
    ActivationLayout,
    block_bytes,
    boundary_bytes,
    head_bytes,
    in_flight,
)
from toolkit.plan.megatron import padded_vocabulary, sequence_parallel, virtual_stages
from toolkit.plan.types import BatchPlan, Device, MemoryPlan

FP32 = 4
START, END = 64, 128  # alignment in elements of the start of a parameter and the end of a bucket


def stage_memory(
    config: RunConfig, shape: ModelShape, axes: Axes, batch: BatchPlan, device: Device
) -> list[MemoryPlan]:
    """Memory of one rank of each pipeline stage.

    The only buffers are those that sequence parallelism gathers into.
    """
    micro_batches = max(stage.size for stage in batch.stages) // (batch.micro_batch * batch.data_parallel)
    spread = axes.tensor if sequence_parallel(config) else 1
    layout = ActivationLayout(
        traits=get_family(shape.family).traits,
        tokens=max(1, batch.micro_batch * config.train.sequence_length // axes.context),
        sequences=batch.micro_batch,
        context=axes.context,
        tensor=axes.tensor,
        spread=spread,
        element=FP32 if config.precision.name is Precision.fp32 else 2,
        fused_norms=device is Device.CUDA,
        documents=config.data.documents is DocumentMasking.separate,
    )
    gathered = 0 if spread == 1 else layout.tokens * layout.element * shape.hidden_size
    chunks = virtual_stages(config)
    found = []
    for number, stage in enumerate(states(config, shape, axes)):
        passes = in_flight(number, axes.pipeline, chunks, micro_batches)
        last = number == axes.pipeline - 1
        head = (
            head_bytes(shape, layout, padded_vocabulary(shape.vocab_size, axes.tensor) // axes.tensor)
            if last
            else 0
        )
        blocks = _blocks(config, shape, layout, stage.layers // chunks, passes)
        found.append(
            MemoryPlan(
                parameters=stage.parameters,
                gradients=stage.gradients,
                optimizer=stage.optimizer,
                activations=blocks + passes * boundary_bytes(shape, layout) + head,
                host=0,
                nvme=0,
                buffers=gathered,
            )
        )
    return found


def _blocks(config: RunConfig, shape: ModelShape, layout: ActivationLayout, layers: int, passes: int) -> int:
    """Bytes of activations of ``passes`` forward passes through ``layers`` blocks each."""
    given = config.engine.megatron
    whole, boundary = block_bytes(shape, layout), boundary_bytes(shape, layout)
    whole_blocks = config.train.activation_checkpointing
    granularity = "full" if whole_blocks else given.get("recompute_granularity")
    method = "uniform" if whole_blocks else given.get("recompute_method")
    size = 1 if whole_blocks else given.get("recompute_num_layers") or 1
    if granularity == "selective":
        modules = frozenset(given.get("recompute_modules") or ("core_attn",))
        return (
            passes * layers * block_bytes(shape, layout, modules)
            + whole
            - block_bytes(shape, layout, modules)
        )
    if granularity != "full":
        return passes * layers * whole
    if method == "block":  # the first ``size`` blocks of a chunk are recomputed, one at a time
        again = min(size, layers)
        return passes * (again * boundary + (layers - again) * whole) + whole
    return passes * -(-layers // size) * boundary + min(size, layers) * whole


@dataclass(frozen=True, slots=True)
class StageStateBytes:
    """Bytes on each rank of one pipeline stage; ``layers`` is its number of blocks."""

    layers: int
    parameters: int
    gradients: int
    optimizer: int


def stage_layers(shape: ModelShape, stages: int, given: Mapping[str, object]) -> list[int]:
    """Number of blocks of each stage.

    ``given`` are the user's keys, which may set the size of the first and last stage.
    """
    sized = {
        0: given.get("num_layers_in_first_pipeline_stage"),
        stages - 1: given.get("num_layers_in_last_pipeline_stage"),
    }
    fixed = {stage: size for stage, size in sized.items() if isinstance(size, int)}
    between = max(1, stages - len(fixed))
    even = -(-(shape.num_hidden_layers - sum(fixed.values())) // between)
    return [fixed.get(stage, max(0, even)) for stage in range(stages)]


def stage_chunks(layers: Sequence[int], chunks: int) -> list[list[range]]:
    """Global block indices of each chunk of each stage.

    Virtual stages are interleaved: with 8 blocks, 2 stages and 2 chunks, stage 0 has blocks 0 1 and 4 5.
    """
    found: list[list[range]] = [[] for _ in layers]
    first = 0
    for _ in range(chunks):
        for stage, count in enumerate(layers):
            found[stage].append(range(first, first + count // chunks))
            first += count // chunks
    return found


def states(config: RunConfig, shape: ModelShape, axes: Axes) -> list[StageStateBytes]:
    """Bytes of each pipeline stage.

    Sizes that ``tensor`` does not divide are rounded up; a rule refuses such runs.
    """
    layers = stage_layers(shape, axes.pipeline, config.engine.megatron)
    chunks = stage_chunks(layers, virtual_stages(config))
    tensors = get_family(shape.family).megatron_tensors(shape)
    element = FP32 if config.precision.name is Precision.fp32 else 2
    state = _state_bytes(config.optim) + (FP32 if element != FP32 else 0)
    found = []
    for stage, count in enumerate(layers):
        parameters = gradients = optimizer = 0
        for number, blocks in enumerate(chunks[stage]):
            ends = (
                stage == 0 and number == 0,
                stage == axes.pipeline - 1 and number == len(chunks[stage]) - 1,
            )
            parts = list(_chunk(tensors, blocks, *ends, shape=shape, axes=axes))
            for expert in (False, True):
                sizes = [size for size, is_expert, _ in parts if is_expert is expert]
                ranks = axes.data * axes.context // (axes.expert if expert else 1)
                own_bucket = (
                    {index for index, (_, _, tied) in enumerate(parts) if tied} if not expert else set()
                )
                if not sizes:
                    continue
                if not config.zero.stage:
                    numel = share = sum(sizes)
                else:
                    numel = buffer_elements(sizes, max(1, ranks), own_bucket)
                    share = numel // max(1, ranks)
                parameters, gradients, optimizer = (
                    parameters + numel * element,
                    gradients + numel * FP32,
                    optimizer + share * state,
                )
        found.append(StageStateBytes(count, parameters, gradients, optimizer))
    return found


def buffer_elements(
    sizes: Sequence[int], ranks: int, own_bucket: set[int] | frozenset[int] = frozenset()
) -> int:
    """Elements of the flat buffer of parameters with ``sizes``, in the model's order.

    Parameters in ``own_bucket`` (a tied embedding) get their own bucket. The padding between the other
    buckets of a large model, less than 128 elements each, is not counted.
    """
    bucket = math.lcm(ranks, END)
    end = 0
    open_bucket = False
    for index in reversed(range(len(sizes))):  # in the order of the backward pass
        start = _padded(end, START)
        if index in own_bucket and open_bucket:
            start = _padded(end, bucket)
        end = start + sizes[index]
        open_bucket = index not in own_bucket
        if not open_bucket:
            end = _padded(end, bucket)
    return _padded(end, bucket)


def _chunk(
    tensors: Sequence[MegatronTensor],
    blocks: range,
    first: bool,
    last: bool,
    *,
    shape: ModelShape,
    axes: Axes,
) -> Iterator[tuple[int, bool, bool]]:
    """Yield (elements, is an expert, is a tied embedding) of each parameter of a model chunk on a rank."""
    experts = max(1, shape.num_local_experts) // axes.expert
    tied = shape.tie_word_embeddings
    for tensor in tensors:
        if tensor.layer is None:
            before = tensor.name.startswith("embedding.")
            if first if before else last:
                yield _elements(tensor, axes.tensor), False, tied and tensor.name == EMBEDDING
        elif tensor.layer in blocks and (tensor.expert is None or tensor.expert < experts):
            # Without expert parallelism Megatron-core treats experts' weights like other weights.
            yield _elements(tensor, axes.tensor), tensor.expert is not None and axes.expert > 1, False
    if tied and last and not first:
        embedding = next(tensor for tensor in tensors if tensor.name == EMBEDDING)
        yield _elements(embedding, axes.tensor), False, True


def _elements(tensor: MegatronTensor, ranks: int) -> int:
    """Elements of ``tensor`` on one of ``ranks`` tensor-parallel ranks."""
    if tensor.cut is TensorCut.whole:
        return math.prod(tensor.shape)
    if tensor.cut is TensorCut.vocabulary:
        return padded_vocabulary(tensor.shape[0], ranks) // ranks * math.prod(tensor.shape[1:])
    return -(-math.prod(tensor.shape) // ranks)


def _state_bytes(optim: OptimConfig) -> int:
    if optim.name is OptimizerName.sgd:
        return FP32 if optim.momentum else 0
    return 2 * FP32


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
