"""Hooks: objects that the training loop calls at seven events, in the order in which they were added.

    on_start(step)        the state is loaded; ``step`` optimizer steps are completed
    on_step(completed)    all ranks have completed an optimizer step
    on_eval(row)          one named evaluation set was evaluated
    on_checkpoint(path)   a checkpoint is complete
    on_rollback(path)     the run goes back to the checkpoint at ``path``, and repeats the steps after it
    on_exception(error)   training on this rank ends with an error; ``on_end`` is not called
    on_end(step)          training is over: the last step is completed, or all ranks agreed to stop

``on_step``, ``on_eval`` and ``on_rollback`` run at the same steps on all ranks. ``on_step`` is the only event
in which a hook may communicate with other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engine.protocol import MicroBatch, StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.monitor.sink import Row
from toolkit.plan.types import RunPlan
from toolkit.step_parts import LOGGING, NULL_RECORDER, Recorder


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """One optimizer step, as every rank sees it.

    Attributes:
        step: number of completed steps, so the first step is 1.
        seconds: see :func:`toolkit.train.loop.train`.
        consensus: what all ranks agreed on after the step.
        last: whether it is the last step of the whole run: ``train.steps``, or the step after which the run
            ends early.
        micro_batches: those of this rank, on its device. A hook does not change them.
    """

    step: int
    lr: float
    result: StepResult
    seconds: float
    consensus: StepConsensus
    last: bool
    micro_batches: Sequence[MicroBatch] = ()


@dataclass(frozen=True, slots=True)
class HookContext:
    """What a hook of the configuration may use, as ``self.context``.

    Attributes:
        plan: the run's plan, with its configuration as ``plan.config``.
        rank: number of this rank, from 0 to ``plan.world.ranks - 1``.
        log_metrics: takes numbers by name and logs them with the number of completed steps to
            ``hooks.jsonl`` and the other sinks, as ``hooks/HOOK/NAME``. Only rank 0 records them.
        request_stop: takes a reason and ends the run after the next step on all ranks: evaluated, saved and
            complete. The reason is recorded in ``status.json``.
    """

    plan: RunPlan
    rank: int
    log_metrics: Callable[[Mapping[str, float]], None]
    request_stop: Callable[[str], None]


class Hook:
    """Base class of hooks. Every event does nothing by default.

    Attributes:
        context: set before the first event of a hook of the configuration (``+hooks.NAME.target``).
        part: the part of a step that time spent in this hook is attributed to (``step_parts.py``).
    """

    part: ClassVar[str] = LOGGING
    context: HookContext

    def on_start(self, step: int) -> None:
        pass

    def on_step(self, completed: CompletedStep) -> None:
        pass

    def on_eval(self, row: Row) -> None:
        """Receive ``step``, ``set``, ``loss`` and the other metrics of an evaluation."""

    def on_checkpoint(self, path: Path) -> None:
        pass

    def on_rollback(self, path: Path) -> None:
        """The next step repeats the one after the checkpoint at ``path``, with other samples from the bad
        step on. ``load_state_dict`` follows if the checkpoint has a state of this hook.
        """

    def on_exception(self, error: Exception) -> None:
        pass

    def on_end(self, step: int) -> None:
        pass

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint stores of this hook, in JSON types. That of its first rank is stored."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of the checkpoint from which the run resumes, in any layout.

        Called before ``on_start`` and after ``on_rollback``, unless the checkpoint has no state of this hook.
        """


class Hooks(Hook):
    """Call several hooks in order. A hook that triggers an event, such as evaluation, calls this object."""

    def __init__(self, *hooks: Hook, recorder: Recorder = NULL_RECORDER) -> None:
        self._hooks, self._recorder = list(hooks), recorder
        self._with_state: dict[str, Hook] = {}

    def add(self, hook: Hook, name: str | None = None) -> None:
        """Add a hook. Its state is stored in checkpoints under ``name``; None: it has no state."""
        self._hooks.append(hook)
        if name is not None:
            self._with_state[name] = hook

    def on_start(self, step: int) -> None:
        self._call_each(lambda hook: hook.on_start(step))

    def on_step(self, completed: CompletedStep) -> None:
        self._call_each(lambda hook: hook.on_step(completed))

    def on_eval(self, row: Row) -> None:
        self._call_each(lambda hook: hook.on_eval(row))

    def on_checkpoint(self, path: Path) -> None:
        self._call_each(lambda hook: hook.on_checkpoint(path))

    def on_rollback(self, path: Path) -> None:
        self._call_each(lambda hook: hook.on_rollback(path))

    def on_exception(self, error: Exception) -> None:
        self._call_each(lambda hook: hook.on_exception(error))

    def on_end(self, step: int) -> None:
        self._call_each(lambda hook: hook.on_end(step))

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name. Collective if a hook does not run on rank 0."""
        states = {name: dict(hook.state_dict()) for name, hook in self._with_state.items()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, hook in self._with_state.items():
            if name in state:
                hook.load_state_dict(state[name])

    def without_hook(self, state: Mapping[str, Any]) -> list[str]:
        """Return the names in ``state`` for which there is no hook any more."""
        return sorted(state.keys() - self._with_state.keys())

    def _call_each(self, event: Callable[[Hook], None]) -> None:
        for hook in self._hooks:
            with self._recorder.part(hook.part):
                event(hook)


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
