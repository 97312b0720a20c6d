"""Peak bytes of a rank: model states, activations and temporaries, of every engine.

    states         plan/memory_zero.py, plan/memory_megatron.py
    activations    plan/activations.py, plan/activations_megatron.py
    temporaries, messages between stages      plan/temporaries.py
    the rest of a GPU's memory in use         plan/device_overhead.py, which ``make_plan`` adds

On CPUs temporaries and messages are not counted: tests compare the rest with measurements, byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.kernels import AttentionKernel, CompileMode
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, OffloadDevice, RunConfig
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan import memory_megatron
from toolkit.plan.activations import activation_bytes, offloaded_bytes, output_bytes, recomputed_bytes
from toolkit.plan.attention import has_dense_mask, repeats_keys
from toolkit.plan.kernels import fused_loss_chunk
from toolkit.plan.memory_zero import BYTES_BY_ZERO_STAGE, ZeroRun, element_bytes, optimizer_groups
from toolkit.plan.rank_parameters import rank_parameters
from toolkit.plan.temporaries import (
    block_gradient_bytes,
    deepspeed_step_bytes,
    largest_weight_bytes,
    message_bytes,
    peak_temporary_bytes,
    weight_gradient_bytes,
)
from toolkit.plan.types import BatchPlan, Device, Kernels, MemoryPlan


def plan_memory(
    config: RunConfig,
    shape: ModelShape | None,
    parameters: Sequence[ParameterSpec],
    axes: Axes,
    batch: BatchPlan,
    device: Device,
    settings: Mapping[str, Any] | None,
    *,
    kernels: Kernels,
) -> MemoryPlan:
    """Bytes on the rank with the most memory.

    Args:
        shape: None for a model without a family, whose activations are unknown.
        settings: DeepSpeed's dictionary or Megatron-core's section ``transformer``; None for the local
            engine.
    """
    stages = stage_memory(config, shape, parameters, axes, batch, device, settings, kernels=kernels)
    return max(stages, key=lambda memory: memory.device_total)


def stage_memory(
    config: RunConfig,
    shape: ModelShape | None,
    parameters: Sequence[ParameterSpec],
    axes: Axes,
    batch: BatchPlan,
    device: Device,
    settings: Mapping[str, Any] | None,
    *,
    kernels: Kernels,
) -> list[MemoryPlan]:
    """Memory of one rank of each pipeline stage; without a pipeline there is one stage."""
    if config.engine.name is EngineName.megatron and shape is not None:
        return memory_megatron.stage_memory(
            config, shape, axes, batch, device, kernels=kernels, settings=settings or {}
        )
    settings = settings or {}
    attention = kernels.attention.name
    stage = config.zero.stage if config.engine.name is EngineName.deepspeed else 0
    ranks = axes.data * axes.context  # with the same weights
    micro_batches = max(part.size for part in batch.stages) // (batch.micro_batch * batch.data_parallel)
    tokens = batch.micro_batch * max(1, config.train.sequence_length // axes.context)
    element = element_bytes(config.precision.name)
    scores = config.train.sequence_length if attention == AttentionKernel.eager.value else 0
    seen = config.train.sequence_length * axes.context if has_dense_mask(config, attention) else 0
    wide, compiled = repeats_keys(config, attention, device), kernels.compile.name != CompileMode.none.value
    fp32_gradients = settings.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    offloads = config.offload.activations is OffloadDevice.cpu
    on_gpu = device is Device.CUDA
    found = []
    pipeline = rank_parameters(shape, parameters, axes)
    for number, (blocks, own) in enumerate(pipeline):
        run = ZeroRun(
            parameters=own,
            groups=optimizer_groups(own, config.optim, ranks, axes.expert),
            ranks=ranks,
            element=element,
            accumulates=micro_batches > 1,
            fp32_accumulation=fp32_gradients,
            precision=config.precision.name,
            optimizer_device=config.offload.optimizer,
            parameter_device=config.offload.parameters,
            settings=settings.get("zero_optimization", {}),
        )
        states = BYTES_BY_ZERO_STAGE[stage](run)
        host = backward = loss = 0
        activations = None
        in_flight = min(len(pipeline) - number, micro_batches)
        if shape is not None:
            head = number == len(pipeline) - 1
            chunk = fused_loss_chunk(config, kernels, shape.vocab_size)
            activations = activation_bytes(
                shape,
                micro_batch=batch.micro_batch,
                sequence_length=tokens // batch.micro_batch,
                element=element,
                recomputation=config.train.recomputation,
                offloaded=offloads,
                blocks=blocks,
                in_flight=in_flight,
                head=head,
                tensor=axes.tensor,
                seen=seen,
                scores=scores,
                wide=wide,
                chunk=chunk,
                compiled=compiled,
            )
            if offloads:
                inputs = in_flight * config.train.recomputation.count(blocks)
                host = offloaded_bytes(inputs, tokens * element * shape.hidden_size, pinned=on_gpu)
            output = output_bytes(shape, tokens, element, chunk=chunk, tensor=axes.tensor) if head else 0
            block = recomputed_bytes(
                shape,
                element,
                config.train.recomputation,
                blocks,
                tensor=axes.tensor,
                seen=seen,
                scores=scores,
                wide=wide,
                compiled=compiled,
            )
            loss = max(0, output - tokens * block)
            gradients = block_gradient_bytes(shape, element=element, tensor=axes.tensor, scores=scores)
            weight = largest_weight_bytes((spec.numel for spec in own if spec.layer is not None), element)
            backward = tokens * gradients + weight_gradient_bytes(
                shape, tokens, weight, element=element, tensor=axes.tensor
            )
        step = 0
        if config.offload.optimizer is OffloadDevice.none:
            step = deepspeed_step_bytes(
                run.groups,
                stage=stage,
                element=element,
                fp32_gradients=fp32_gradients,
                foreach=kernels.optimizer.name == OptimizerKernel.torch.value,
            )
        temporaries = peak_temporary_bytes(
            backward=backward, step=step, loss=loss, activations=activations or 0
        )
        boundary = 0 if shape is None else tokens * element * shape.hidden_size
        # DeepSpeed's pipeline keeps the outputs that it has sent until their backward pass.
        sent = in_flight * boundary if number < len(pipeline) - 1 else 0
        found.append(
            MemoryPlan(
                parameters=states.parameters,
                gradients=states.gradients,
                optimizer=states.optimizer,
                activations=activations,
                host=states.host + host,
                nvme=states.nvme,
                buffers=states.buffers,
                temporaries=temporaries if on_gpu else 0,
                messages=sent + message_bytes(boundary, axes.pipeline) if on_gpu else 0,
            )
        )
    return found
