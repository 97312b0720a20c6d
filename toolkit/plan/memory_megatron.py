"""Bytes of parameters, gradients and optimizer states on a rank under Megatron-core 0.16.

- Parameters: without the distributed optimizer one tensor per parameter. With it one flat buffer per model
  chunk, in which parameters begin at multiples of 64 elements, and buckets end at multiples of
  lcm(ranks, 128).
- Gradients: a flat fp32 buffer of the same length, replicated on every rank, in every precision. The backward
  pass adds each parameter's gradient to it and frees the gradient.
- Optimizer: an fp32 copy of 16-bit weights (fp32 weights are their own master copy) and the optimizer's
  tensors; with the distributed optimizer only this rank's range of each bucket.

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
from functools import lru_cache
from typing import Any

from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.config.schema import OffloadDevice, RunConfig
from toolkit.families import get_family
from toolkit.families.base import ModelShape
from toolkit.families.megatron import EMBEDDING, MegatronTensor, TensorCut
from toolkit.layout.axes import Axes
from toolkit.optimizers import get_optimizer
from toolkit.plan.activations import FP32, offloaded_bytes
from toolkit.plan.activations_megatron import (
    ActivationLayout,
    block_bytes,
    boundary_bytes,
    head_bytes,
    in_flight,
)
from toolkit.plan.attention import has_dense_mask, repeats_keys
from toolkit.plan.kernels import fused_loss_chunk
from toolkit.plan.megatron import padded_vocabulary, sequence_parallel, virtual_stages
from toolkit.plan.pipeline_stages import stage_chunks, stage_layers
from toolkit.plan.recomputation import recomputation_keys
from toolkit.plan.temporaries import (
    block_gradient_bytes,
    largest_weight_bytes,
    message_bytes,
    peak_temporary_bytes,
)
from toolkit.plan.types import BatchPlan, Device, Kernels, MemoryPlan

START, END = 64, 128  # alignment in elements of the start of a parameter and the end of a bucket


def stage_memory(
    config: RunConfig,
    shape: ModelShape,
    axes: Axes,
    batch: BatchPlan,
    device: Device,
    *,
    kernels: Kernels,
    settings: Mapping[str, Any],
) -> list[MemoryPlan]:
    """Return the memory of one rank of each pipeline stage.

    The only buffers are those that sequence parallelism gathers into.

    Args:
        settings: the section ``transformer`` of Megatron-core's settings.
    """
    attention = kernels.attention.name
    micro_batches = max(batch.accumulations)
    sequence_ranks = axes.tensor if sequence_parallel(config) else 1
    layout = ActivationLayout(
        traits=get_family(shape.family).traits,
        tokens=max(1, batch.micro_batch * config.train.sequence_length // axes.context),
        sequences=batch.micro_batch,
        context=axes.context,
        tensor=axes.tensor,
        sequence_ranks=sequence_ranks,
        element=config.precision.element_bytes,
        fused_norms=device is Device.CUDA,
        fused_activation=bool(settings.get("bias_activation_fusion")),
        attention=attention,
        has_mask=has_dense_mask(config, attention),
        repeats_keys=repeats_keys(config, attention, device),
        documents=config.data.documents is DocumentMasking.separate,
    )
    on_gpu = device is Device.CUDA
    gathered = 0 if sequence_ranks == 1 else layout.tokens * layout.element * shape.hidden_size
    chunks = virtual_stages(config)
    parts = stage_chunks(stage_layers(shape, axes.pipeline, config.engine.megatron), chunks)
    rows = padded_vocabulary(shape.vocab_size, axes.tensor) // axes.tensor
    boundary = boundary_bytes(shape, layout)
    messages = message_bytes(boundary, axes.pipeline, chunks) if on_gpu else 0
    backward = _backward_bytes(shape, layout, rows, settings) if on_gpu else 0
    found = []
    for number, stage in enumerate(states(config, shape, axes)):
        passes = in_flight(number, axes.pipeline, chunks, micro_batches)
        last = number == axes.pipeline - 1
        chunk = fused_loss_chunk(config, kernels, shape.vocab_size)
        head = head_bytes(shape, layout, rows, chunk) if last else 0
        stored, recomputed, host = _activations(config, shape, layout, parts[number], passes, pinned=on_gpu)
        # The output of a chunk stays until its backward pass, unless it is freed once the next stage has it.
        frees = settings.get("deallocate_pipeline_outputs") and not last
        outputs = 0 if frees else passes * boundary
        # The backward pass of the loss ends before the last blocks are recomputed.
        activations = stored + outputs + max(head, recomputed)
        found.append(
            MemoryPlan(
                parameters=stage.parameters,
                gradients=stage.gradients,
                optimizer=stage.optimizer,
                activations=activations,
                host=host,
                nvme=0,
                buffers=gathered,
                temporaries=peak_temporary_bytes(
                    backward=backward, step=0, loss=max(0, head - recomputed), activations=activations
                ),
                messages=messages,
            )
        )
    return found


def _backward_bytes(
    shape: ModelShape, layout: ActivationLayout, rows: int, settings: Mapping[str, Any]
) -> int:
    """Return the bytes of gradients inside one block's backward pass.

    The gradient of a weight is a tensor of its own, unless the matrix product adds it to the fp32 buffer.
    The distributed optimizer steps on views of that buffer, without copies.
    """
    gradients = block_gradient_bytes(
        shape,
        element=layout.element,
        tensor=layout.tensor,
        sequence_ranks=layout.sequence_ranks,
        scores=layout.positions * layout.context if layout.attention == AttentionKernel.eager.value else 0,
    )
    widest = max(rows, -(-shape.intermediate_size // layout.tensor)) * shape.hidden_size
    fused = settings.get("gradient_accumulation_fusion")
    return layout.tokens * gradients + (0 if fused else largest_weight_bytes([widest], layout.element))


def _activations(
    config: RunConfig,
    shape: ModelShape,
    layout: ActivationLayout,
    chunks: Sequence[range],
    passes: int,
    *,
    pinned: bool,
) -> tuple[int, int, int]:
    """Return the bytes of blocks' activations: stored on the device, recomputed there at a time, and on the
    host.

    A stage has ``chunks``; ``passes`` forward passes through one chunk each are in flight. Memory on the host
    is ``pinned``.
    """
    keys = recomputation_keys(config, shape)
    whole, boundary = block_bytes(shape, layout), boundary_bytes(shape, layout)
    layers = max(map(len, chunks))
    if keys.get("recompute_granularity") == "selective":
        modules = frozenset(keys.get("recompute_modules") or ("core_attn",))
        stored = block_bytes(shape, layout, modules)
        return passes * layers * stored, whole - stored, 0
    if keys.get("recompute_granularity") != "full":
        return passes * layers * whole, 0, 0
    size = int(keys.get("recompute_num_layers") or 1)
    if keys.get("recompute_method") == "block":
        # The first ``size`` blocks of a chunk are recomputed, one at a time.
        inputs, kept, live = min(size, layers), layers - min(size, layers), whole
    else:
        inputs, kept, live = -(-layers // size), 0, min(size, layers) * whole
    stored = passes * inputs * boundary
    if config.offload.activations is OffloadDevice.none:
        return stored + passes * kept * whole, live, 0
    # Two inputs are on the device: that of the block being recomputed, and the next one.
    host = offloaded_bytes(passes * inputs, boundary, pinned=pinned)
    return min(2, passes * inputs) * boundary, live, host


@dataclass(frozen=True, slots=True)
class StageStateBytes:
    """Bytes on each rank of one pipeline stage; ``layers`` is its number of blocks."""

    layers: int
    parameters: int
    gradients: int
    optimizer: int


def states(config: RunConfig, shape: ModelShape, axes: Axes) -> list[StageStateBytes]:
    """Return the bytes of each pipeline stage.

    Sizes that ``tensor`` does not divide are rounded up; a rule refuses such runs.
    """
    layers = stage_layers(shape, axes.pipeline, config.engine.megatron)
    element = config.precision.element_bytes
    state = get_optimizer(config.optim.name).element_bytes(config.optim) + (FP32 if element != FP32 else 0)
    elements = _stage_elements(
        shape, axes, tuple(layers), virtual_stages(config), distributed=config.zero.stage > 0
    )
    return [
        StageStateBytes(count, numel * element, numel * FP32, share * state)
        for count, (numel, share) in zip(layers, elements, strict=True)
    ]


@lru_cache(maxsize=1024)
def _stage_elements(
    shape: ModelShape, axes: Axes, layers: tuple[int, ...], virtual: int, *, distributed: bool
) -> tuple[tuple[int, int], ...]:
    """Return for each pipeline stage the parameters of a rank and those that it updates, with padding.

    Cached because a search plans the same axes with many micro-batches and kinds of recomputation.

    Args:
        layers: number of blocks of each stage.
        virtual: chunks of a stage.
        distributed: whether the optimizer is.
    """
    tensors, chunks = _tensors(shape), stage_chunks(list(layers), virtual)
    found = []
    for stage in range(len(layers)):
        total = updated = 0
        for number, blocks in enumerate(chunks[stage]):
            ends = (
                stage == 0 and number == 0,
                stage == axes.pipeline - 1 and number == len(chunks[stage]) - 1,
            )
            parts = list(_chunk(tensors, blocks, *ends, shape=shape, axes=axes))
            for expert in (False, True):
                sizes = [size for size, is_expert, _ in parts if is_expert is expert]
                ranks = max(1, axes.data * axes.context // (axes.expert if expert else 1))
                own_bucket = (
                    {index for index, (_, _, tied) in enumerate(parts) if tied} if not expert else set()
                )
                if not sizes:
                    continue
                numel = buffer_elements(sizes, ranks, own_bucket) if distributed else sum(sizes)
                total, updated = total + numel, updated + (numel // ranks if distributed else numel)
        found.append((total, updated))
    return tuple(found)


@lru_cache(maxsize=8)
def _tensors(shape: ModelShape) -> tuple[MegatronTensor, ...]:
    """Return the tensors of a model, which a search over layouts plans many times."""
    return tuple(get_family(shape.family).megatron_tensors(shape))


def buffer_elements(
    sizes: Sequence[int], ranks: int, own_bucket: set[int] | frozenset[int] = frozenset()
) -> int:
    """Return the elements of the flat buffer of parameters with ``sizes``, in the model's order.

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
    """Return the elements of ``tensor`` on one of ``ranks`` tensor-parallel ranks."""
    if tensor.cut is TensorCut.whole:
        return math.prod(tensor.shape)
    if tensor.cut is TensorCut.vocabulary:
        return padded_vocabulary(tensor.shape[0], ranks) // ranks * math.prod(tensor.shape[1:])
    return -(-math.prod(tensor.shape) // ranks)


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
