"""The plan for DeepSpeed 0.19: the exact dictionary that ``deepspeed.initialize`` gets.

There are three layers: tunable defaults, the user's ``engine.deepspeed`` keys, and keys that the plan
derives. Rules refuse user keys that the plan derives, so the last layer never overrides a user's value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.schema import (
    OffloadDevice,
    OptimConfig,
    OptimizerKernel,
    OptimizerName,
    Precision,
    RunConfig,
)
from toolkit.plan.types import BatchPlan, Device, World

NEVER = 2**31 - 1  # steps_per_print cannot be turned off
BUCKET = 500_000_000  # elements: DeepSpeed's default reduce_bucket_size and allgather_bucket_size
SWAP_BUFFER = 100_000_000  # elements: DeepSpeed's default offload_param.buffer_size

# How AutoTP splits families with separate projections. A tied output layer stays whole, like its embedding.
TENSOR_SPECS: tuple[Mapping[str, Any], ...] = (
    {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True},
    # Replicated, but applied to the heads of a rank only: each rank computes a part of the gradient.
    {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
)


def build_settings(config: RunConfig, world: World, batch: BatchPlan, sizes: Sequence[int]) -> dict[str, Any]:
    """The dictionary for ``deepspeed.initialize``.

    ``sizes`` are the elements of each parameter; empty for ``model.target``.
    """
    return merge(
        merge(_defaults(config, batch.data_parallel, sizes), config.engine.deepspeed),
        _derived(config, world, batch),
    )


def is_tensor_parallel(name: str) -> bool:
    """Whether AutoTP cuts the weight of this canonical name."""
    return tensor_parallel_dim(name) is not None


def tensor_parallel_dim(name: str) -> int | None:
    """Return the dim along which AutoTP cuts the parameter of this canonical name.

    None means that every tensor rank has the whole parameter. A bias is cut with the output of its layer.
    """
    bias = name.endswith(".bias")
    weight = name.removesuffix(".bias") + ".weight" if bias else name
    kind = next(
        (
            spec["partition_type"]
            for spec in TENSOR_SPECS
            if any(re.match(pattern, weight) for pattern in spec["patterns"])
        ),
        "skip",
    )
    if kind == "row":
        return None if bias else 1
    return 0 if kind == "column" else None


def optimizer_kernel(config: RunConfig, world: World) -> OptimizerKernel:
    """The AdamW implementation of the run.

    With states offloaded to the CPU of a GPU machine, DeepSpeed's vectorised CPU Adam (compiled on first use)
    is several times faster than torch's and overlaps with the transfer, so it is used if there is a compiler.
    On GPUs torch's fused kernel needs no compilation, unlike DeepSpeed's FusedAdam (two minutes on first
    use). CPU-only machines use torch.
    """
    if config.optim.kernel is not OptimizerKernel.auto:
        return config.optim.kernel
    if config.optim.name is not OptimizerName.adamw or world.device is Device.CPU:
        return OptimizerKernel.torch
    if config.offload.optimizer is OffloadDevice.none:
        return OptimizerKernel.fused
    return OptimizerKernel.cpu if world.has_compiler else OptimizerKernel.torch


def accumulates_in_fp32(config: RunConfig) -> bool:
    """Whether bf16 gradients accumulate in fp32: only if DeepSpeed then stores just the rank's partition.

    Stage 3 always does, stage 2 unless the optimizer is offloaded. Otherwise DeepSpeed would store all
    gradients in fp32 on the device (6 N bytes under stage 1), so gradients are accumulated in bf16, and a
    rule warns about it.
    """
    if config.precision.name is not Precision.bf16:
        return False
    return config.zero.stage == 3 or (
        config.zero.stage == 2 and config.offload.optimizer is OffloadDevice.none
    )


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries; values of ``above`` win. The arguments are not modified."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            merge(old if isinstance(old, Mapping) else {}, value) if isinstance(value, Mapping) else value
        )
    return merged


def _defaults(config: RunConfig, ranks: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Keys that the user may override."""
    # The throughput timer synchronises the device in every forward pass.
    found: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}}
    if config.zero.stage and sizes:
        # Buckets are allocated at full size, 2 GB in fp32; a small model needs less. Even, for alignment.
        size = min(BUCKET, sum(sizes) + sum(sizes) % 2)
        found["zero_optimization"] = {"reduce_bucket_size": size, "allgather_bucket_size": size}
        if config.offload.parameters is OffloadDevice.nvme:
            # DeepSpeed asserts that every partition fits into a swap buffer.
            largest = -(-max(sizes) // ranks)
            found["zero_optimization"]["offload_param"] = {"buffer_size": max(SWAP_BUFFER, largest)}
    if accumulates_in_fp32(config):
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def _derived(config: RunConfig, world: World, batch: BatchPlan) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.global_batch // (batch.micro_batch * batch.data_parallel),
        "gradient_clipping": float(config.optim.clip),  # DeepSpeed's own default is 1.0
        "steps_per_print": NEVER,
        "optimizer": _optimizer(config.optim, optimizer_kernel(config, world)),
        "zero_optimization": _zero(config, world),
        "zero_allow_untested_optimizer": config.optim.name is OptimizerName.sgd,
        "zero_force_ds_cpu_optimizer": False,  # a torch optimizer may be offloaded
        "bf16": {"enabled": config.precision.name is Precision.bf16},
        "fp16": {"enabled": False},
        **_axes(config),
    }
    if config.precision.name is Precision.fp16:
        found["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": config.precision.initial_scale_power,
            "loss_scale_window": config.precision.scale_window,
            "hysteresis": 1,  # every overflow halves the scale, as in torch's GradScaler
            "min_loss_scale": 1,
        }
    return found


