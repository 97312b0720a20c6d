"""The hooks: metrics, evaluation, checkpoints, status and plots.

pytest tests/train/test_hooks.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.fakes import FakeClock, FakeEngine, completed_step, context_of, samples
from toolkit.checkpoint.online.store import PendingSave
from toolkit.config.schema import Precision
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import StepConsensus
from toolkit.hooks import CompletedStep
from toolkit.monitor.sink import Kind, Row
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.throughput import RunTimer, TimeSpent
from toolkit.observe.progress_hooks import (
    PLOT_SECONDS,
    STATUS_SECONDS,
    DataProgressLogger,
    MetricsLogger,
    PlotWriter,
    StatusWriter,
)
from toolkit.plan import make_plan
from toolkit.plan.flops import flops_per_step
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.testing.tiny import tiny_config, tiny_plan
from toolkit.train.evaluation import Evaluation
from toolkit.train.saving import Checkpoints, SaveTimer
from toolkit.train.state import StateWriter
from toolkit.train.task import NextTokenTask

# ---- metrics


def one_source(step: int) -> Mapping[str, tuple[int, float]]:
    return {"train": (8 * step, step / 4)}


def write_row(
    tmp_path: Path, plan: RunPlan, completed: CompletedStep, consumed: Callable[..., Any] = one_source
) -> dict[str, Any]:
    """Return the metrics row of an attempt that started 5 seconds ago, after a minute of earlier attempts."""
    sink, clock = JsonlSink({Kind.STEP: tmp_path / "metrics.jsonl"}), FakeClock()
    run_timer = RunTimer(plan, TimeSpent(seconds=60.0), clock() - 5)
    MetricsLogger(plan, sink, consumed, run_timer, clock).on_step(completed)
    sink.close(0)
    return json.loads((tmp_path / "metrics.jsonl").read_text())


def test_metrics_row_has_exactly_these_keys_in_full_precision(tmp_path: Path) -> None:
    result = StepResult(loss=1 / 3, grad_norm=2 / 3, tokens=1000)
    row = write_row(
        tmp_path,
        tiny_plan(),
        CompletedStep(7, 0.1 + 0.2, result, 0.3, StepConsensus(data_seconds=0.1), False),
    )
    assert row == {
        "step": 7,
        "loss": 1 / 3,
        "grad_norm": 2 / 3,
        "lr": 0.1 + 0.2,
        "tokens": 1000,
        "step_seconds": 0.3,
        "data_seconds": 0.1,
        "gc_seconds": 0.0,
        "host_bytes": 0,
        "tokens_per_second": 1000 / 0.3,
        "samples_per_second": 8 / 0.3,
        "elapsed_seconds": 65.0,
    }


def test_metrics_row_on_gpus_has_utilization_memory_and_cost(tmp_path: Path) -> None:
    plan = make_plan(
        tiny_config(precision__name=Precision.bf16, monitor__price_per_gpu_hour=2.0),
        World(ranks=1, ranks_per_node=1, device=Device.CUDA, gpu="h100"),
    )
    done = CompletedStep(7, 0.1, StepResult(loss=1.0, grad_norm=1.0, tokens=200), 0.5, StepConsensus(), False)
    row = write_row(tmp_path, plan, done)
    assert row.keys() - write_row(tmp_path / "cpu", tiny_plan(), done).keys() == {
        "device_bytes",
        "device_peak_bytes",
        "tokens_per_second_per_gpu",
        "model_tflops_per_gpu",
        "mfu",
        "gpu_hours",
        "cost",
    }
    flops = flops_per_step(plan)
    assert flops is not None
    assert row["mfu"] == pytest.approx(flops / 0.5 / 989.4e12, rel=1e-12)  # masked tokens are computed too
    assert row["cost"] == pytest.approx(2.0 * 5 / 3600, rel=1e-12)


def test_metrics_row_has_epochs_of_several_sources(tmp_path: Path) -> None:
    done = CompletedStep(8, 0.1, StepResult(loss=1.0, grad_norm=1.0, tokens=10), 0.3, StepConsensus(), False)
    row = write_row(tmp_path, tiny_plan(), done, lambda step: {"code": (step, 0.5), "web": (3 * step, 0.125)})
    assert {name: row[name] for name in row if name.startswith("epochs")} == {
        "epochs/code": 0.5,
        "epochs/web": 0.125,
    }


def test_samples_taken_are_logged_once_per_step(caplog: pytest.LogCaptureFixture) -> None:
    hook = DataProgressLogger(lambda step: {"code": (1000 * step, 0.5), "web": (3000 * step, 1.25)})
    hook.on_eval({"step": 2})
    hook.on_eval({"step": 2})
    hook.on_checkpoint(Path("checkpoints/step-00000002"))
    hook.on_checkpoint(Path("checkpoints/step-00000004"))
    assert caplog.messages == [
        f"step {step}: samples taken: code {step},000 (0.5 epochs), web {3 * step},000 (1.25 epochs)"
        for step in (2, 4)
    ]


def test_fp16_adds_the_loss_scale(tmp_path: Path) -> None:
    plan = tiny_plan()
    plan.config.precision.name = Precision.fp16
    result = StepResult(loss=1.0, grad_norm=float("inf"), tokens=10, skipped=True, loss_scale=65536.0)
    row = write_row(tmp_path, plan, CompletedStep(1, 0.1, result, 0.5, StepConsensus(), False))
    assert row["skipped"] is True
    assert row["loss_scale"] == 65536.0
    assert row["grad_norm"] is None, "JSON has no infinity"


# ---- evaluation


def evaluate(
    every: int, *, missing: bool = False, at: Sequence[CompletedStep] = (), start: int | None = None
) -> list[tuple[int, str]]:
    """Return the evaluated steps and sets of a run of ten steps."""
    rows: list[Mapping[str, Any]] = []
    clock = FakeClock()
    sets = {name: (lambda: [next(samples()), next(samples())]) for name in ("validation", "other")}
    hook = Evaluation(
        tiny_plan(train__steps=10, eval__every=every),
        FakeEngine(),
        NextTokenTask(),
        sets,
        missing=lambda step: missing,
        on_eval=rows.append,
        clock=clock,
    )
    if start is not None:
        hook.on_start(start)
    for completed in at:
        hook.on_step(completed)
    assert all(row["loss"] == 2.5 and row["tokens"] == 32 and row["seconds"] == 0.0 for row in rows)
    return [(row["step"], row["set"]) for row in rows]


def test_every_set_is_evaluated_at_intervals_and_after_the_last_step() -> None:
    steps = [completed_step(step, last=step == 10) for step in range(1, 11)]
    assert evaluate(4, at=steps) == [(step, name) for step in (4, 8, 10) for name in ("validation", "other")]
    assert evaluate(0, at=steps) == []


def test_evaluation_is_skipped_at_a_stop_and_made_by_the_next_start() -> None:
    assert evaluate(4, at=[completed_step(4, stop=True)]) == []
    assert evaluate(4, start=4, missing=True) == [(4, "validation"), (4, "other")]
    assert evaluate(4, start=4, missing=False) == []
    assert evaluate(4, start=5, missing=True) == []
    assert evaluate(4, start=0, missing=True) == []


# ---- checkpoints


class FakeStore:
    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []
        self.scalars: list[Mapping[str, object]] = []
        self.futures: list[Future[None]] = []

    def save(
        self, step: int, shards: object, scalars: Mapping[str, object], *, background: bool, **more: object
    ) -> PendingSave:
        self.saved.append((step, background))
        self.scalars.append(scalars)
        future: Future[None] = Future()
        self.futures.append(future)
        if not background:
            future.set_result(None)
        return PendingSave(Path(f"step-{step:08d}"), future)


def checkpoints(
    store: FakeStore, timer: SaveTimer | None = None, flush: Callable[[], None] = lambda: None, **changes: Any
) -> tuple[Checkpoints, list[Path]]:
    saved: list[Path] = []
    plan = tiny_plan(**{f"checkpoint__{name}": value for name, value in changes.items()})
    stream = SimpleNamespace(fingerprint=lambda: {"order": "x"}, state=lambda step: {})
    hook = Checkpoints(
        StateWriter(context_of(plan, Path()), FakeEngine(), stream, flush),  # type: ignore[arg-type]
        store,  # type: ignore[arg-type]
        timer or SaveTimer(None),
        on_checkpoint=saved.append,
    )
    return hook, saved


def test_saves_every_n_steps_and_after_the_last() -> None:
    store = FakeStore()
    hook, saved = checkpoints(store, every="3")
    for step in range(1, 9):
        hook.on_step(completed_step(step, last=step == 8))
    assert store.saved == [(3, False), (6, False), (8, False)]
    assert saved == [Path("step-00000003"), Path("step-00000006"), Path("step-00000008")]
    assert store.scalars[1]["step"] == 6
    assert store.scalars[1]["consumed_samples"] == 48
    assert store.scalars[1]["data"] == {"order": "x"}
    assert store.scalars[1]["optimizer_step"] == 0


def test_cadence_never_saves_only_at_a_stop() -> None:
    store = FakeStore()
    hook, _ = checkpoints(store, every="never", at_end=False)
    for step in range(1, 9):
        hook.on_step(completed_step(step, last=step == 8))
    assert store.saved == []
    hook.on_step(completed_step(9, stop=True))
    assert store.saved == [(9, False)]


def test_export_saves_the_last_step() -> None:
    store = FakeStore()
    hook, _ = checkpoints(store, every="never", at_end=False, export=True)
    hook.on_step(completed_step(20, last=True))
    assert store.saved == [(20, False)]


def test_stop_saves_in_the_foreground() -> None:
    store = FakeStore()
    hook, saved = checkpoints(store, every="2", background=True)
    hook.on_step(completed_step(2))
    store.futures[0].set_result(None)
    hook.on_step(completed_step(3, stop=True))
    assert store.saved == [(2, True), (3, False)]
    assert saved == [Path("step-00000002"), Path("step-00000003")]


def test_timer_restarts_with_each_save() -> None:
    clock, store = FakeClock(), FakeStore()
    timer = SaveTimer(90.0, clock)
    hook, _ = checkpoints(store, timer, every="90s")
    for step, now in enumerate([30.0, 89.0, 90.0, 100.0, 179.0, 180.0], 1):
        clock.now = 100.0 + now
        hook.on_step(completed_step(step, save=timer.due()))
    assert [step for step, _ in store.saved] == [3, 6]
    assert not SaveTimer(None, clock).due()


def test_background_save_is_reported_when_it_is_complete() -> None:
    store = FakeStore()
    hook, saved = checkpoints(store, every="2", background=True)
    hook.on_step(completed_step(2))
    hook.on_step(completed_step(3))
    assert saved == []
    store.futures[0].set_result(None)
    hook.on_step(completed_step(5))
    assert saved == [Path("step-00000002")]
    hook.on_step(completed_step(6))
    store.futures[1].set_result(None)
    hook.on_end(7)
    assert saved == [Path("step-00000002"), Path("step-00000006")]


def test_save_after_a_failed_background_save_is_made_in_the_foreground(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeStore()
    hook, saved = checkpoints(store, every="2", background=True)
    hook.on_step(completed_step(2))
    store.futures[0].set_exception(OSError("no space"))
    hook.on_step(completed_step(3))
    assert caplog.messages == [
        "step-00000002 could not be saved, and the next save is made in the foreground: OSError: no space"
    ]
    hook.on_step(completed_step(4))
    hook.on_step(completed_step(6))
    assert store.saved == [(2, True), (4, False), (6, True)]
    assert saved == [Path("step-00000004")]


def test_rows_are_flushed_before_a_save(tmp_path: Path) -> None:
    """If the run is killed later, queued rows would be of steps that are not repeated."""
    file = tmp_path / "metrics.jsonl"

    class Slow(JsonlSink):
        def log(self, kind: Kind, row: Row) -> None:
            time.sleep(0.02)
            super().log(kind, row)

    class CountingStore(FakeStore):
        def save(self, *arguments: Any, **named: Any) -> PendingSave:
            found.append(len(list(read_rows(file))))
            return super().save(*arguments, **named)

    found: list[int] = []
    for flushes in (True, False):
        sink = QueuedSink(lambda: Slow({Kind.STEP: file}), "slow")
        hook, _ = checkpoints(CountingStore(), flush=sink.flush if flushes else lambda: None, every="5")
        for step in range(1, 6):
            sink.log(Kind.STEP, {"step": step})
            hook.on_step(completed_step(step))
        sink.close(0)
        file.unlink()
    assert found[0] == 5
    assert found[1] < 5, "the control does not flush"


# ---- status and plots


def test_status_is_written_at_a_bounded_rate(tmp_path: Path) -> None:
    directory, clock = RunDirectory(tmp_path), FakeClock()
    hook = StatusWriter(directory, 3, None, clock)

    def read_status() -> tuple[int | None, str | None]:
        status = directory.status()
        assert status is not None
        assert (status.state, status.attempt, status.exit_code) == (RunState.RUNNING, 3, None)
        return status.step, status.checkpoint

    hook.on_start(4)
    assert read_status() == (4, None)
    hook.on_step(completed_step(5))
    assert read_status() == (4, None)
    clock.now += STATUS_SECONDS
    hook.on_step(completed_step(6))
    assert read_status() == (6, None)
    hook.on_step(completed_step(7))
    hook.on_checkpoint(tmp_path / "step-00000007")
    assert read_status() == (7, str(tmp_path / "step-00000007"))
    hook.on_step(completed_step(8))
    hook.on_end(8)
    assert read_status() == (8, str(tmp_path / "step-00000007"))


def test_plots_are_drawn_at_a_bounded_rate_and_at_the_end() -> None:
    drawn: list[int] = []
    clock = FakeClock()
    hook = PlotWriter(lambda: drawn.append(1), clock)
    hook.on_checkpoint(Path())
    assert drawn == []  # a minute has not passed
    clock.now += PLOT_SECONDS
    hook.on_checkpoint(Path())
    hook.on_checkpoint(Path())
    hook.on_end(1)
    assert drawn == [1, 1]


def test_failed_plot_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def draw() -> None:
        raise ImportError("no matplotlib")

    hook = PlotWriter(draw)
    hook.on_end(1)
    hook.on_end(2)
    assert caplog.messages == ["plots are disabled: ImportError: no matplotlib"]
