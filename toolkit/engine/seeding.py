"""Random state of training: a function of the place in the run, so that a resumed step repeats itself.

Sample order and initial weights do not come from here and do not depend on the layout; dropout does.
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
    # What torch.manual_seed does, less the devices that this process does not use: for each of those it keeps a stack trace, a
    # millisecond a call.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def derive_seed(*place: int) -> int:
    """A hash rather than a sum of the parts: neighbouring steps and ranks get streams that have nothing in common."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, place)).encode(), digest_size=7).digest(), "big")


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the random state outside goes on as if it had not been."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
