"""The profiler traces exactly the configured steps.

pytest tests/observe/test_profiler.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.captured import captured_logs
from tests.train.fakes import FakeEngine, completed_step, samples
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.hooks import Hook, Hooks
from toolkit.observe import profiler
from toolkit.observe.profiler import StepProfiler
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextTokenTask


class MatmulEngine(FakeEngine):
    """Compute one matrix product per step."""

    def train_step(self, micro_batches, settings):  # type: ignore[no-untyped-def]
        torch.ones(settings.step + 1, 3) @ torch.ones(3, 2)
        return super().train_step(micro_batches, settings)


def trace_training(
    folder: Path, first: int, steps: int, *, start: int = 0, of: int = 8, stop_at: int | None = None
) -> tuple[list[str], list[str]]:
    """Train ``of`` steps. Return the labels of the trace's steps, and the log messages."""
    file = folder / "attempts" / "001" / "trace-rank-0.json.gz"
    hook = StepProfiler(first, steps, file, torch.device("cpu"))
    state = TrainState(start)

    def sync(data_seconds: float, result: StepResult) -> StepConsensus:
        return StepConsensus(stop=state.step == stop_at)

    plan = tiny_plan(train__steps=of, train__global_batch=4)
    with captured_logs() as (messages, warnings):
        train(plan, MatmulEngine(), NextTokenTask(), samples(start), state, Hooks(hook, Hook()), sync)
    messages += warnings
    if not file.exists():
        return [], messages
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    labels = sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step ")})
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == len(labels)
    return labels, messages


def test_trace_has_exactly_the_window(tmp_path: Path) -> None:
    labels, messages = trace_training(tmp_path, 3, 2)
    assert labels == ["step 3", "step 4"]
    assert len(messages) == 1
    assert messages[0].startswith(
        f"trace of steps 3 to 4: {tmp_path}/attempts/001/trace-rank-0.json.gz (for "
    )


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
def test_window_is_cut_to_the_attempt(
    tmp_path: Path, first: int, steps: int, start: int, stop_at: int | None, expected: list[str]
) -> None:
    labels, messages = trace_training(tmp_path, first, steps, start=start, stop_at=stop_at)
    assert labels == expected
    assert len(messages) == bool(expected)


def test_failing_profiler_is_logged_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**named: object) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(profiler, "profile", fails)
    labels, messages = trace_training(tmp_path, 3, 2)
    assert labels == []
    assert messages == ["the steps are not profiled: RuntimeError: no counters"]


def test_profiler_runs_only_inside_the_window(tmp_path: Path) -> None:
    hook = StepProfiler(3, 2, tmp_path / "trace.json.gz", torch.device("cpu"))
    running = []
    hook.on_start(0)
    for step in range(1, 7):
        running.append(torch.autograd._profiler_enabled())
        hook.on_step(completed_step(step))
    hook.on_end(6)
    assert running == [False, False, True, True, False, False]
