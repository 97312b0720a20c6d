"""A trace of just the steps that were asked for.

pytest tests/observe/test_profiler.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.train.fakes import FakeEngine, samples, completed_step
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.hooks import Hook, Hooks
from toolkit.observe import profiler as profile_module
from toolkit.observe.profiler import Profile
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextToken


class Working(FakeEngine):
    """A matrix product of its own size in each step."""

    def train_step(self, micro_batches, settings):  # type: ignore[no-untyped-def]
        torch.ones(settings.step + 1, 3) @ torch.ones(3, 2)
        return super().train_step(micro_batches, settings)


def traced(
    folder: Path, first: int, steps: int, *, start: int = 0, of: int = 8, stop_at: int | None = None
) -> tuple[list[str], list[str]]:
    """Labels of the trace's steps, and what was said; a training of ``of`` steps."""
    said: list[str] = []
    file = folder / "attempts" / "001" / "trace-rank-0.json.gz"
    hook = Profile(first, steps, file, torch.device("cpu"), say=said.append, tell=said.append)
    state = TrainState(start)

    def agree(waited: float, result: StepResult) -> StepConsensus:
        return StepConsensus(stop=state.step == stop_at)

    train(
        tiny_plan(train__steps=of), Working(), NextToken(), samples(start), state, Hooks(hook, Hook()), agree
    )
    if not file.exists():
        return [], said
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    labels = sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step ")})
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == len(labels)
    return labels, said


def test_the_window_and_nothing_else(tmp_path: Path) -> None:
    labels, said = traced(tmp_path, 3, 2)
    assert labels == ["step 3", "step 4"]
    assert len(said) == 1
    assert said[0].startswith(f"trace of steps 3 to 4: {tmp_path}/attempts/001/trace-rank-0.json.gz (for ")


@pytest.mark.parametrize(
    ("first", "steps", "start", "stop_at", "expected"),
    [
        (1, 1, 0, None, ["step 1"]),
        (7, 5, 0, None, ["step 7", "step 8"]),  # the run ends first
        (5, 4, 6, None, ["step 7", "step 8"]),  # it began inside
        (5, 4, 0, 6, ["step 5", "step 6"]),  # it was stopped
        (2, 2, 4, None, []),  # it began later
        (20, 2, 0, None, []),
    ],
)
def test_at_the_edges(
    tmp_path: Path, first: int, steps: int, start: int, stop_at: int | None, expected: list[str]
) -> None:
    labels, said = traced(tmp_path, first, steps, start=start, stop_at=stop_at)
    assert labels == expected
    assert len(said) == bool(expected)


def test_a_profiler_that_fails_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**named: object) -> None:
        raise RuntimeError("no counters for you")

    monkeypatch.setattr(profile_module, "profile", fails)
    labels, said = traced(tmp_path, 3, 2)
    assert labels == []
    assert said == ["no trace of the steps: RuntimeError: no counters for you"]


def test_outside_the_window_no_profiler_runs(tmp_path: Path) -> None:
    hook = Profile(3, 2, tmp_path / "trace.json.gz", torch.device("cpu"), say=print, tell=print)
    running = []
    hook.on_start(0)
    for step in range(1, 7):
        running.append(torch.autograd._profiler_enabled())
        hook.on_step(completed_step(step))
    hook.on_end(6)
    assert running == [False, False, True, True, False, False]
