"""The parts of a step's time, and the interface that records them.

Code marks its work with ``with recorder.part(FORWARD): ...``. Parts nest, and time belongs to the innermost
one: a collective inside backward is communication, not backward. Time outside all parts is unexplained.
All time inside evaluation, saving and hooks (``UNDIVIDED_PARTS``) is attributed to them, including nested
parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

DATA = "data"  # waiting for samples
TRANSFER = "transfer"  # host to device
FORWARD = "forward"
BACKWARD = "backward"  # includes recomputed activations
BUBBLE = "bubble"  # a pipeline stage waiting for a neighbour that has not computed yet
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
LOGGING = "logging"
UNEXPLAINED = "unexplained"
PARTS = (DATA, TRANSFER, FORWARD, BACKWARD, BUBBLE, OPTIMIZER, CHECKPOINT, EVALUATION, LOGGING, UNEXPLAINED)
UNDIVIDED_PARTS = frozenset({CHECKPOINT, EVALUATION, LOGGING})

COMMUNICATION = "communication"  # exposed: what computing waits for


def communication(axes: str) -> str:
    """Return the part of collectives over these axes, named by ``layout.axes.axis_name``:
    ``communication/tensor``.
    """
    return f"{COMMUNICATION}/{axes}"


class Recorder(Protocol):
    def part(self, name: str) -> AbstractContextManager[None]:
        """Attribute this rank's time to ``name`` while the context is open."""

    def schedule(self) -> AbstractContextManager[None]:
        """Mark the context as a pipeline schedule.

        Waiting for another stage's tensors is then bubble, and so is the wait in the first collective with
        other stages after this rank's own part is finished.
        """

    def set_transfer_seconds(self, seconds: Callable[[int], float]) -> None:
        """Set the measured function from bytes to seconds of a transfer between neighbouring stages. That
        much of a wait is communication.
        """

    def next_step(self, step: int) -> None:
        """Begin the step that makes ``step`` completed steps, with its wait for samples. The previous step
        ends, including the evaluation, saving and logging that followed it.
        """

    def discard_steps(self) -> None:
        """Forget the current step and earlier ones that were not read. Nothing is recorded until the next
        ``next_step``.
        """


class NullRecorder(Recorder):
    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def schedule(self) -> AbstractContextManager[None]:
        return nullcontext()

    def set_transfer_seconds(self, seconds: Callable[[int], float]) -> None:
        pass

    def next_step(self, step: int) -> None:
        pass

    def discard_steps(self) -> None:
        pass


NULL_RECORDER: Recorder = NullRecorder()
