"""The sweep store: claims, results, comparison of points, and the report."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.cluster.sweep_points import points
from toolkit.cluster.sweep.report import format_table, group_reasons, rank_rows
from toolkit.cluster.sweep.store import PointRow, PointState, SweepStore, read_metric, read_result
from toolkit.config.compose import compose
from toolkit.config.sweep import SweepSection
from toolkit.errors import ConfigError, ExitCode
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

# -- claims and results


def test_claim_is_exclusive_and_released_on_death(tmp_path: Path) -> None:
    record = SweepStore(tmp_path)
    record.initialize("id", ["zero=stage1"], SweepSection())
    code = f"""
from pathlib import Path
from toolkit.cluster.sweep.store import SweepStore
assert SweepStore(Path({str(tmp_path)!r})).claim("point") is not None
print("taken", flush=True)
input()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"taken\n"
    assert record.claim("point") is None
    assert record.claim("another") is not None
    other.kill()
    other.communicate()
    assert record.claim("point") is not None


def test_concurrent_stores_keep_each_others_points(tmp_path: Path) -> None:
    first, second = SweepStore(tmp_path), SweepStore(tmp_path)
    for record in (first, second):
        record.initialize("id", ["zero=stage1"], SweepSection())
    row = PointRow(name="a", swept=[], words=[], run_dir="a", state=PointState.WAITING)
    first.update(row)
    second.update(replace(row, name="b"))
    first.update(replace(row, state=PointState.DONE, number=1.0))
    assert [(row.name, row.state) for row in second.rows()] == [("a", "done"), ("b", "waiting")]
    second.initialize("id", ["zero=stage1"], SweepSection())
    assert len(second.rows()) == 2, "a later start keeps earlier results"
    refused = replace(row, state=PointState.REFUSED, reason="why")
    second.add_points([row, replace(refused, name="b"), replace(row, name="c"), replace(refused, name="d")])
    assert [(row.name, row.state) for row in first.rows()] == [
        ("a", "done"),
        ("b", "refused"),
        ("c", "waiting"),
        ("d", "refused"),
    ]
    first.add_points([replace(refused, name="a"), replace(row, name="d")])
    states = {row.name: row.state for row in first.rows()}
    assert (states["a"], states["d"]) == ("done", "waiting"), (
        "done by another machine stays done; what can run by now waits"
    )
    with pytest.raises(ConfigError, match="a folder belongs to one sweep"):
        first.check_owner("another", ["zero=stage2"])
    first.check_owner("id", ["zero=stage1"])


