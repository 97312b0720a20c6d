"""Peak bytes of a rank: model states, activations and temporaries, of every engine.

    states         plan/memory_zero.py, plan/memory_megatron.py
    activations    plan/activations.py, plan/activations_megatron.py
    temporaries, messages between stages      plan/temporaries.py
    the rest of a GPU's memory in use         plan/device_overhead.py, which ``make_plan`` adds

On CPUs temporaries and messages are not counted: tests compare the rest with measurements, byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.config.kernels import AttentionKernel, CompileMode
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, OffloadDevice, RunConfig
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan import memory_megatron
from toolkit.plan.activations import BlockLayout, StageActivations, offloaded_bytes
from toolkit.plan.attention import has_dense_mask, repeats_keys
from toolkit.plan.kernels import fused_loss_chunk
from toolkit.plan.memory_zero import BYTES_BY_ZERO_STAGE, ZeroRun, optimizer_groups
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
    """Return the bytes on the rank with the most memory.

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
    """Return the memory of one rank of each pipeline stage; without a pipeline there is one stage."""
    if config.engine.name is EngineName.megatron and shape is not None:
        return memory_megatron.stage_memory(
            config, shape, axes, batch, device, kernels=kernels, settings=settings or {}
        )
    settings = settings or {}
    stage = config.zero.stage if config.engine.name is EngineName.deepspeed else 0
    ranks = axes.data * axes.context  # with the same weights
    micro_batches = max(batch.accumulations)
    layout = _block_layout(config, axes, device, kernels)
    model = None if shape is None else _model_activations(config, shape, layout, axes, batch, kernels)
    on_gpu = device is Device.CUDA
    found = []
    pipeline = rank_parameters(shape, parameters, axes)
    for number, (blocks, own) in enumerate(pipeline):
        run = ZeroRun(
            parameters=own,
            groups=optimizer_groups(own, config.optim, ranks, axes.expert),
            ranks=ranks,
            element=layout.element,
            accumulates=micro_batches > 1,
            fp32_accumulation=settings.get("data_types", {}).get("grad_accum_dtype") == "fp32",
            precision=config.precision.name,
            optimizer_device=config.offload.optimizer,
            parameter_device=config.offload.parameters,
            settings=settings.get("zero_optimization", {}),
        )
        states = BYTES_BY_ZERO_STAGE[stage](run)
        last, in_flight = number == len(pipeline) - 1, min(len(pipeline) - number, micro_batches)
        boundary = host = 0
        activations = None
        if model is not None:
            activations = replace(model, blocks=blocks, in_flight=in_flight, head=last)
            boundary = model.tokens * layout.element * model.shape.hidden_size
            if activations.offloaded:
                inputs = in_flight * config.train.recomputation.count(blocks)
                host = offloaded_bytes(inputs, boundary, pinned=on_gpu)
        # DeepSpeed's pipeline keeps the outputs that it has sent until their backward pass.
        sent = 0 if last else in_flight * boundary
        found.append(
            MemoryPlan(
                parameters=states.parameters,
                gradients=states.gradients,
                optimizer=states.optimizer,
                activations=None if activations is None else activations.peak,
                host=states.host + host,
                nvme=states.nvme,
                buffers=states.buffers,
                temporaries=_temporary_bytes(run, activations, stage, kernels) if on_gpu else 0,
                messages=sent + message_bytes(boundary, axes.pipeline) if on_gpu else 0,
            )
        )
    return found


def _block_layout(config: RunConfig, axes: Axes, device: Device, kernels: Kernels) -> BlockLayout:
    attention, length = kernels.attention.name, config.train.sequence_length
    return BlockLayout(
        element=config.precision.element_bytes,
        tensor=axes.tensor,
        mask_keys=length * axes.context if has_dense_mask(config, attention) else 0,
        score_keys=length if attention == AttentionKernel.eager.value else 0,
        repeats_keys=repeats_keys(config, attention, device),
        compiled=kernels.compile.name != CompileMode.none.value,
    )


def _model_activations(
    config: RunConfig, shape: ModelShape, layout: BlockLayout, axes: Axes, batch: BatchPlan, kernels: Kernels
) -> StageActivations:
    """Return the activations of a stage with all blocks."""
    return StageActivations(
        shape=shape,
        layout=layout,
        tokens=batch.micro_batch * max(1, config.train.sequence_length // axes.context),
        blocks=range(shape.num_hidden_layers),
        recomputation=config.train.recomputation,
        offloaded=config.offload.activations is OffloadDevice.cpu,
        chunk=fused_loss_chunk(config, kernels, shape.vocab_size),
    )


def _temporary_bytes(run: ZeroRun, activations: StageActivations | None, stage: int, kernels: Kernels) -> int:
    """Return the bytes on top of states and activations: in a block's backward pass, or in the optimizer's
    step.
    """
    backward = step = loss = 0
    if activations is not None:
        shape, layout, tokens = activations.shape, activations.layout, activations.tokens
        loss = max(0, activations.output - activations.recomputed)
        weight = largest_weight_bytes(
            (spec.numel for spec in run.parameters if spec.layer is not None), layout.element
        )
        gradients = block_gradient_bytes(
            shape, element=layout.element, tensor=layout.tensor, scores=layout.score_keys
        )
        backward = tokens * gradients + weight_gradient_bytes(
            shape, tokens, weight, element=layout.element, tensor=layout.tensor
        )
    if run.optimizer_device is OffloadDevice.none:
        step = deepspeed_step_bytes(
            run.groups,
            stage=stage,
            element=run.element,
            fp32_gradients=run.fp32_accumulation,
            foreach=kernels.optimizer.name == OptimizerKernel.torch.value,
        )
    peak = 0 if activations is None else activations.peak
    return peak_temporary_bytes(backward=backward, step=step, loss=loss, activations=peak)
