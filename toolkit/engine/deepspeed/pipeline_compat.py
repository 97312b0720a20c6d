"""Defects of DeepSpeed 0.19's pipeline engine that are mended from outside. Each entry says why it is here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.engine.deepspeed import compat


def norm_of_all_stages(engine: Any) -> Callable[[], float]:
    """Without ZeRO: clip by the gradient norm of the whole model, and skip the step if it is not finite. The returned
    function gives the last step's norm, before clipping.

    DeepSpeed takes a stage for a rank of tensor parallelism and counts what is not cut on its first rank: it clips all stages by the
    norm of the first one (3e-3 of the loss after 20 steps), and without clipping reports none.
    """
    norm = 0.0
    take, clip = engine._take_model_step, engine.gradient_clipping()
    compat.make_skippable(engine.optimizer)

    def measured(lr_kwargs: Any = None) -> None:
        nonlocal norm
        parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        # A tied weight is on two stages, with the same gradient.
        square = (
            torch.nn.utils.get_total_norm([p.grad for p in parameters if not p.ds_pipe_replicated])
            .double()
            .square()
        )
        dist.all_reduce(square, group=engine.grid.get_pipe_parallel_group())
        norm = float(square.sqrt())
        engine.optimizer.overflow = not math.isfinite(norm)
        if clip > 0 and not engine.optimizer.overflow:
            factor = 1.0 / max((norm + 1e-6) / clip, 1.0)
            for parameter in parameters:
                parameter.grad.mul_(factor)
        take(lr_kwargs)

    engine.clip_fp32_gradients = lambda: None
    engine._take_model_step = measured
    return lambda: norm


def keep_no_times(engine: Any) -> None:
    """Every step adds to a list of times that is emptied when they are printed, and they are not printed."""
    from deepspeed.utils.timer import NoopTimer

    if not engine.wall_clock_breakdown():
        engine.timers = NoopTimer()


def set_accumulation(engine: Any, micro_batches: int) -> None:
    """For the next steps, in a batch ramp. ZeRO has a copy of the number that DeepSpeed forgets."""
    engine.set_train_batch_size(
        engine.train_micro_batch_size_per_gpu() * micro_batches * engine.dp_world_size
    )
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = micro_batches


def forget_step(engine: Any) -> None:
    """The last stage keeps the last micro-batch's loss, a hook of which holds the engine: a circle that torch hides from Python, so that
    no closed engine would go, nor its groups."""
    engine.loss = engine.total_loss = None
    for buffers in engine.pipe_buffers.values():
        buffers.clear()


def forget_grid() -> None:
    """The module that sends activations keeps the grid of the last engine, and its groups with it: the process's threads add up."""
    from deepspeed.runtime.pipe import p2p

    p2p._grid = p2p._groups = None
