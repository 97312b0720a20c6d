"""Stopping without enough time to save, and the record of time that the estimate comes from.

pytest tests/train/test_save_deadline.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.fakes import FakeClock, completed_step
from tests.train.tiny_run import STEPS, TinyRun
from toolkit import checkpoint_folder
from toolkit.errors import ExitCode
from toolkit.goodput import AttemptTimes, SaveRecord, read_saves, read_times, write_times
from toolkit.observe.goodput_tracker import GoodputTracker
from toolkit.plan.checkpoint_size import assumed_speed, rank_bytes
from toolkit.plan.types import Device, World
from toolkit.rundir.status import RunState
from toolkit.testing.tiny import tiny_plan
from toolkit.train.save_deadline import MAX_SAVES, SaveDeadline


def test_first_save_is_estimated_from_the_plan() -> None:
    plan = tiny_plan()
    size = rank_bytes(plan)
    assert size == sum(spec.numel for spec in plan.parameters) * (4 + 8), (
        "fp32 weights, which are their own masters, and two moments"
    )
    save_deadline = SaveDeadline(plan)
    estimate = save_deadline.estimate()
    assert estimate is not None
    assert estimate.seconds == pytest.approx(size / 2e9)
    assert "has not been measured" in estimate.explanation
    assert save_deadline.too_late(estimate.seconds / 2)
    assert not save_deadline.too_late(estimate.seconds * 2)
    assert not save_deadline.too_late(None), "this rank was not asked to stop"
    assert assumed_speed(World(ranks=16, ranks_per_node=8, device=Device.CUDA)) == 2e9 / 8


def test_estimate_uses_the_newest_measured_saves() -> None:
    plan = tiny_plan()
    size = rank_bytes(plan)
    assert size is not None
    save_deadline = SaveDeadline(plan, [SaveRecord(step=2, seconds=50.0, bytes=size // 2, stepping=1.0)])
    estimate = save_deadline.estimate()
    assert estimate is not None
    assert estimate.seconds == pytest.approx(100.0, rel=1e-3)
    assert save_deadline.too_late(60.0)
    for step in range(MAX_SAVES):
        save_deadline.on_save_end(step, 1.0, size)
    assert not save_deadline.too_late(60.0)
    assert save_deadline.too_late(0.5)


def test_save_that_is_still_being_written_leaves_less_time() -> None:
    plan, clock = tiny_plan(), FakeClock()
    size = rank_bytes(plan)
    assert size is not None
    deadline = SaveDeadline(plan, [SaveRecord(step=2, seconds=100.0, bytes=size, stepping=1.0)], clock)
    assert not deadline.too_late(130.0)
    deadline.on_save_start(4)
    clock.now += 60.0
    assert not deadline.too_late(150.0)
    assert deadline.too_late(130.0), "40 s for the save that is under way, and 100 s for the next one"
    text = deadline.describe_lost_work("SIGTERM", step=5, saved=2, seconds=1.0)
    assert "after the one before, which had not ended, and 130 s were left" in text
    deadline.on_save_end(4, 100.0, size)
    assert not deadline.too_late(130.0)


def test_lost_work_is_described_in_steps_and_time() -> None:
    plan = tiny_plan()
    size = rank_bytes(plan)
    assert size is not None
    save_deadline = SaveDeadline(plan, [SaveRecord(step=2, seconds=100.0, bytes=size, stepping=1.0)])
    assert save_deadline.too_late(42.0)
    text = save_deadline.describe_lost_work("SIGTERM", step=437, saved=400, seconds=730.0)
    assert text.startswith(
        "SIGTERM; not saved: a save takes about 100 s, by the speed of the last 1, and 42 s were left; "
    )
    assert "the newest checkpoint is of step 400, so 37 steps and 12:10 of work will be repeated" in text
    assert "there is no checkpoint, so 1 step and 0:02 of work" in save_deadline.describe_lost_work(
        "SIGTERM", step=1, saved=None, seconds=2.0
    )
    assert "there was no time for it" in SaveDeadline(plan).describe_lost_work(
        "another rank was asked to stop", step=1, saved=None, seconds=2.0
    )


# ---- the goodput tracker


def test_tracker_records_the_time_of_an_attempt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    write_times(tmp_path, AttemptTimes(began=90.0, seen=90.0))
    times = GoodputTracker(tmp_path, [], clock)
    assert not times.has_saved
    clock.now = 109.5
    times.on_start(4)
    clock.now = 110.0
    times.on_step(completed_step(5))  # of 0.5 s
    written = read_times(tmp_path)
    assert written is not None
    assert (written.first_step, written.step) == (110.0, 5), "the first step is written at once"
    assert caplog.messages == ["completed the first step (step 5) 20.0 s after the start"]
    times.on_save_start(5)
    clock.now = 113.0
    times.on_save_blocked(3.0)
    times.on_save_end(5, 2.5, 1000)
    written = read_times(tmp_path)
    assert written is not None
    assert (written.saving, written.seen) == (3.0, 113.0)
    times.on_save_end(5, 2.5, 1000)  # as if the last step were saved twice
    times.on_step(completed_step(6))
    clock.now = 114.0
    times.on_eval({"seconds": 0.75})
    assert times.unsaved_seconds() == 0.5
    times.on_end(6)
    assert read_times(tmp_path) == AttemptTimes(
        began=90.0,
        seen=114.0,
        first=4,
        first_step=110.0,
        starting=19.5,
        step=6,
        stepping=1.0,
        saving=3.0,
        evaluating=0.75,
        active=114.0,
    )
    assert read_saves(tmp_path) == (SaveRecord(step=5, seconds=2.5, bytes=1000, stepping=0.5),)
    assert times.has_saved
    found = times.goodput()
    assert found is not None
    assert (found.wall_seconds, found.useful_seconds) == (24.0, 1.0)
    stopped = times.goodput(5)
    assert stopped is not None
    assert (stopped.useful_seconds, stopped.lost["repeated"]) == (0.5, 0.5), "where step 6 is lost"
    assert len(caplog.messages) == 1


# ---- whole runs


def test_run_without_time_to_save_resumes_from_the_earlier_checkpoint(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert TinyRun(folder, data, stop_after=3).code is ExitCode.STOPPED
    saves = folder / "attempts" / "001" / "saves.jsonl"
    row = json.loads(saves.read_text())
    assert row["step"] == 3
    assert row["stepping"] > 0
    saves.write_text(
        json.dumps({**row, "seconds": 100.0}) + "\n"
    )  # as on a disk that is a thousand times slower

    second = TinyRun(folder, data, stop_after=2, seconds_left=lambda: 42.0)
    assert second.code is ExitCode.STOPPED
    assert (second.status.state, second.status.exit_code, second.status.step) == (RunState.STOPPED, 75, 5)
    assert second.status.reason is not None
    assert second.status.reason.startswith("SIGTERM; not saved: a save takes about ")
    assert "the newest checkpoint is of step 3, so 2 steps and " in second.status.reason
    assert checkpoint_folder.newest_checkpoint(
        folder / "checkpoints"
    ) == folder / "checkpoints" / checkpoint_folder.step_name(3)
    assert second.status.goodput is not None
    assert second.status.goodput["lost"]["repeated"] > 0

    third = TinyRun(folder, data)
    assert third.code is ExitCode.DONE
    assert [row["step"] for row in third.rows()] == list(range(1, STEPS + 1))
    assert third.status.goodput is not None
    assert third.status.goodput["attempts"] == 3
    assert third.status.goodput["lost"]["repeated"] == pytest.approx(
        second.status.goodput["lost"]["repeated"], abs=0.01
    )


def test_run_with_time_to_save_saves(data: Path, tmp_path: Path) -> None:
    """The control."""
    folder = tmp_path / "run"
    start = TinyRun(folder, data, stop_after=2, seconds_left=lambda: 3600.0)
    assert start.code is ExitCode.STOPPED
    assert checkpoint_folder.newest_checkpoint(
        folder / "checkpoints"
    ) == folder / "checkpoints" / checkpoint_folder.step_name(2)
