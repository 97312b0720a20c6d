"""Sinks: one that breaks is told once and dropped; rows, console lines and pictures are what they say.

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
from toolkit.monitor.plots import eval_losses, loss_curve, running_mean, train_losses
from toolkit.monitor.sink import CompositeSink, Kind, NullSink, Only, Row, Sink
from toolkit.monitor.sinks.console import AlertLines, ConsoleSink, Table
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


class Recording(NullSink):
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


def drive(sink: Sink) -> list[Any]:
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.EVAL, {"step": 1})
    sink.log_summary("t", "words")
    sink.log_image("p", Path("p.png"))
    sink.close(75)
    return [ROW, ROW, ("eval", {"step": 1}), ("t", "words"), ("p", Path("p.png")), 75]


def test_every_sink_gets_everything() -> None:
    a, b = Recording(), Recording()
    expected = drive(CompositeSink([a, NullSink(), b]))
    assert a.calls == b.calls == expected


def test_a_broken_sink_is_told_once_and_dropped_and_the_others_go_on() -> None:
    told: list[str] = []
    broken, whole = Broken(), Recording()
    expected = drive(CompositeSink([broken, whole], told.append))
    assert told == ["Broken failed and gets nothing more: ConnectionError: the server is gone"]
    assert broken.calls == [ROW]
    assert whole.calls == expected


def test_who_wants_some_rows_gets_those_and_is_told_by_its_own_name() -> None:
    told: list[str] = []
    some = Recording()
    firsts = Only(some, lambda kind, row: kind is Kind.STEP and row["step"] == 1)
    sink = CompositeSink([firsts, Only(Broken(), lambda kind, row: kind is Kind.EVAL)], told.append)
    sink.log(Kind.STEP, ROW)
    sink.log(Kind.STEP, {**ROW, "step": 2})
    assert (len(some.calls), told) == (1, [])
    sink.log(Kind.EVAL, ROW)
    assert (len(some.calls), told) == (
        1,
        ["Broken failed and gets nothing more: ConnectionError: the server is gone"],
    )


def test_rows_can_be_read_after_a_flush_in_full_precision(tmp_path: Path) -> None:
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
def test_a_row_comes_back_as_it_was_written(value: object, tmp_path: Path) -> None:
    sink = JsonlSink({Kind.STEP: tmp_path / "metrics.jsonl"})
    sink.log(Kind.STEP, {"step": 1, "value": value})
    sink.close(0)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert repr(row) == repr({"step": 1, "value": value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("beside", [1, 6 * 10**24], ids=["orjson", "json"])
def test_a_number_that_is_not_finite_is_null(value: float, beside: int, tmp_path: Path) -> None:
    """JSON has no NaN, and other readers than Python's refuse the whole line."""
    sink = JsonlSink({Kind.STEP: tmp_path / "metrics.jsonl"})
    sink.log(Kind.STEP, {"step": 1, "loss": value, "beside": beside, "inner": {"list": [1, value, (value,)]}})
    sink.close(0)
    assert (tmp_path / "metrics.jsonl").read_text().replace(
        " ", ""
    ) == f'{{"step":1,"loss":null,"beside":{beside},"inner":{{"list":[1,null,[null]]}}}}\n'
    assert [math.isnan(loss) for loss in train_losses(tmp_path / "metrics.jsonl")[1]] == [True]


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(
        b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n\xff\xfe\n[1]\n{"step": 3, "loss": 1.0}\n{"step": 4, "loss": 0.5}'
    )
    assert train_losses(file) == ([1, 3], [2.0, 1.0])
    assert list(read_rows(tmp_path / "absent.jsonl")) == []


def test_a_torn_line_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    for step in (3, 4):
        sink = JsonlSink({Kind.STEP: file})
        sink.log(Kind.STEP, {"step": step, "loss": 1.0})
        sink.close(0)
    assert train_losses(file) == ([1, 3, 4], [2.0, 1.0, 1.0])
    assert file.read_bytes().count(b"\n") == 4


FULL = {
    **ROW,
    "samples_per_second": 31.4,
    "host_bytes": 812_000_000,
    "device_bytes": 61_200_000_000,
    "eta_seconds": 3725.0,
}


