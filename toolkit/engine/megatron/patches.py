"""Defects of Megatron-core 0.16, on any device, that show without Transformer Engine. Each entry says what goes wrong.

What its own ``state_dict`` and ``load_state_dict`` do wrong does not matter here: checkpoints are this toolkit's own.
"""

from __future__ import annotations

import functools


@functools.cache
def apply() -> None:
    bind_general_gemm()
    default_fp8_to_none()
    shard_any_optimizer()


def bind_general_gemm() -> None:
    """Every forward of a router asks whether the name is None, and it is bound only where Transformer Engine is installed."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


def default_fp8_to_none() -> None:
    """``fp8=False`` is "not None", so that recomputed norms ask for Transformer Engine's fp8 state."""
    import megatron.core.tensor_parallel.random as random

    if not random.HAVE_TE:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def shard_any_optimizer() -> None:
    """The distributed optimizer asserts that it is given an Adam, for the sake of its own checkpoints; it works with any."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.Adam = torch.optim.Optimizer  # the name is used in that assertion only
