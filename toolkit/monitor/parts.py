"""The parts of a step's time, and who records them.

Whoever does something for a step says so: ``with recorder.part(FORWARD): ...``. Parts nest, and a moment belongs to the innermost one: a
collective inside backward is communication, not backward. Moments in no part are unexplained. What an evaluation, a save or a hook does
is theirs altogether (``WHOLE``), whatever parts are inside: they are what a run pays besides its training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Protocol

from toolkit.layout.axes import ORDER, Axes, Axis

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
WHOLE = frozenset({CHECKPOINT, EVALUATION, LOGGING})

COMMUNICATION = "communication"  # exposed: what computing waits for
ALL, EXPERT, OTHER = "all", "expert", "other"


def communication(axes: str) -> str:
    """The part of collectives over these axes: ``communication/tensor``; several are joined by ``+``, all ranks are ``all``."""
    return f"{COMMUNICATION}/{axes}"


def axes_of(ranks: Collection[int], axes: Axes, *, exchange: bool = False) -> str:
    """What ``communication`` calls a group of these global ranks: the axes along which they differ; ``all`` if those are all of several.

    Expert parallelism regroups data and context ranks: a group of neighbours among them is ``expert``. Where it is the whole data group,
    only an all-to-all (``exchange``) can be told to be the experts'. Empty for a group of one rank, which waits for nobody.
    """
    spanned = axes.spanned(ranks)
    if axes.expert > 1 and len(ranks) == axes.expert and set(spanned) <= {Axis.CONTEXT, Axis.DATA}:
        places = [at.data * axes.context + at.context for at in map(axes.coordinates, ranks)]
        neighbours = max(places) - min(places) == axes.expert - 1
        if neighbours and (exchange or axes.expert < axes.data * axes.context):
            return EXPERT
    return ALL if len(spanned) > 1 and list(spanned) == _wide(axes) else "+".join(spanned)


def every_axes(axes: Axes) -> tuple[str, ...]:
    """All that :func:`axes_of` can answer for a layout but the empty name, and ``other`` for groups that torch does not know."""
    wide = _wide(axes)
    if not wide:
        return ()
    several = ["+".join(chosen) for size in range(1, max(len(wide), 2)) for chosen in combinations(wide, size)]
    return (*several, *([ALL] if len(wide) > 1 else []), *([EXPERT] if axes.expert > 1 else []), OTHER)


def _wide(axes: Axes) -> list[Axis]:
    return [axis for axis in ORDER if getattr(axes, axis) > 1]


class Recorder(Protocol):
    def part(self, name: str) -> AbstractContextManager[None]:
        """While it is open, this rank's time is ``name``'s."""

    def schedule(self) -> AbstractContextManager[None]:
        """While it is open, this rank goes through a pipeline's schedule: waiting for another stage's tensors is its bubble, and so is the
        wait in the first collective with other stages after its own part is done: that is for stages which still compute."""

    def transfers_take(self, seconds: Callable[[int], float]) -> None:
        """How long so many bytes take between neighbouring stages, where somebody has measured it: that much of a wait is communication."""

    def next_step(self, step: int) -> None:
        """The step that makes ``step`` completed ones begins with waiting for its samples; the one before is over, with what followed it
        (evaluation, saving, logging)."""


class NullRecorder(Recorder):
    def part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def schedule(self) -> AbstractContextManager[None]:
        return nullcontext()

    def transfers_take(self, seconds: Callable[[int], float]) -> None:
        pass

    def next_step(self, step: int) -> None:
        pass


UNRECORDED: Recorder = NullRecorder()
