"""Sinks: composition, JSONL files, console output and the loss plot.

pytest tests/monitor/test_sinks.py
"""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.monitor import sink as sink_module
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.loss_plot import plot_loss, read_eval_losses, read_train_losses, running_mean
from toolkit.monitor.sink import CompositeSink, FilteredSink, Kind, Row, Sink
from toolkit.monitor.sinks.console import AlertConsoleSink, ConsoleSink, StepTable
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.progress import Progress
from toolkit.rows import read_rows

ROW = {
    "step": 1,
    "loss": 0.1 + 0.2,
    "grad_norm": 1e-17,
    "lr": 3e-4,
    "tokens": 512,
    "step_seconds": 0.25,
    "tokens_per_second": 2048.0,
}


class Recording(Sink):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, kind: Kind, row: Row) -> None:
        self.calls.append(row if kind is Kind.STEP else (kind.value, row))

    def log_summary(self, name: str, value: str | float) -> None:
        self.calls.append((name, value))

    def log_image(self, name: str, path: Path) -> None:
        self.calls.append((name, path))

    def close(self, exit_code: int) -> None:
        self.calls.append(exit_code)


class Broken(Recording):
    def log(self, kind: Kind, row: Row) -> None:
        super().log(kind, row)
        raise ConnectionError("the server is gone")


BROKEN = "Broken failed and receives no more rows: ConnectionError: the server is gone"


def drive(sink: Sink) -> list[Any]:
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.EVAL, {"step": 1})
    sink.log_summary("t", "words")
    sink.log_image("p", Path("p.png"))
    sink.close(75)
    return [ROW, ROW, ("eval", {"step": 1}), ("t", "words"), ("p", Path("p.png")), 75]


def test_composite_sink_forwards_all_calls() -> None:
    a, b = Recording(), Recording()
    expected = drive(CompositeSink([a, Sink(), b]))
    assert a.calls == b.calls == expected


def test_failing_sink_is_reported_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Broken(), Recording()
    expected = drive(CompositeSink([broken, whole]))
    assert caplog.messages == [BROKEN]
    assert broken.calls == [ROW]
    assert whole.calls == expected


def test_filtered_sink_receives_only_wanted_rows(caplog: pytest.LogCaptureFixture) -> None:
    some = Recording()
    firsts = FilteredSink(some, lambda kind, row: kind is Kind.STEP and row["step"] == 1)
    sink = CompositeSink([firsts, FilteredSink(Broken(), lambda kind, row: kind is Kind.EVAL)])
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.STEP, {**ROW, "step": 2})
    assert (len(some.calls), caplog.messages) == (1, [])
    sink.log(Kind.EVAL, ROW)
    assert (len(some.calls), caplog.messages) == (1, [BROKEN])


