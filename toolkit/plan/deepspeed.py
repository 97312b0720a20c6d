"""The plan for DeepSpeed 0.19: the exact dictionary that ``deepspeed.initialize`` gets.

There are three layers: tunable defaults, the user's ``engine.deepspeed`` keys, and keys that the plan
derives. Rules refuse user keys that the plan derives, so the last layer never overrides a user's value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import OffloadDevice, Precision, RunConfig
from toolkit.optimizers import get_optimizer
from toolkit.plan.types import BatchPlan, Device, World

NEVER = 2**31 - 1  # steps_per_print cannot be turned off
BUCKET = 500_000_000  # elements: DeepSpeed's default reduce_bucket_size and allgather_bucket_size
# Megatron-core's rule for buckets of gradients (distributed_data_parallel_config.py, bucket_size).
SMALLEST_BUCKET, BUCKET_OF_A_RANK = 40_000_000, 1_000_000  # elements
PREFETCH = 50_000_000  # elements: DeepSpeed's default stage3_prefetch_bucket_size
PERSISTENCE = 100_000  # elements: DeepSpeed's default stage3_param_persistence_threshold
LIVE = 1_000_000_000  # elements: DeepSpeed's default stage3_max_live_parameters and stage3_max_reuse_distance
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
    """Return the dictionary for ``deepspeed.initialize``.

    ``sizes`` are the elements of each parameter; empty for ``model.target``.
    """
    return merge(
        merge(_defaults(config, world, batch.data_parallel, sizes), config.engine.deepspeed),
        derived_settings(config, world, batch),
    )


def is_tensor_parallel(name: str) -> bool:
    """Return whether AutoTP cuts the weight of this canonical name."""
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
    """Return the implementation of the run's optimizer.

    With states offloaded to the CPU of a GPU machine, DeepSpeed's vectorised CPU kernel (compiled on first
    use) is several times faster than torch's and overlaps with the transfer, so it is used if there is a
    compiler. On GPUs torch's fused kernel needs no compilation, unlike DeepSpeed's FusedAdam (two minutes on
    first use). CPU-only machines use torch.
    """
    if config.optim.kernel is not OptimizerKernel.auto:
        return config.optim.kernel
    if world.device is Device.CPU:
        return OptimizerKernel.torch
    if config.offload.optimizer is OffloadDevice.none:
        fastest = OptimizerKernel.fused
    else:
        fastest = OptimizerKernel.cpu if world.has_compiler else OptimizerKernel.torch
    return fastest if fastest in get_optimizer(config.optim.name).kernels else OptimizerKernel.torch


def accumulates_in_fp32(config: RunConfig) -> bool:
    """Return whether bf16 gradients accumulate in fp32: only if DeepSpeed then stores just the rank's
    partition.

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


