"""The training loop, with a fake engine.

pytest tests/train/test_loop.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.fakes import FakeClock, FakeEngine, samples
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.errors import ExitCode
from toolkit.hooks import CompletedStep, Hook, Hooks
from toolkit.monitor.sink import Row
from toolkit.plan.schedule import learning_rate
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextTokenTask


class EventRecorder(Hook):
    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.steps: list[CompletedStep] = []

    def on_start(self, step: int) -> None:
        self.events.append(f"start {step}")

    def on_step(self, completed: CompletedStep) -> None:
        self.steps.append(completed)
        self.events.append(f"step {completed.step}")

    def on_end(self, step: int) -> None:
        self.events.append(f"end {step}")


def run_loop(
    state: TrainState, steps: int, stop_at: int | None = None, **more: Any
) -> tuple[ExitCode, FakeEngine, EventRecorder]:
    events: list[Any] = []
    engine, recorder = FakeEngine(events, **more), EventRecorder(events)
    clock = more.get("clock") or FakeClock()

    def sync(data_seconds: float, result: StepResult) -> StepConsensus:
        events.append("sync")
        return StepConsensus(stop=stop_at is not None and state.step >= stop_at)

    plan = tiny_plan(train__steps=steps, train__global_batch=4, schedule__warmup=2)
    code = train(
        plan,
        engine,
        NextTokenTask(),
        samples(state.step, more.get("clock"), 1.0),
        state,
        recorder,
        sync,
        clock,
    )
    return code, engine, recorder


def test_loop_calls_engine_sync_and_hooks_in_order() -> None:
    code, engine, _ = run_loop(TrainState(), 2)
    assert code is ExitCode.DONE
    assert engine.events == ["start 0", "train 0", "sync", "step 1", "train 1", "sync", "step 2", "end 2"]


def test_each_step_has_its_learning_rate_and_shifted_samples() -> None:
    _, engine, recorder = run_loop(TrainState(), 4)
    plan = tiny_plan(train__steps=4, schedule__warmup=2)
    assert [settings.lr for settings in engine.settings] == [learning_rate(plan, step) for step in range(4)]
    assert [done.lr for done in recorder.steps] == [settings.lr for settings in engine.settings]
    assert [settings.step for settings in engine.settings] == [0, 1, 2, 3]
    first, second = engine.batches[3]
    assert torch.equal(first["input_ids"], torch.full((2, 4), 3))
    assert torch.equal(second["labels"], torch.full((2, 4), 4))


def test_loop_continues_from_its_state() -> None:
    state = TrainState(3)
    code, engine, recorder = run_loop(state, 5)
    assert code is ExitCode.DONE
    assert [settings.step for settings in engine.settings] == [3, 4]
    assert [(done.step, done.last) for done in recorder.steps] == [(4, False), (5, True)]
    assert state.step == 5


def test_loop_stops_after_the_step_at_which_ranks_agreed() -> None:
    state = TrainState()
    code, engine, recorder = run_loop(state, 5, stop_at=2)
    assert code is ExitCode.STOPPED
    assert engine.events[-2:] == ["step 2", "end 2"]
    assert [done.consensus.stop for done in recorder.steps] == [False, True]
    assert state.step == 2


def test_stop_at_the_last_step_completes_the_run() -> None:
    code, _, _ = run_loop(TrainState(), 2, stop_at=2)
    assert code is ExitCode.DONE


@pytest.mark.parametrize("steps", [3, 5])
def test_completed_run_trains_no_further_step(steps: int) -> None:
    code, engine, _ = run_loop(TrainState(5), steps)
    assert code is ExitCode.DONE
    assert engine.events == ["start 5", "end 5"]


def test_step_seconds_include_data_waits_but_not_hooks() -> None:
    clock = FakeClock()

    class Slow(Hook):
        def on_step(self, completed: CompletedStep) -> None:
            clock.now += 1000

    seconds: list[tuple[float, float]] = []

    class Seconds(Hook):
        def on_step(self, completed: CompletedStep) -> None:
            seconds.append((completed.seconds, completed.consensus.data_seconds))

    train(
        tiny_plan(train__steps=3, train__global_batch=4),
        FakeEngine(clock=clock, step_seconds=4.0),
        NextTokenTask(),
        samples(0, clock, 2.0),
        TrainState(),
        Hooks(Slow(), Seconds()),
        lambda data_seconds, result: StepConsensus(data_seconds=data_seconds),
        clock,
    )
    assert seconds == [(6.0, 2.0)] * 3  # without the 1,000 s of the slow hook


def test_hooks_are_called_in_the_order_in_which_they_were_added() -> None:
    events: list[str] = []

    class Named(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def _record(self, event: str) -> Callable[..., None]:
            return lambda *_: events.append(f"{self.name} {event}")

        def __getattribute__(self, name: str) -> Any:
            return (
                object.__getattribute__(self, "_record")(name)
                if name.startswith("on_")
                else object.__getattribute__(self, name)
            )

    hooks = Hooks(Named("a"))
    hooks.add(Named("b"))
    row: Row = {}
    hooks.on_start(0)
    hooks.on_step(None)  # type: ignore[arg-type]
    hooks.on_eval(row)
    hooks.on_checkpoint(Path())
    hooks.on_end(0)
    names: Sequence[str] = ["on_start", "on_step", "on_eval", "on_checkpoint", "on_end"]
    assert events == [f"{name} {event}" for event in names for name in "ab"]