def _axes(config: RunConfig) -> dict[str, Any]:
    """Keys of tensor and context parallelism.

    Expert parallelism has no keys: ``engine/deepspeed/expert_parallel.py`` creates its groups and marks the
    parameters.
    """
    found: dict[str, Any] = {}
    if config.parallel.tensor > 1:
        found["tensor_parallel"] = {
            "autotp_size": config.parallel.tensor,
            # The loss needs full logits; AutoTP would shard a tied vocabulary and compute its own loss.
            "vocab_parallel_lm_head": False,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [dict(spec) for spec in TENSOR_SPECS],
            },
        }
    if config.parallel.context > 1:
        found["sequence_parallel_size"] = config.parallel.context
    return found


def _zero(config: RunConfig, world: World) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.zero.stage, "round_robin_gradients": False}
    for key, device in (
        ("offload_optimizer", config.offload.optimizer),
        ("offload_param", config.offload.parameters),
    ):
        if device is not OffloadDevice.none:
            zero[key] = {"device": device.value, "pin_memory": world.device is Device.CUDA}
            if device is OffloadDevice.nvme:
                zero[key]["nvme_path"] = config.offload.nvme_path
    if config.optim.name is OptimizerName.muon and config.zero.stage == 3:
        zero["reduce_scatter"] = False  # DeepSpeed refuses to start Muon under stage 3 otherwise
    return zero


def _optimizer(optim: OptimConfig, chosen: OptimizerKernel) -> dict[str, Any]:
    """``weight_decay`` is the default for parameter groups without their own."""
    adam: dict[str, Any] = {
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if optim.name is OptimizerName.sgd:
        return {
            "type": "SGD",
            "params": {"lr": optim.lr, "momentum": optim.momentum, "weight_decay": optim.weight_decay},
        }
    if optim.name is OptimizerName.muon:
        # torch_adam: AdamW for parameters that are not matrices; DeepSpeed would compile its own, even on a
        # CPU.
        return {"type": "Muon", "params": {**adam, "momentum": optim.momentum, "torch_adam": True}}
    if chosen is OptimizerKernel.cpu:
        return {"type": "AdamW", "params": adam}  # DeepSpeedCPUAdam, by zero_optimization.offload_optimizer
    if chosen is OptimizerKernel.fused:
        return {"type": "AdamW", "params": {**adam, "torch_adam": True, "fused": True}}
    return {"type": "AdamW", "params": {**adam, "torch_adam": True}}
