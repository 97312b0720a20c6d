"""The parts of a step's time, and who records them.

Whoever does something for a step says so: ``with recorder.part(FORWARD): ...``. Parts nest, and a moment belongs to the innermost one: a
collective inside backward is communication, not backward. Moments in no part are unexplained. What an evaluation, a save or a hook does
is theirs altogether (``WHOLE``), whatever parts are inside: they are what a run pays besides its training.
"""

from __future__ import annotations

from collections.abc import Callable
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
NOT_SPLIT = frozenset({CHECKPOINT, EVALUATION, LOGGING})

COMMUNICATION = "communication"  # exposed: what computing waits for


def communication(axes: str) -> str:
    """The part of collectives over these axes, which ``layout.axes.axis_name`` names: ``communication/tensor``."""
    return f"{COMMUNICATION}/{axes}"


class Recorder(Protocol):
    def part(self, name: str) -> AbstractContextManager[None]:
        """While it is open, this rank's time is ``name``'s."""

    def schedule(self) -> AbstractContextManager[None]:
        """While it is open, this rank goes through a pipeline's schedule: waiting for another stage's tensors is its bubble, and so is the
        wait in the first collective with other stages after its own part is done: that is for stages which still compute."""

    def set_transfer_seconds(self, seconds: Callable[[int], float]) -> None:
        """How long so many bytes take between neighbouring stages, where somebody has measured it: that much of a wait is communication."""

    def next_step(self, step: int) -> None:
        """The step that makes ``step`` completed ones begins with waiting for its samples; the one before is over, with what followed it
        (evaluation, saving, logging)."""


class NullRecorder(Recorder):
    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def schedule(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_transfer_seconds(self, seconds: Callable[[int], float]) -> None:
        pass

    def next_step(self, step: int) -> None:
        pass


UNRECORDED: Recorder = NullRecorder()