def _defaults(config: RunConfig, world: World, ranks: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the keys that the user may override."""
    # The throughput timer synchronises the device in every forward pass.
    settings: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}}
    if config.zero.stage:
        zero: dict[str, Any] = {}
        if sizes:
            # Buckets are allocated at full size, 2 GB in fp32; a small model needs less.
            zero["reduce_bucket_size"] = zero["allgather_bucket_size"] = min(BUCKET, _even(sum(sizes)))
        if world.device is Device.CUDA:
            zero |= _gpu_defaults(config, ranks * config.parallel.context, sizes)
        if config.offload.parameters is OffloadDevice.nvme and sizes:
            # DeepSpeed asserts that every partition fits into a swap buffer.
            largest = -(-max(sizes) // ranks)
            zero["offload_param"] = {"buffer_size": max(SWAP_BUFFER, largest)}
        if zero:
            settings["zero_optimization"] = zero
    if accumulates_in_fp32(config):
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _gpu_defaults(config: RunConfig, ranks: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Overlap of communication with computation, and the sizes of its messages, for gradients that ``ranks``
    sum.

    - Gradients are reduced while the backward pass goes on, from two buckets in turn. DeepSpeed turns this
      off in pipelines, and with it waits for the device after a backward pass, so a single rank does not.
    - A bucket is large enough to use the network and small enough that its reduction overlaps. A ring sends a
      bucket in as many parts as there are ranks, so a rank's part of 1 M elements, 2 MB in 16 bits, takes
      40 us at 50 GB/s (a 400 Gb/s adapter), several times the latency of a message. For a few ranks 40 M
      elements are enough. DeepSpeed's own 500 M would be 1 GB for each bucket, and would be full only near
      the end of the backward pass of a small model. The Trainer of transformers takes the square of the
      hidden size, which does not grow with the ranks: 0.26 MB for each of 128 ranks with a size of 4096.
    - Stages 1 and 2 all-reduce a bucket whose gradients belong to several ranks. Otherwise DeepSpeed sends
      the part of each rank in its own message, and synchronises the device before each one.
    - Stage 3 prefetches as much as a bucket, and DeepSpeed's other limits are stated, since the memory of
      gathered parameters depends on them.
    """
    most = _even(sum(sizes)) if sizes else None
    wanted = max(SMALLEST_BUCKET, BUCKET_OF_A_RANK * ranks)
    zero: dict[str, Any] = {
        "contiguous_gradients": True,
        "reduce_bucket_size": wanted if most is None else min(wanted, most),
    }
    if config.parallel.pipeline == 1 and ranks > 1:
        zero["overlap_comm"] = True
    if config.zero.stage < 3:
        zero["use_multi_rank_bucket_allreduce"] = True
    else:
        ahead = max(PREFETCH, BUCKET_OF_A_RANK * ranks)
        zero |= {
            "stage3_prefetch_bucket_size": ahead if most is None else min(ahead, most),
            "stage3_param_persistence_threshold": PERSISTENCE,
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
        }
    return zero


def _even(elements: int) -> int:
    """DeepSpeed aligns its buckets to two elements."""
    return elements + elements % 2


def derived_settings(config: RunConfig, world: World, batch: BatchPlan) -> dict[str, Any]:
    """Return the keys that the plan derives, which a user may not set."""
    spec = get_optimizer(config.optim.name)
    optimizer = spec.deepspeed(config.optim, optimizer_kernel(config, world))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": float(config.optim.clip),  # DeepSpeed's own default is 1.0
        "steps_per_print": NEVER,
        # Without the key the engine passes the torch optimizer that the spec creates.
        **({} if optimizer is None else {"optimizer": optimizer}),
        "zero_optimization": _zero(config, world) | spec.deepspeed_zero(config.zero.stage),
        "zero_allow_untested_optimizer": not spec.tested_by_deepspeed,
        "zero_force_ds_cpu_optimizer": False,  # a torch optimizer may be offloaded
        "bf16": {"enabled": config.precision.name is Precision.bf16},
        "fp16": {"enabled": False},
        **_axes(config),
    }
    if config.precision.name is Precision.fp16:
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": config.precision.initial_scale_power,
            "loss_scale_window": config.precision.scale_window,
            "hysteresis": 1,  # every overflow halves the scale, as in torch's GradScaler
            "min_loss_scale": 1,
        }
    return settings


def _axes(config: RunConfig) -> dict[str, Any]:
    """Return the keys of tensor and context parallelism.

    Expert parallelism has no keys: ``engine/deepspeed/expert_parallel.py`` creates its groups and marks the
    parameters.
    """
    settings: dict[str, Any] = {}
    if config.parallel.tensor > 1:
        settings["tensor_parallel"] = {
            "autotp_size": config.parallel.tensor,
            # The loss needs full logits; AutoTP would shard a tied vocabulary and compute its own loss.
            "vocab_parallel_lm_head": False,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [dict(spec) for spec in TENSOR_SPECS],
            },
        }
    if config.parallel.context > 1:
        settings["sequence_parallel_size"] = config.parallel.context
    return settings


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
    # Names of ZeRO++'s keys in DeepSpeed's dictionary, which has them only if they are used.
    given = config.zero
    if given.hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = given.hpz_partition_size
    for key in ("quantized_weights", "quantized_gradients"):
        if getattr(given, key):
            zero[f"zero_{key}"] = True
    return zero
