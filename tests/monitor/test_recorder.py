"""Step recorder: nesting, threads, late clocks, pipelines, and the cost of a mark.

pytest tests/monitor/test_recorder.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest

from toolkit.monitor.recorder import (
    MAX_STEPS,
    MAX_UNREAD_MARKS,
    PIPELINE,
    Clock,
    HostClock,
    StepRecorder,
    attribute_seconds,
    step_time,
)
from toolkit.step_parts import (
    BACKWARD,
    BUBBLE,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    UNEXPLAINED,
    communication,
)

TENSOR = communication("tensor")


class Hands(Clock):
    """A clock that is moved by hand. Stamps after ``late`` have not passed."""

    def __init__(self) -> None:
        self.now, self.late = 0.0, float("inf")
        self.released: list[float] = []

    def stamp(self) -> float:
        return self.now

    def seconds(self, earlier: float, later: float) -> float:
        assert later <= self.late, "read before it has passed"
        return later - earlier

    def passed(self, stamp: float) -> bool:
        return stamp <= self.late

    def release(self, stamps: Iterable[float]) -> None:
        self.released += stamps

    def idle(self) -> bool:
        return False


def started(**settings: bool) -> tuple[StepRecorder, Hands]:
    clock = Hands()
    recorder = StepRecorder(clock, **settings)
    recorder.next_step(1)
    return recorder, clock


def parts(recorder: StepRecorder) -> dict[str, float]:
    recorder.next_step(2)
    (found,) = recorder.take_steps()
    return dict(found.parts)


def test_part_lasts_until_the_next_mark() -> None:
    marks = [("a", 0.0), ("b", 1.0), ("a", 3.0), ("c", 3.5)]
    assert attribute_seconds(marks, 10.0, lambda earlier, later: later - earlier) == {
        "a": 1.5,
        "b": 2.0,
        "c": 6.5,
    }


def test_transfer_time_is_taken_from_the_wait() -> None:
    marks = [(BUBBLE, 0.0), ("a", 4.0), (BUBBLE, 5.0)]
    found = attribute_seconds(marks, 5.5, lambda earlier, later: later - earlier, {0: 1.0, 2: 1.0})
    assert found == {BUBBLE: 3.0, "a": 1.0, PIPELINE: 1.5}


def test_busy_excludes_waiting() -> None:
    found = step_time(3, {FORWARD: 5.0, BUBBLE: 1.0, DATA: 2.0, TENSOR: 0.5, EVALUATION: 4.0})
    assert (found.wall, found.busy) == (12.5, 5.0)


def test_time_belongs_to_the_innermost_part() -> None:
    recorder, clock = started()
    clock.now = 1
    with recorder.part(BACKWARD):
        clock.now = 3
        with recorder.part(TENSOR):
            clock.now = 4
        clock.now = 8
    clock.now = 9
    assert parts(recorder) == {UNEXPLAINED: 2, BACKWARD: 6, TENSOR: 1}


def test_evaluation_owns_the_parts_inside() -> None:
    recorder, clock = started()
    for name in (EVALUATION, CHECKPOINT):
        with recorder.part(name):
            clock.now += 1
            with recorder.part(FORWARD), recorder.collective_part("data"):
                clock.now += 2
            with recorder.part(CHECKPOINT):
                clock.now += 3
    assert parts(recorder) == {UNEXPLAINED: 0, EVALUATION: 6, CHECKPOINT: 6}


def test_exception_closes_the_open_parts() -> None:
    recorder, clock = started()

    def fail() -> None:
        with recorder.part(FORWARD), recorder.part(TENSOR):
            clock.now = 2
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert recorder.current == (1, UNEXPLAINED)
    clock.now = 5
    assert parts(recorder) == {UNEXPLAINED: 3, FORWARD: 0, TENSOR: 2}


def test_other_threads_are_not_recorded() -> None:
    recorder, clock = started()

    def save() -> None:
        with recorder.part(TENSOR):
            clock.now += 4

    thread = threading.Thread(target=save)
    with recorder.part(FORWARD):
        thread.start()
        thread.join()
    assert parts(recorder) == {UNEXPLAINED: 0, FORWARD: 4}


def test_thread_not_started_by_python_is_recorded() -> None:
    """On GPUs, backward runs in such a thread; ``_thread`` starts one without ``threading``."""
    import _thread

    recorder, clock = started()
    done = threading.Event()

    def hook() -> None:
        with recorder.part(TENSOR):
            clock.now += 4
        done.set()

    with recorder.part(BACKWARD):
        clock.now += 1
        _thread.start_new_thread(hook, ())
        assert done.wait(5)
    assert parts(recorder) == {UNEXPLAINED: 0, BACKWARD: 1, TENSOR: 4}


def test_nothing_is_recorded_before_the_first_step() -> None:
    clock = Hands()
    recorder = StepRecorder(clock)
    with recorder.part(FORWARD):
        clock.now = 7
    recorder.next_step(11)
    clock.now = 8
    recorder.next_step(12)
    assert [(found.step, found.wall) for found in recorder.take_steps()] == [(11, 1)]
    assert recorder.take_steps() == []


def test_steps_are_read_after_the_device_has_passed_them() -> None:
    recorder, clock = started()
    clock.late = 0
    for step in range(2, 5):
        clock.now += 1
        recorder.next_step(step)
    assert recorder.take_steps() == []
    clock.late = 2
    assert [found.step for found in recorder.take_steps()] == [1, 2]
    assert clock.released == [0, 1]
    clock.late = 3
    assert [found.step for found in recorder.take_steps()] == [3]


def test_untaken_steps_are_bounded() -> None:
    recorder, _ = started()
    for step in range(2, MAX_STEPS + 100):
        recorder.next_step(step)
    taken = recorder.take_steps()
    assert len(taken) == MAX_STEPS
    assert taken[-1].step == MAX_STEPS + 98


def test_unread_marks_are_read_by_the_training_thread() -> None:
    recorder, clock = started()
    for step in range(2, 12):
        for _ in range(MAX_UNREAD_MARKS // 4):
            with recorder.part(FORWARD):
                clock.now += 1
        recorder.next_step(step)
    assert len(clock.released) > 7 * MAX_UNREAD_MARKS // 2
    assert [found.parts[FORWARD] for found in recorder.take_steps()] == [MAX_UNREAD_MARKS // 4] * 10


def test_wait_for_another_stage_is_bubble() -> None:
    recorder, clock = started(pipelined=True)
    recorder.set_transfer_seconds(lambda size: size / 1000)
    with recorder.schedule(), recorder.part(FORWARD):
        with recorder.transfer_start_part("pipeline"):
            clock.now += 1
        with recorder.transfer_wait_part("pipeline", 500):
            clock.now += 2
        with recorder.collective_part("tensor"):
            clock.now += 4
    with recorder.part(OPTIMIZER):
        with recorder.collective_part("data"):
            clock.now += 8
        with recorder.collective_part("data+pipeline"):
            clock.now += 16
        with recorder.collective_part("all"):
            clock.now += 32
        with recorder.transfer_wait_part("pipeline", 500):
            clock.now += 64
    found = parts(recorder)
    assert found[BUBBLE] == 1 + 1.5 + 16
    assert found[PIPELINE] == 0.5 + 64
    assert (found[TENSOR], found[communication("data")], found[communication("all")]) == (4, 8, 32)
    with recorder.schedule():
        pass
    recorder.next_step(3)
    with recorder.collective_part("all"):  # in the next step nothing waits for the end of a schedule
        clock.now += 1
    recorder.next_step(4)
    assert recorder.take_steps()[-1].parts == {UNEXPLAINED: 0, communication("all"): 1}


def test_schedule_without_stages_has_no_bubble() -> None:
    recorder, clock = started()
    with recorder.schedule():
        clock.now += 1
    with recorder.collective_part("all"):
        clock.now += 2
    assert parts(recorder) == {UNEXPLAINED: 1, communication("all"): 2}


def test_mark_is_cheap() -> None:
    """Opening and closing a part is two marks, 1 us each. The minimum of rounds excludes other load."""
    recorder = StepRecorder(HostClock())
    seconds = []
    for step in range(5):
        recorder.next_step(step)
        began = time.perf_counter()
        for _ in range(2000):
            with recorder.part(FORWARD):
                pass
        seconds.append((time.perf_counter() - began) / 4000)
    assert min(seconds) <= 1e-5, f"{min(seconds) * 1e6:.2f} us"