def test_silent_process_does_not_inherit_an_older_status(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", folder=tmp_path)
    directory = RunDirectory(tmp_path / point.name)
    directory.path.mkdir()
    assert read_result(point, tmp_path, None, silent="exit code 2: no").reason == "exit code 2: no"
    older = Status(state=RunState.FAILED, attempt=1, exit_code=1, reason="older")
    directory.write_status(older)
    message = read_result(point, tmp_path, None, before=older, silent="exit code 2: no")
    assert (message.state, message.reason) == (PointState.FAILED, "exit code 2: no")
    asked = read_result(point, tmp_path, None, before=older, silent="exit code 75", asked=True)
    assert (asked.state, asked.reason) == (PointState.STOPPED, "stopped before it started")
    directory.write_status(replace(older, attempt=2, reason="its own"))
    assert read_result(point, tmp_path, None, before=older, silent="exit code 1").reason == "its own"
    directory.write_status(Status(state=RunState.RUNNING, attempt=2, step=3))
    killed = read_result(point, tmp_path, None, before=older, silent="ended by signal 9")
    assert (killed.state, killed.reason, killed.step) == (PointState.FAILED, "ended by signal 9", 3)


def test_diverged_point_differs_from_failed_one(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", folder=tmp_path)
    directory = RunDirectory(tmp_path / point.name)
    directory.path.mkdir()
    directory.write_status(
        Status(state=RunState.FAILED, attempt=1, step=7, exit_code=ExitCode.DIVERGED, reason="step 7: NaN")
    )
    row = read_result(point, tmp_path, None, silent="exit code 65")
    assert (row.state, row.reason, row.step, row.number) == (PointState.DIVERGED, "step 7: NaN", 7, None)
    directory.write_status(
        Status(state=RunState.FAILED, attempt=1, step=7, exit_code=ExitCode.FAILURE, reason="why")
    )
    assert read_result(point, tmp_path, None, silent="exit code 1").state is PointState.FAILED


def test_read_metric(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    config = compose(["+exp=quickstart", "eval.sets=[validation,other]", "eval.every=2"])
    assert read_metric(directory, config, None) is None
    metrics = [
        {"step": step, "loss": 5.0 - step, "tokens_per_second": speed}
        for step, speed in enumerate((1.0, 10.0, 30.0, 20.0), 1)
    ]
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 5, "lo')
    assert read_metric(directory, config, None) is None, "the evaluation loss is used"
    assert read_metric(directory, compose(["+exp=quickstart", "eval.every=0"]), None) == 1.0
    evaluated = [("validation", 3.0), ("other", 9.0), ("validation", 2.5), ("other", 8.0)]
    directory.eval_file.write_text(
        "".join(json.dumps({"step": 1, "set": name, "loss": loss}) + "\n" for name, loss in evaluated)
    )
    assert read_metric(directory, config, None) == 2.5
    assert read_metric(directory, config, "other") == 8.0
    assert read_metric(directory, config, "tokens_per_second") == 20.0, "the median, without the first step"
    assert read_metric(directory, config, "nosuch") is None
    directory.eval_file.write_text(json.dumps({"step": 1, "set": "validation", "loss": float("nan")}) + "\n")
    assert read_metric(directory, config, None) is None, "a run that diverged is not the best one"


def test_rank_rows() -> None:
    row = PointRow(name="", swept=[], words=[], run_dir="", state=PointState.DONE)
    rows = [
        replace(row, name="refused", state=PointState.REFUSED),
        replace(row, name="2", number=2.0),
        replace(row, name="none"),
        replace(row, name="1", number=1.0),
        replace(row, name="failed", state=PointState.FAILED),
    ]
    assert [row.name for row in rank_rows(rows, maximize=False)] == ["1", "2", "none", "failed", "refused"]
    assert [row.name for row in rank_rows(rows, maximize=True)] == ["2", "1", "none", "failed", "refused"]


# -- report


def test_group_reasons() -> None:
    row = PointRow(name="", swept=[], words=[], run_dir="", state=PointState.REFUSED)
    rows = [
        replace(row, swept=[f"a={number}"], reason="odd" if number % 2 else "even\neven so")
        for number in range(9)
    ]
    assert group_reasons(rows) == [
        "5 points refused: a=0, a=2, a=4, a=6 and 1 more\n    even\n    even so",
        "4 points refused: a=1, a=3, a=5, a=7\n    odd",
    ]
    both = [
        *rows,
        replace(row, swept=["a=9"], reason="odd\nlarge"),
        replace(row, swept=["a=1"], state=PointState.FAILED, reason="x" * 999),
    ]
    assert group_reasons(both)[1:] == [
        "5 points refused: a=1, a=3, a=5, a=7 and 1 more\n    odd",
        "1 point refused: a=9\n    large",
        f"1 point failed: a=1\n    {'x' * 300} ...",
    ]


def test_table_fits_a_narrow_terminal() -> None:
    row = PointRow(
        name="",
        swept=["zero=stage1", "optim.lr=0.001"],
        words=[],
        run_dir="",
        state=PointState.REFUSED,
        reason="long " * 99,
    )
    rows = [
        row,
        replace(row, swept=["zero=stage1", "optim.lr=0.002"], state=PointState.DONE, number=2.5, step=300),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(format_table(rows, "loss", maximize=False))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["│", "1", "│", "zero=stage1", "optim.lr=0.002", "│", "2.5", "│", "300", "│", "done", "│"] in lines
    assert ["│", "│", "zero=stage1", "optim.lr=0.001", "│", "│", "│", "refused", "│"] in lines
