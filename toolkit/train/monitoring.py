"""Everything that watches a run, put together: what is measured, what is told, and the hooks that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from toolkit.engine.protocol import Engine
from toolkit.monitor.alert import Alert
from toolkit.monitor.parts import NullRecorder, Recorder
from toolkit.monitor.sink import Kind, Sink
from toolkit.plan.types import RunPlan
from toolkit.rundir import RunDirectory
from toolkit.train.agree import Exchange
from toolkit.train.hooks import Hook


@dataclass(frozen=True, slots=True)
class Watch:
    """What a rank's run is watched by.

    Attributes:
        recorder: where its time goes; the engine and the loop tell it.
        alert: takes what deserves attention. On rank 0 it reaches people; other ranks' alerts are of their own node.
    """

    recorder: Recorder
    alert: Callable[[Alert], None]

    def hooks(self, engine: Engine) -> list[Hook]:
        """In the order in which they listen, before evaluation and saving."""
        return []


@contextmanager
def watching(plan: RunPlan, directory: RunDirectory, sink: Sink, ask: Exchange, *, rank: int, local_rank: int,
             attempt: int) -> Iterator[Watch]:
    """From before the engine is built until the run is over, whatever ends it."""
    yield Watch(NullRecorder(), lambda alert: sink.log(Kind.ALERT, alert.row()))
