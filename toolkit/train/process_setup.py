"""What a process needs before it trains: its place among the ranks, threads, determinism, seeds, no garbage."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from toolkit.config.schema import EngineName
from toolkit.plan.types import Device, RunPlan


@contextmanager
def process_group(plan: RunPlan, rank: int, local_rank: int) -> Iterator[None]:
    """``torch.distributed``, unless the caller has started it: of the addresses in the environment, or of this rank alone."""
    ranks = plan.world.ranks
    if dist.is_initialized() or (ranks == 1 and plan.config.engine.name is EngineName.local):
        assert ranks == 1 or dist.get_world_size() == ranks, (
            f"planned for {ranks} ranks, here are {dist.get_world_size()}"
        )
        yield
        return
    backend = "gloo"
    if plan.world.device is Device.CUDA:
        if plan.config.engine.name is EngineName.megatron and plan.axes.tensor > 1:
            # One queue to the device: a kernel that was put before a collective starts before it, which overlapping relies on.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
        backend = "nccl"
    store = dist.HashStore() if ranks == 1 else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()


def configure_process(plan: RunPlan) -> None:
    """Threads, determinism, seeds. Nothing of the toolkit draws from these global seeds; a user's module may."""
    seed, debug = plan.config.train.seed, plan.config.debug
    if debug.threads is not None:
        torch.set_num_threads(debug.threads)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def freeze_gc() -> Iterator[None]:
    """What is there now is no garbage, and Python's collector need not look at it: else it goes through all that libraries and engine have
    made, a quarter of a second now and then on one rank or another, for which the others wait."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