def console(**keys: Any) -> tuple[ConsoleSink, list[str]]:
    said: list[str] = []
    keys = {"steps": 40, "done": 10, "every": 10, "say": said.append, **keys}
    return ConsoleSink(keys.pop("progress", Progress(io.StringIO(), terminal=False)), Table(), **keys), said


def test_console_has_a_row_at_the_first_step_and_at_its_cadence() -> None:
    sink, said = console()
    for step in range(11, 41):
        sink.log(Kind.STEP, {**FULL, "step": step, "loss": 5 - step / 10, "eta_seconds": 2.0 * (40 - step)})
    sink.log(Kind.EVAL, {"step": 40, "set": "validation", "loss": 2.0, "tokens": 10, "seconds": 1.5})
    sink.close(0)
    heading, *rows, evaluation = said
    assert heading.split() == ["step", "loss", "grad", "norm", "lr", "tokens/s", "samples/s", "memory", "eta"]
    assert [row.split()[0] for row in rows] == ["11", "20", "30", "40"]
    assert rows[1].split() == ["20", "3.0000", "1e-17", "3.00e-04", "2,048", "31.4", "812", "MB", "0:40"]
    assert evaluation == "step 40: validation loss 2.0000 (perplexity 7.389), 1.5 s"


def test_console_rows_stand_under_their_heading_in_eighty_columns() -> None:
    """Of the longest values that there are."""
    table = Table(device=True, utilisation=True)
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
        Table(unit="images").row({**FULL, "images_per_second": 12.0}),
    ]
    assert {len(line) for line in lines} == {80}, lines
    assert lines[1].split()[4:8] == ["123.5M", "41.2%", "61.2", "GB"]


def test_console_shows_a_loss_that_is_no_number_as_it_is() -> None:
    sink, said = console(every=1)
    sink.log(Kind.STEP, {**FULL, "loss": math.nan, "grad_norm": None})
    assert said[-1].split()[1:3] == ["nan", "-"]


def test_console_tells_of_skipped_steps() -> None:
    sink, said = console(every=1)
    sink.log(Kind.STEP, {**FULL, "skipped": True, "loss_scale": 32768.0})
    assert said[-1] == "step 1: skipped after an overflow, loss scale 32768"


def test_the_bar_counts_every_step_and_the_last_one_of_a_stopped_run() -> None:
    screen = io.StringIO()
    sink, said = console(progress=Progress(screen, terminal=True))
    for step in range(11, 18):
        sink.log(Kind.STEP, {**FULL, "step": step})
    sink.close(75)
    assert "17 steps" in screen.getvalue()
    assert len(said) == 2


def test_an_alert_is_logged_in_full_unless_it_is_long(caplog: pytest.LogCaptureFixture) -> None:
    sink = AlertLines()
    alert = Alert(
        name="data-stall",
        level=Level.WARNING,
        step=7,
        cause="The data pipeline is slow.",
        evidence="61% of 20 steps",
        next_step="see data.md",
    )
    sink.log(Kind.ALERT, {**alert.row(), "dropped_rows": 3})
    sink.log(Kind.STEP, ROW)
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", str(alert))]
    sink.log(Kind.ALERT, {**alert.row(), "evidence": "x" * 10_000})
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


def test_the_curve_is_drawn_from_the_files(tmp_path: Path) -> None:
    run = written(tmp_path / "run", 5000)
    picture = loss_curve(run, unigram=6.5)
    assert picture == run / "plots" / "loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    with_line = picture.read_bytes()
    loss_curve(run)
    assert picture.read_bytes() != with_line
    assert [entry.name for entry in picture.parent.iterdir()] == ["loss.png"]
    assert eval_losses(run / "eval.jsonl") == {"validation": [(2, 5.0), (4, 3.0)], "other": [(4, 4.0)]}


def test_there_is_no_curve_without_a_step(tmp_path: Path) -> None:
    assert loss_curve(tmp_path) is None
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


def test_a_close_that_takes_a_while_is_told_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Slow(NullSink):
        def close(self, exit_code: int) -> None:
            time.sleep(0.3)

    monkeypatch.setattr(sink_module, "NOTICE_SECONDS", 0.05)
    CompositeSink([Slow(), NullSink()], told.append).close(0)
    assert told == ["Slow has not finished yet, and is waited for a while"]
