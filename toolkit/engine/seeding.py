"""Seed dropout as a function of step, micro-batch and rank, so that a resumed run repeats it.

Sample order and initial weights are seeded elsewhere and do not depend on the parallel layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.layout.axes import Coordinates


def seed_micro_batch(seed: int, step: int, at: Coordinates, micro_batch: int = 0) -> None:
    """Seed torch on every device for one micro-batch of optimizer step ``step`` on the rank at ``at``."""
    number = derive_seed(seed, step, micro_batch, at.data, at.tensor, at.pipeline, at.context)
    # Like torch.manual_seed, but only for devices in use: it stores a stack trace for every other device, one
    # millisecond per call.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def derive_seed(*parts: int) -> int:
    """Hash the parts, so that neighbouring steps and ranks get independent random streams."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest(), "big")


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random state on exit."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
