"""The loop, with an engine that only keeps count.

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
from toolkit.engine.rank_sync import StepConsensus, single_rank_reduce
from toolkit.errors import ExitCode
from toolkit.hooks import Hook, Hooks, StepDone
from toolkit.monitor.sink import Row
from toolkit.plan.schedule import learning_rate
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextToken


class Recorder(Hook):
    def __init__(self, events: list[Any]) -> None:
        self.events = events
        self.steps: list[StepDone] = []

    def on_start(self, step: int) -> None:
        self.events.append(f"start {step}")

    def on_step(self, done: StepDone) -> None:
        self.steps.append(done)
        self.events.append(f"step {done.step}")

    def on_end(self, step: int) -> None:
        self.events.append(f"end {step}")


def carry_out(
    state: TrainState, steps: int, stop_at: int | None = None, **more: Any
) -> tuple[ExitCode, FakeEngine, Recorder]:
    events: list[Any] = []
    engine, recorder = FakeEngine(events, **more), Recorder(events)
    clock = more.get("clock") or FakeClock()

    def agree(waited: float, result: StepResult) -> StepConsensus:
        events.append("agree")
        return StepConsensus(stop=stop_at is not None and state.step >= stop_at)

    plan = tiny_plan(train__steps=steps, schedule__warmup=2)
    code = train(
        plan, engine, NextToken(), samples(state.step, more.get("clock"), 1.0), state, recorder, agree, clock
    )
    return code, engine, recorder


def test_order_of_events() -> None:
    code, engine, _ = carry_out(TrainState(), 2)
    assert code is ExitCode.DONE
    assert engine.events == ["start 0", "train 0", "agree", "step 1", "train 1", "agree", "step 2", "end 2"]


def test_each_step_has_its_rate_and_its_shifted_samples() -> None:
    _, engine, recorder = carry_out(TrainState(), 4)
    plan = tiny_plan(train__steps=4, schedule__warmup=2)
    assert [settings.lr for settings in engine.settings] == [learning_rate(plan, step) for step in range(4)]
    assert [done.lr for done in recorder.steps] == [settings.lr for settings in engine.settings]
    assert [settings.step for settings in engine.settings] == [0, 1, 2, 3]
    first, second = engine.batches[3]
    assert torch.equal(first["input_ids"], torch.full((2, 4), 3))
    assert torch.equal(second["labels"], torch.full((2, 4), 4))


def test_continues_from_its_state_to_the_last_step() -> None:
    state = TrainState(3)
    code, engine, recorder = carry_out(state, 5)
    assert code is ExitCode.DONE
    assert [settings.step for settings in engine.settings] == [3, 4]
    assert [(done.step, done.last) for done in recorder.steps] == [(4, False), (5, True)]
    assert state.step == 5


def test_a_stop_ends_after_the_step_at_which_it_was_agreed() -> None:
    state = TrainState()
    code, engine, recorder = carry_out(state, 5, stop_at=2)
    assert code is ExitCode.STOPPED
    assert engine.events[-2:] == ["step 2", "end 2"]
    assert [done.agreed.stop for done in recorder.steps] == [False, True]
    assert state.step == 2


def test_a_stop_at_the_last_step_finds_the_run_done() -> None:
    code, _, _ = carry_out(TrainState(), 2, stop_at=2)
    assert code is ExitCode.DONE


@pytest.mark.parametrize("steps", [3, 5])
def test_nothing_is_left_to_do(steps: int) -> None:
    code, engine, _ = carry_out(TrainState(5), steps)
    assert code is ExitCode.DONE
    assert engine.events == ["start 5", "end 5"]


def test_seconds_have_the_wait_for_samples_and_the_step_but_not_what_lies_between() -> None:
    clock = FakeClock()

    class Slow(Hook):
        def on_step(self, done: StepDone) -> None:
            clock.now += 1000

    seconds: list[tuple[float, float]] = []

    class Seconds(Hook):
        def on_step(self, done: StepDone) -> None:
            seconds.append((done.seconds, done.agreed.data_seconds))

    train(
        tiny_plan(train__steps=3),
        FakeEngine(clock=clock, step_seconds=4.0),
        NextToken(),
        samples(0, clock, 2.0),
        TrainState(),
        Hooks(Slow(), Seconds()),
        lambda waited, result: StepConsensus(data_seconds=waited),
        clock,
    )
    assert seconds == [(6.0, 2.0)] * 3  # 1,000 s of the slow hook are in none of them


def test_hooks_hear_every_event_in_the_order_they_were_added() -> None:
    heard: list[str] = []

    class Named(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def _hear(self, event: str) -> Callable[..., None]:
            return lambda *_: heard.append(f"{self.name} {event}")

        def __getattribute__(self, name: str) -> Any:
            return (
                object.__getattribute__(self, "_hear")(name)
                if name.startswith("on_")
                else object.__getattribute__(self, name)
            )

    hooks = Hooks(Named("a"))
    hooks.add(Named("b"))
    row: Row = {}
    hooks.on_start(0)
    hooks.on_step(None)  # type: ignore[arg-type]  # nobody looks at it
    hooks.on_eval(row)
    hooks.on_checkpoint(Path())
    hooks.on_end(0)
    events: Sequence[str] = ["on_start", "on_step", "on_eval", "on_checkpoint", "on_end"]
    assert heard == [f"{name} {event}" for event in events for name in "ab"]


def test_one_rank_agrees_with_itself() -> None:
    assert single_rank_reduce([True, 0]) == [1, 0]
