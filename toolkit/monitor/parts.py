"""The parts of a step's time, and who records them.

Whoever does something for a step says so: ``with recorder.part(FORWARD): ...``. Parts nest, and a moment belongs to the innermost one: a
collective inside backward is communication, not backward. Moments in no part are unexplained.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

DATA = "data"  # waiting for samples
TRANSFER = "transfer"  # host to device
FORWARD = "forward"
BACKWARD = "backward"  # recomputed activations too
BUBBLE = "bubble"  # a pipeline stage waiting for a neighbour that has not computed yet
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
LOGGING = "logging"
UNEXPLAINED = "unexplained"
PARTS = (DATA, TRANSFER, FORWARD, BACKWARD, BUBBLE, OPTIMIZER, CHECKPOINT, EVALUATION, LOGGING, UNEXPLAINED)

COMMUNICATION = "communication"  # exposed: what computing waits for


def communication(axes: str) -> str:
    """The part of collectives over these axes: ``communication/tensor``; several are joined by ``+``, all ranks are ``all``."""
    return f"{COMMUNICATION}/{axes}"


class Recorder(Protocol):
    def part(self, name: str) -> AbstractContextManager[None]:
        """While it is open, this rank's time is ``name``'s."""

    def next_step(self, step: int) -> None:
        """The step that makes ``step`` completed ones begins with waiting for its samples; the one before is over, with what followed it
        (evaluation, saving, logging)."""


class NullRecorder(Recorder):
    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def next_step(self, step: int) -> None:
        pass
