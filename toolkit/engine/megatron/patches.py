"""Work around defects of Megatron-core 0.16 that occur without Transformer Engine.

Each docstring explains the defect.

Megatron-core's own checkpointing is not patched, because the toolkit does not use it.
"""

from __future__ import annotations

import functools


@functools.cache
def apply() -> None:
    bind_general_gemm()
    default_fp8_to_none()
    shard_any_optimizer()


def bind_general_gemm() -> None:
    """The router's forward reads a name that is bound only with Transformer Engine."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


def default_fp8_to_none() -> None:
    """``fp8=False`` counts as "not None", so that recomputed norms need Transformer Engine's fp8 state."""
    import megatron.core.tensor_parallel.random as random

    if not random.HAVE_TE:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def shard_any_optimizer() -> None:
    """The distributed optimizer asserts an Adam because of its own checkpoints, but supports others."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.Adam = torch.optim.Optimizer  # used only in that assertion
