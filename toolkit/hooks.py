"""Hooks: objects that the training loop calls at five events, in the order in which they were added.

    on_start(step)        the state is loaded; ``step`` optimizer steps are completed
    on_step(completed)    all ranks have completed an optimizer step
    on_eval(row)          one named evaluation set was evaluated
    on_checkpoint(path)   a checkpoint is complete
    on_end(step)          training is over, because it reached the last step or all ranks agreed to stop

``on_step`` runs at the same steps on all ranks, so it is the only event in which a hook may communicate with
other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.monitor.parts import LOGGING, UNRECORDED, Recorder
from toolkit.monitor.sink import Row


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """One optimizer step, as every rank sees it.

    Attributes:
        step: number of completed steps, so the first step is 1.
        seconds: see :func:`toolkit.train.loop.train`.
        consensus: what all ranks agreed on after the step.
        last: whether it is the last step of the whole run.
    """

    step: int
    lr: float
    result: StepResult
    seconds: float
    consensus: StepConsensus
    last: bool


class Hook:
    """Base class of hooks. Every event does nothing by default.

    Attributes:
        part: the part of a step that time spent in this hook is attributed to (``monitor/parts.py``).
    """

    part: ClassVar[str] = LOGGING

    def on_start(self, step: int) -> None:
        pass

    def on_step(self, completed: CompletedStep) -> None:
        pass

    def on_eval(self, row: Row) -> None:
        pass

    def on_checkpoint(self, path: Path) -> None:
        pass

    def on_end(self, step: int) -> None:
        pass


class Hooks(Hook):
    """Call several hooks in order. A hook that triggers an event, such as evaluation, calls this object."""

    def __init__(self, *hooks: Hook, recorder: Recorder = UNRECORDED) -> None:
        self._hooks, self._recorder = list(hooks), recorder

    def add(self, hook: Hook) -> None:
        self._hooks.append(hook)

    def on_start(self, step: int) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_start(step)

    def on_step(self, completed: CompletedStep) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                hook.on_step(completed)

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


class SaveObserver:
    """Receive the timing of checkpoint saves; every method does nothing by default."""

    def on_save_start(self, step: int) -> None:
        """A save of the state after ``step`` starts."""

    def on_save_blocked(self, seconds: float) -> None:
        """Training waited this long for a save."""

    def on_save_end(self, step: int, seconds: float, size: int) -> None:
        """A checkpoint is complete.

        Args:
            seconds: from the start of the save to its commit, including time in the background.
            size: bytes that this rank wrote.
        """
