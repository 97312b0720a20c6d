"""Patches of DeepSpeed with which the host waits for the device once per step (engine/step_read.py)."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.engine.step_read import StepRead


def mask_norms_on_device() -> None:
    """Replace a norm that is not finite by -1 without a copy from the host, for which the host would wait."""
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    def mask(norm: torch.Tensor, device: object = None, val: float = -1.0) -> None:
        norm.masked_fill_(~norm.isfinite(), val)

    for module in (utils, stage_1_and_2, stage3):
        module.mask_nan_or_inf_with_val_inplace = mask


def read_norm_once(optimizer: Any, read: StepRead, stage: int) -> None:
    """Let a ZeRO optimizer read the gradient norm from the device once per step, with the values of ``read``.

    ZeRO reads it to decide whether to skip the step, and again to clip each group. From here on it gets a
    norm in host memory. Its separate test for gradients that are not finite is left out, because their norm
    is not finite either; Muon and offloaded optimizers need the test, since they use gradients before the
    norm. ``BF16_Optimizer``, which only ``data_types.grad_accum_dtype=fp32`` under stage 1 leads to, stays as
    it is.
    """
    if hasattr(optimizer, "scaled_global_norm"):
        scaled_global_norm = optimizer.scaled_global_norm

        def host_norm(norm_type: int = 2) -> torch.Tensor:
            norm = scaled_global_norm(norm_type)
            return torch.tensor(read.norms(norm)[0], dtype=norm.dtype)

        optimizer.scaled_global_norm = host_norm
    elif stage == 3:
        get_norm_groups = optimizer._get_norm_groups

        def host_norms() -> list[torch.Tensor]:
            norms = get_norm_groups()
            pairs = zip(read.norms(*norms), norms, strict=True)
            return [torch.tensor(number, dtype=norm.dtype) for number, norm in pairs]

        optimizer._get_norm_groups = host_norms
    offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
    if stage > 0 and not offloaded and not getattr(optimizer, "use_muon", False):
        optimizer.check_overflow = lambda partition_gradients=True: None


def order_streams_on_device(optimizer: Any) -> None:
    """Let the device, not the host, wait for reduced gradients after each backward pass.

    ZeRO reduces gradients on another stream, and blocks the host after every micro-batch until they are
    reduced (stages 1 and 2 with ``overlap_comm`` even until the device is idle). What follows, including
    every use of the gradients' memory, runs on the current stream and needs only this order. An offloaded
    optimizer needs the host to wait, because it reads gradients there.
    """
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        return
    stage3 = hasattr(optimizer, "reduce_and_partition_stream")
    stream = optimizer.reduce_and_partition_stream if stage3 else getattr(optimizer, "reduction_stream", None)
    if stream is None:
        return

    def wait(*_: object) -> None:
        torch.cuda.current_stream().wait_stream(stream)

    if stage3:
        stream.synchronize = wait
        return
    from deepspeed.accelerator import get_accelerator

    finish_backward, accelerator = optimizer.independent_gradient_partition_epilogue, get_accelerator()

    def finish_without_host() -> None:
        accelerator.synchronize = wait
        try:
            finish_backward()
        finally:
            del accelerator.synchronize

    optimizer.independent_gradient_partition_epilogue = finish_without_host


def skip_pipeline_loss(engine: Any) -> None:
    """Skip DeepSpeed's exchange of the loss among stages; the engine sums losses itself."""
    engine._aggregate_total_loss = lambda: None