def test_rows_are_readable_after_a_flush(tmp_path: Path) -> None:
    sink = JsonlSink(
        {Kind.STEP: tmp_path / "run" / "metrics.jsonl", Kind.EVAL: tmp_path / "run" / "eval.jsonl"}
    )
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.STEP, {**ROW, "step": 2, "loss": math.inf})
    sink.log(Kind.EVAL, {"step": 2, "set": "validation"})
    sink.flush()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == ROW
    assert json.loads(lines[1])["loss"] is None
    sink.close(0)
    again = JsonlSink({Kind.STEP: tmp_path / "run" / "metrics.jsonl"})
    again.log(Kind.STEP, {**ROW, "step": 3})
    again.close(0)
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    "value",
    [
        0.1 + 0.2,
        5e-324,
        1.7976931348623157e308,
        -0.0,
        1e16,
        1e-5,
        None,
        True,
        2**63,
        6 * 10**24,
        "an é, a \u2028 and\na line",
        "null",
        {"inner": [1, None]},
        [],
        {},
    ],
)
def test_row_round_trips_through_jsonl(value: object, tmp_path: Path) -> None:
    sink = JsonlSink({Kind.STEP: tmp_path / "metrics.jsonl"})
    sink.log(Kind.STEP, {"step": 1, "value": value})
    sink.close(0)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert repr(row) == repr({"step": 1, "value": value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("other", [1, 6 * 10**24], ids=["orjson", "json"])
def test_number_that_is_not_finite_is_written_as_null(value: float, other: int, tmp_path: Path) -> None:
    """JSON has no NaN, and other readers than Python's refuse the whole line."""
    sink = JsonlSink({Kind.STEP: tmp_path / "metrics.jsonl"})
    sink.log(Kind.STEP, {"step": 1, "loss": value, "other": other, "inner": {"list": [1, value, (value,)]}})
    sink.close(0)
    assert (tmp_path / "metrics.jsonl").read_text().replace(
        " ", ""
    ) == f'{{"step":1,"loss":null,"other":{other},"inner":{{"list":[1,null,[null]]}}}}\n'
    assert [math.isnan(loss) for loss in read_train_losses(tmp_path / "metrics.jsonl")[1]] == [True]


def test_reader_skips_incomplete_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n\xff\xfe\n[1]\n'
        b'{"step": 3, "loss": 1.0}\n{"step": 4, "loss": 0.5}'
    )
    assert read_train_losses(file) == ([1, 3], [2.0, 1.0])
    assert list(read_rows(tmp_path / "absent.jsonl")) == []


def test_writer_ends_an_incomplete_last_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    for step in (3, 4):
        sink = JsonlSink({Kind.STEP: file})
        sink.log(Kind.STEP, {"step": step, "loss": 1.0})
        sink.close(0)
    assert read_train_losses(file) == ([1, 3, 4], [2.0, 1.0, 1.0])
    assert file.read_bytes().count(b"\n") == 4


FULL = {
    **ROW,
    "samples_per_second": 31.4,
    "host_bytes": 812_000_000,
    "device_bytes": 61_200_000_000,
    "eta_seconds": 3725.0,
}


def console(progress: Progress | None = None, every: int = 10) -> ConsoleSink:
    progress = progress or Progress(io.StringIO(), terminal=False)
    return ConsoleSink(progress, StepTable(), steps=40, done=10, every=every)


def test_console_logs_the_first_step_and_every_nth(caplog: pytest.LogCaptureFixture) -> None:
    sink = console()
    for step in range(11, 41):
        sink.log(Kind.STEP, {**FULL, "step": step, "loss": 5 - step / 10, "eta_seconds": 2.0 * (40 - step)})
    sink.log(Kind.EVAL, {"step": 40, "set": "validation", "loss": 2.0, "tokens": 10, "seconds": 1.5})
    sink.close(0)
    heading, *rows, evaluation = caplog.messages
    assert heading.split() == ["step", "loss", "grad", "norm", "lr", "tokens/s", "samples/s", "memory", "eta"]
    assert [row.split()[0] for row in rows] == ["11", "20", "30", "40"]
    assert rows[1].split() == ["20", "3.0000", "1e-17", "3.00e-04", "2,048", "31.4", "812", "MB", "0:40"]
    assert evaluation == "step 40: validation loss 2.0000 (perplexity 7.389), 1.5 s"


def test_console_table_is_eighty_columns_wide() -> None:
    """With the longest values that occur."""
    table = StepTable(device=True, utilisation=True)
    longest = {
        **FULL,
        "step": 1_000_000,
        "loss": 9999.9999,
        "grad_norm": 1.2345e-5,
        "tokens_per_second": 123_456_789.0,
        "mfu": 0.4125,
        "eta_seconds": 9 * 86400.0,
    }
    lines = [
        table.heading(),
        table.row(longest),
        StepTable(unit="images").row({**FULL, "images_per_second": 12.0}),
    ]
    assert {len(line) for line in lines} == {80}, lines
    assert lines[1].split()[4:8] == ["123.5M", "41.2%", "61.2", "GB"]


def test_console_shows_nan_loss(caplog: pytest.LogCaptureFixture) -> None:
    sink = console(every=1)
    sink.log(Kind.STEP, {**FULL, "loss": math.nan, "grad_norm": None})
    assert caplog.messages[-1].split()[1:3] == ["nan", "-"]


def test_console_reports_skipped_steps(caplog: pytest.LogCaptureFixture) -> None:
    sink = console(every=1)
    sink.log(Kind.STEP, {**FULL, "skipped": True, "loss_scale": 32768.0})
    assert caplog.messages[-1] == "step 1: skipped after an overflow, loss scale 32768"


def test_progress_bar_counts_every_step(caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    sink = console(progress=Progress(screen, terminal=True))
    for step in range(11, 18):
        sink.log(Kind.STEP, {**FULL, "step": step})
    sink.close(75)
    assert "17 steps" in screen.getvalue()
    assert len(caplog.messages) == 2


def test_long_alert_is_truncated_on_the_console(caplog: pytest.LogCaptureFixture) -> None:
    sink = AlertConsoleSink()
    alert = Alert(
        name="data-stall",
        level=Level.WARNING,
        step=7,
        cause="The data pipeline is slow.",
        evidence="61% of 20 steps",
        next_step="see data.md",
    )
    sink.log(Kind.ALERT, {**alert.to_row(), "dropped_rows": 3})
    sink.log(Kind.STEP, ROW)
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", str(alert))]
    sink.log(Kind.ALERT, {**alert.to_row(), "evidence": "x" * 10_000})
    assert len(caplog.messages[1]) < 2100
    assert caplog.messages[1].endswith("(the run's alerts file has the whole text)")


def written(folder: Path, steps: int) -> Path:
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"step": step, "loss": 9 / step if step != 5 else math.nan}) + "\n"
            for step in range(1, steps + 1)
        )
        file.write('{"step": torn')
    rows = [(2, "validation", 5.0), (4, "other", 4.0), (4, "validation", 3.0)]
    (folder / "eval.jsonl").write_text(
        "".join(json.dumps({"step": step, "set": name, "loss": loss}) + "\n" for step, name, loss in rows)
    )
    return folder


def test_loss_plot_is_drawn_from_the_files(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 5000)
    picture = plot_loss(run, unigram=6.5)
    assert picture == run / "plots" / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    with_line = picture.read_bytes()
    plot_loss(run)
    assert picture.read_bytes() != with_line
    assert [entry.name for entry in picture.parent.iterdir()] == ["loss.png"]
    assert read_eval_losses(run / "eval.jsonl") == {"validation": [(2, 5.0), (4, 3.0)], "other": [(4, 4.0)]}


def test_no_loss_plot_without_a_step(tmp_path: Path) -> None:
    assert plot_loss(tmp_path) is None
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("values", "window", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 2, [1.0, 1.5, 2.5, 3.5]),
        ([1.0, 2.0], 0, [1.0, 2.0]),
        ([1.0, math.nan, 3.0, 5.0], 2, [1.0, 1.0, 3.0, 4.0]),
    ],
)
def test_running_mean(values: list[float], window: int, expected: list[float]) -> None:
    assert running_mean(values, window) == expected


def test_slow_close_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:

    class Slow(Sink):
        def close(self, exit_code: int) -> None:
            time.sleep(0.3)

    monkeypatch.setattr(sink_module, "NOTICE_SECONDS", 0.05)
    CompositeSink([Slow(), Sink()]).close(0)
    assert caplog.messages == ["waiting for Slow to finish"]
