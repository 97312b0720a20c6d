"""Rows of repeated steps.

pytest tests/rundir/test_repeated_steps.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rundir.runs import PLAN, begin_run, config
from toolkit.rundir.directory import RunDirectory


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step / 3}) + "\n" for step in steps)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def two_attempts(path: Path) -> RunDirectory:
    directory = begin_run(path)
    assert directory.begin(config(), PLAN) == 2
    return directory


def test_rows_of_repeated_steps_move_to_old_attempt(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2, 3, 4, 5))
    directory.eval_file.write_text(rows(2, 4))
    directory.move_rows_after(3, attempt=2)
    assert directory.metrics_file.read_text() == rows(1, 2, 3)
    assert steps_of(directory.attempt_folder(1) / "metrics.jsonl") == [4, 5]
    assert steps_of(directory.eval_file) == [2]
    assert steps_of(directory.attempt_folder(1) / "eval.jsonl") == [4]


@pytest.mark.parametrize(
    "torn", ['{"step": 4, "lo', '{"step": 4}', "\x00\x00\x00", "[4]\n", '{"step": "4"}\n']
)
def test_incomplete_last_row_is_dropped(tmp_path: Path, torn: str) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2, 3) + torn)
    directory.move_rows_after(3, attempt=2)
    assert directory.metrics_file.read_text() == rows(1, 2, 3)


def test_invalid_utf8_is_dropped(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_bytes(rows(1, 2).encode() + b'{"step": 3, "a": "\xff')
    directory.move_rows_after(2, attempt=2)
    assert directory.metrics_file.read_text() == rows(1, 2)


def test_trimming_twice_keeps_each_row_once(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2, 3))
    (directory.attempt_folder(1) / "metrics.jsonl").write_text(
        rows(2, 3)
    )  # as if the second write had not happened
    directory.move_rows_after(1, attempt=2)
    assert steps_of(directory.attempt_folder(1) / "metrics.jsonl") == [2, 3]
    assert steps_of(directory.metrics_file) == [1]


def test_file_without_later_rows_is_unchanged(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2))
    inode = directory.metrics_file.stat().st_ino
    directory.move_rows_after(2, attempt=2)
    assert directory.metrics_file.stat().st_ino == inode
    assert not (directory.attempt_folder(1) / "metrics.jsonl").exists()


def test_a_run_without_metrics_has_nothing_to_trim(tmp_path: Path) -> None:
    two_attempts(tmp_path).move_rows_after(0, attempt=2)
