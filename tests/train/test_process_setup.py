"""What a process needs before it trains.

pytest tests/train/test_process_setup.py
"""

from __future__ import annotations

import gc
import weakref

from toolkit.train import process_setup


class Circle:
    def __init__(self) -> None:
        self.me = self


def looked_at(one: object) -> bool:
    """Whether a whole collection goes through it."""
    return any(found is one for found in gc.get_objects())


def test_while_training_only_what_is_new_is_searched_for_garbage() -> None:
    model, dropped = Circle(), weakref.ref(Circle())
    assert looked_at(model)
    with process_setup.freeze_gc():
        assert dropped() is None, "what was garbage before is not kept"
        assert not looked_at(model)
        new = Circle()
        assert looked_at(new)
        gone = weakref.ref(new)
        del new
        gc.collect()
        assert gone() is None
    assert looked_at(model), "nothing of this start is kept for the next one in the same process"
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
