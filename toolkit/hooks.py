"""Hooks: objects that the training loop calls at five events, in the order in which they were added.

    on_start(step)        the state is loaded; ``step`` optimizer steps are done
    on_step(done)         an optimizer step is done on all ranks
    on_eval(row)          one named evaluation set was evaluated
    on_checkpoint(path)   a checkpoint is complete
    on_end(step)          training is over: all steps are done or a stop was agreed, and everything is saved

``on_step`` runs at the same steps on all ranks, so it is the only event in which a hook may communicate with other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.monitor.sink import Row
from toolkit.monitor.step_parts import LOGGING, UNRECORDED, Recorder


@dataclass(frozen=True, slots=True)
class StepDone:
    """``step`` counts completed steps, so the first one is 1. ``seconds``: see ``loop.train``."""

    step: int
    lr: float
    result: StepResult
    seconds: float
    agreed: StepConsensus
    last: bool  # of the whole run


class Hook:
    """Base class of hooks; every event does nothing by default.

    Time spent in a hook counts as its ``part`` of the step (``monitor/step_parts.py``).
    """

    part: ClassVar[str] = LOGGING

    def on_start(self, step: int) -> None:
        pass

    def on_step(self, done: StepDone) -> None:
        pass

    def on_eval(self, row: Row) -> None:
        pass

    def on_checkpoint(self, path: Path) -> None:
        pass

    def on_end(self, step: int) -> None:
        pass


class Hooks(Hook):
    """Call several hooks as one. A hook that raises an event of its own calls this object."""

    def __init__(self, *hooks: Hook, recorder: Recorder = UNRECORDED) -> None:
        self._hooks, self._recorder = list(hooks), recorder

    def add(self, hook: Hook) -> None:
        self._hooks.append(hook)

    def on_start(self, step: int) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_start(step)

    def on_step(self, done: StepDone) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_step(done)

    def on_eval(self, row: Row) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_eval(row)

    def on_checkpoint(self, path: Path) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_checkpoint(path)

    def on_end(self, step: int) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_end(step)
