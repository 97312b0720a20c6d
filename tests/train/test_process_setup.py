"""Settings of a training process.

pytest tests/train/test_process_setup.py
"""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import torch

from toolkit.testing.tiny import tiny_plan
from toolkit.train.process_setup import freeze_gc, seed_everything


class Cycle:
    def __init__(self) -> None:
        self.me = self


def is_tracked(target: object) -> bool:
    """Return whether a full collection visits ``target``."""
    return any(found is target for found in gc.get_objects())


def test_frozen_objects_are_skipped_by_the_garbage_collector() -> None:
    model, dropped = Cycle(), weakref.ref(Cycle())
    assert is_tracked(model)
    with freeze_gc():
        assert dropped() is None, "existing garbage is collected first"
        assert not is_tracked(model)
        new = Cycle()
        assert is_tracked(new)
        new_reference = weakref.ref(new)
        del new
        gc.collect()
        assert new_reference() is None
    assert is_tracked(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_global_generators_are_seeded() -> None:
    draws = []
    for _ in range(2):
        seed_everything(tiny_plan())
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert draws[0] == draws[1]
