"""How a run's time was spent over all attempts: useful steps, repeated steps, and other causes.

pytest tests/test_goodput.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.goodput import (
    CAUSES,
    ENDING,
    EVALUATION,
    OTHER,
    REPEATED,
    SAVING,
    STARTING,
    WAITING,
    Attempt,
    AttemptTimes,
    SaveRecord,
    append_save,
    compute_goodput,
    end_times,
    format_goodput,
    read_attempt,
    write_times,
)

# 10 s of starting, 20 steps of 2 s, two saves of 3 s, an evaluation of 4 s, 1 s of logging, 5 s after the
# last step.
FIRST = Attempt(
    AttemptTimes(
        began=1000,
        seen=1066,
        ended=1066,
        first=0,
        first_step=1012,
        starting=10,
        step=20,
        stepping=40,
        saving=6,
        evaluating=4,
        active=1061,
    ),
    (
        SaveRecord(step=8, seconds=3, bytes=100, stepping=16),
        SaveRecord(step=16, seconds=3, bytes=100, stepping=32),
    ),
)
# From step 16, 30 s later: 24 steps, to the end.
SECOND = Attempt(
    AttemptTimes(
        began=1096,
        seen=1160,
        ended=1160,
        first=16,
        first_step=1108,
        starting=10,
        step=40,
        stepping=48,
        saving=3,
        active=1158,
    )
)


def test_goodput_of_undisturbed_run() -> None:
    found = compute_goodput([FIRST])
    assert found is not None
    assert found.wall_seconds == 66
    assert found.useful_seconds == 40
    assert found.lost == {
        REPEATED: 0,
        STARTING: 10,
        SAVING: 6,
        EVALUATION: 4,
        ENDING: 5,
        WAITING: 0,
        OTHER: 1,
    }
    assert found.useful_seconds + sum(found.lost.values()) == found.wall_seconds
    assert found.share == pytest.approx(40 / 66)
    assert found.start_seconds == (12,)


def test_repeated_steps_and_waiting_are_lost() -> None:
    found = compute_goodput([FIRST, SECOND])
    assert found is not None
    assert found.wall_seconds == 160
    assert found.useful_seconds == 32 + 48  # the control: all steps of both would be 88
    assert found.lost[REPEATED] == 8
    assert found.lost[WAITING] == 30
    assert found.useful_seconds + sum(found.lost.values()) == found.wall_seconds
    assert tuple(found.lost) == CAUSES
    assert "goodput 50.0%: of 2:40 over 2 attempts, 1:20 went into useful steps" in format_goodput(found)
    assert "waiting 0:30, starting 0:20" in format_goodput(found)


def test_steps_after_last_checkpoint_are_lost() -> None:
    kept, stands, nothing = (
        compute_goodput([FIRST], kept=16),
        compute_goodput([FIRST]),
        compute_goodput([FIRST], kept=0),
    )
    assert kept is not None
    assert stands is not None
    assert nothing is not None
    assert (kept.useful_seconds, stands.useful_seconds, nothing.useful_seconds) == (32, 40, 0)
    assert nothing.lost[REPEATED] == 40


def test_going_back_loses_steps_of_both_attempts() -> None:
    third = replace(
        SECOND,
        times=replace(
            SECOND.times, began=1200, seen=1230, ended=1230, first=8, step=10, stepping=4, active=1230
        ),
    )
    found = compute_goodput([FIRST, SECOND, third])
    assert found is not None
    assert found.useful_seconds == 16 + 0 + 4
    assert found.lost[REPEATED] == 24 + 48


def test_work_is_interpolated_between_saves() -> None:
    assert [FIRST.work(step) for step in (0, 4, 8, 12, 16, 18, 20, 99)] == [0, 8, 16, 24, 32, 36, 40, 40]


def test_attempts_without_training_or_end() -> None:
    never = Attempt(AttemptTimes(began=1070, seen=1075, ended=1090))
    killed = Attempt(replace(FIRST.times, ended=None, seen=1064))
    found = compute_goodput([killed, never, SECOND])
    assert found is not None
    assert found.lost[STARTING] == 10 + 20 + 10
    assert found.lost[WAITING] == (1070 - 1064) + (1096 - 1090)
    assert found.lost[ENDING] == (1064 - 1061) + (1160 - 1158)
    assert found.start_seconds == (12, 12)


def test_negative_clock_differences_count_as_zero() -> None:
    early = replace(SECOND, times=replace(SECOND.times, began=1050))
    found = compute_goodput([FIRST, early])
    assert found is not None
    assert found.lost[WAITING] == 0
    assert all(seconds >= 0 for seconds in found.lost.values())
    assert compute_goodput([]) is None


def test_incomplete_files_are_skipped(tmp_path: Path) -> None:
    write_times(tmp_path, replace(FIRST.times, ended=None))
    for save in FIRST.saves:
        append_save(tmp_path, save)
    with (tmp_path / "saves.jsonl").open("a") as file:
        file.write('{"step": 24, "seco')
    end_times(tmp_path, 1066.0, state="failed", reason="rank 1")
    end_times(tmp_path, 1099.0, state="failed", reason="later")
    found = read_attempt(tmp_path)
    assert found is not None
    assert found.saves == FIRST.saves
    assert found.times == replace(FIRST.times, state="failed", reason="rank 1")
    end_times(tmp_path, 1099.0, state="failed", reason="the parent knows", overwrite=True)
    again = read_attempt(tmp_path)
    assert again is not None
    assert (again.times.ended, again.times.reason) == (1099.0, "the parent knows")
    (tmp_path / "times.json").write_text('{"began": 1')
    assert read_attempt(tmp_path) is None
    assert read_attempt(tmp_path / "none") is None
