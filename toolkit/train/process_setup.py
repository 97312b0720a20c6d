"""Process-wide settings of a training process: threads, determinism, seeds and garbage collection."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from toolkit.plan.types import RunPlan


def seed_everything(plan: RunPlan) -> None:
    """Set threads, determinism and the global seeds.

    The toolkit does not draw from the global generators, but a module of the user may.
    """
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
    """Freeze existing objects so that the garbage collector skips them during training.

    Otherwise a full collection scans everything that libraries and the engine have created, a quarter of a
    second now and then on some rank, for which the other ranks wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
