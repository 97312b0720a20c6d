"""The HTML report: consistent with the files, safe against hostile text, tolerant of missing files.

pytest tests/monitor/report/test_page.py
pytest tests/monitor/report/test_page.py -m full      a million steps, too
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import resource
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.report.runs import (
    ALERTS,
    BEGAN,
    HOSTILE,
    PARTS,
    eval_rows,
    ledger_rows,
    step_rows,
    system_rows,
    write_run,
)
from toolkit.errors import InputError
from toolkit.monitor.report import run_reader
from toolkit.monitor.report.hardware import hardware_section
from toolkit.monitor.report.page import SECTIONS, embed_json, render_page
from toolkit.monitor.report.planned_vs_measured import (
    attempt_comparisons,
    bubble_measured,
    bubble_planned,
    whole_run,
)
from toolkit.monitor.report.run_data import AttemptRecord, ReportData, effective_attempts
from toolkit.monitor.report.run_reader import read_run
from toolkit.monitor.report.summary import is_dead, run_state, summary_sentences
from toolkit.progress import Progress, quantity
from toolkit.rows import read_rows

STEPS = 300
# Attributes whose value a browser fetches, and the same in CSS.
LOADING = {
    "src",
    "href",
    "srcset",
    "action",
    "data",
    "poster",
    "background",
    "formaction",
    "xlink:href",
    "manifest",
    "ping",
}


class Parsed(HTMLParser):
    """Elements with their attributes, and the texts of some."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # innermost element, text
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1] == tag, f"</{tag}> closes <{self._open[-1]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    @property
    def ends_open(self) -> list[str]:
        return self._open

    def text(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    def charts(self) -> dict[str, dict[str, Any]]:
        found = [text for tag, text in self.texts if tag == "script" and text.startswith("[")]
        assert len(found) == 1
        return {chart["id"]: chart for chart in json.loads(found[0])}


def loads(parsed: Parsed) -> list[str]:
    """Return what a browser would fetch or execute."""
    return [
        f"{tag} {name}"
        for tag, attributes in parsed.elements
        for name, value in attributes.items()
        if name.startswith("on") or (name in LOADING and not (value or "").startswith(("#", "data:")))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine-1a2b3c4d", STEPS)


@pytest.fixture(scope="module")
def run(folder: Path) -> ReportData:
    return read_run(folder, Progress.silent())


@pytest.fixture(scope="module")
def html(run: ReportData) -> str:
    return render_page(run)


@pytest.fixture(scope="module")
def parsed(html: str) -> Parsed:
    return Parsed(html)


def test_page_is_well_formed(parsed: Parsed) -> None:
    assert parsed.ends_open == []
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [
        attributes["href"][1:] for tag, attributes in parsed.elements if tag == "a" and attributes["href"]
    ]
    assert links == ["training", "ledger", "alerts", "plan", "hardware", "attempts", "configuration"]
    assert set(links) <= set(ids)
    assert len(links) == len(SECTIONS)
    for chart in parsed.charts():
        assert f"chart-{chart}" in ids


def test_charts_have_a_text_alternative(parsed: Parsed) -> None:
    pictures = [attributes for tag, attributes in parsed.elements if tag == "svg"]
    assert len(pictures) == len(parsed.charts()) >= 14
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert len(attributes["aria-label"] or "") > 20
    assert [attributes["lang"] for tag, attributes in parsed.elements if tag == "html"] == ["en"]
    assert sum(tag == "figcaption" for tag, _ in parsed.elements) == len(pictures)


def test_page_makes_no_network_requests(html: str, parsed: Parsed) -> None:
    assert loads(parsed) == []
    assert loads(Parsed('<img src="http://example.com/x.png"><p onclick="x()">')) == ["img src", "p onclick"]
    css = "".join(text for tag, text in parsed.texts if tag == "style")
    assert not re.search(r"url\(|@import", css)
    script = "".join(text for tag, text in parsed.texts if tag == "script" and not text.startswith("["))
    assert not re.search(
        r"https?:|//[a-z0-9-]+\.[a-z]|fetch\(|XMLHttpRequest|import\(|WebSocket|innerHTML|eval\(", script
    )
    policy = [
        attributes["content"]
        for tag, attributes in parsed.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy
    assert policy[0] is not None
    assert policy[0].startswith("default-src 'none'")
    assert "http" not in policy[0]


def test_text_of_the_files_is_escaped(html: str, parsed: Parsed) -> None:
    assert sum(tag == "script" for tag, _ in parsed.elements) == 2
    assert sum(tag == "img" for tag, _ in parsed.elements) == 0
    assert "window.hurt = 1</script>" not in html
    assert HOSTILE in parsed.text()  # shown verbatim
    assert any(mark["text"] == f"throttling: {HOSTILE}" for mark in parsed.charts()["loss"]["marks"])
    text = embed_json({"a": HOSTILE})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": HOSTILE}
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json({"a": math.nan})


def test_secrets_in_addresses_are_hidden(html: str) -> None:
    assert "s3://***@bucket/data?***" in html
    assert "user:secret" not in html
    assert "hush" not in html


def test_charts_show_the_data_of_the_files(folder: Path, parsed: Parsed) -> None:
    charts = parsed.charts()
    steps = list(read_rows(folder / "metrics.jsonl"))

    def series(chart: str, number: int = 0) -> dict[str, Any]:
        return charts[chart]["series"][number]

    assert series("loss")["x"] == [row["step"] for row in steps]
    assert series("loss")["mid"] == [row["loss"] if math.isfinite(row["loss"]) else None for row in steps]
    assert series("loss")["low"] is None
    shown = {
        "grad_norm": "grad_norm",
        "lr": "lr",
        "speed": "tokens_per_second",
        "mfu": "mfu",
        "seconds": "step_seconds",
    }
    for chart, figure in shown.items():
        assert series(chart)["mid"] == [row[figure] for row in steps]
    for number, name in ((1, "code"), (2, "validation")):
        rows = [row for row in read_rows(folder / "eval.jsonl") if row["set"] == name]
        assert series("loss", number)["name"] == name
        assert series("loss", number)["x"] == [row["step"] for row in rows]
        assert series("loss", number)["mid"] == [row["loss"] for row in rows]
    rows = list(read_rows(folder / "system" / "node-1.jsonl"))
    hottest = series("gpu-temperature_celsius_max", 1)
    drawn = [(x, value) for x, value in zip(hottest["x"], hottest["mid"], strict=True) if value is not None]
    assert drawn == [(row["time"], row["gpu/temperature_celsius_max"]) for row in rows]
    assert len(hottest["x"]) == len(drawn) + 1  # one gap: the two hours between the attempts


def test_ledger_shares_add_up_to_one(folder: Path, run: ReportData, parsed: Parsed) -> None:
    rows = list(read_rows(folder / "ledger.jsonl"))
    layers = {series["name"]: series["mid"] for series in parsed.charts()["ledger-shares"]["series"]}
    assert set(layers) == {*PARTS, "checkpoint"}
    assert list(layers)[:3] == ["forward", "backward", "optimizer"]
    assert list(layers)[-1] == "unexplained"
    for number, pair in enumerate(zip(rows[::2], rows[1::2], strict=True)):  # 150 points
        whole = sum(middle for row in pair for _, middle, _ in row["parts"].values())
        assert sum(layer[number] for layer in layers.values()) == pytest.approx(1)
        for name, layer in layers.items():
            assert layer[number] == pytest.approx(
                sum(row["parts"].get(name, [0, 0, 0])[1] for row in pair) / whole
            )
    wall = sum(row["wall_seconds"] for row in rows)
    assert run.ledger.share("backward") == pytest.approx(STEPS * PARTS["backward"] * 2 / wall)
    assert run.ledger.share("checkpoint") == pytest.approx(
        3 * 10.0 / wall
    )  # although no median step has a save
    assert run.ledger.slowest.most_common(1)[0][0] == 5
    assert run.ledger.starved == {3: STEPS}


def test_summary_describes_the_run(run: ReportData, parsed: Parsed) -> None:
    summary = " ".join(summary_sentences(run))
    text = parsed.text()
    for sentence in (
        "The run failed at step 300 of 600: rank 3 died",
        "It took 2 attempts, in which 2 steps were repeated.",
        "It was not finite in 1 step.",
        "The validation loss is",
        "3 alerts: throttling (2), non-finite (1).",
        "of the time went into forward, backward and optimizer",
    ):
        assert sentence in summary
    for alert in ALERTS:
        for key in ("cause", "evidence", "next_step", "where"):
            assert alert[key] in text
    for shown in (
        "exit code 1",
        "2.5",
        "node 1, GPU 2",
        "hardware-thermal",
        "NVIDIA H100 80GB HBM3",
        "rank 1 is missing",
        "zero.stage=0",
        "git.commit",
        "packages.torch: 2.11",
    ):
        assert shown in text


def test_plan_is_compared_with_measurements(run: ReportData, parsed: Parsed) -> None:
    assert bubble_planned(whole_run(run)) == pytest.approx(3 / (2 * 16))
    assert bubble_measured(whole_run(run)) == pytest.approx(
        PARTS["bubble"] / (PARTS["forward"] + PARTS["backward"])
    )
    text = parsed.text()
    for shown in (
        "11.000 GB",
        "11.500 GB",
        "65.000 GB",
        "71.700 GB",
        "4,194,304",
        "at least 1.83 s",
        "310.00 GB/s",
        "no process group of just the ranks",
    ):
        assert shown in text


# ---- incomplete runs

EVERYTHING = (
    "metrics.jsonl",
    "eval.jsonl",
    "ledger.jsonl",
    "alerts.jsonl",
    "config.yaml",
    "plan.json",
    "status.json",
    "system",
    "attempts",
)


def quick(names: tuple[str, ...], chosen: tuple[str, ...]) -> list[Any]:
    """Mark all but the chosen names as part of the full suite."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("missing", quick(EVERYTHING, ("metrics.jsonl", "plan.json")))
def test_report_without_one_of_the_files(folder: Path, tmp_path: Path, missing: str) -> None:
    here = tmp_path / "run"
    here.mkdir()
    for name in EVERYTHING:
        if name != missing:
            _copy(folder / name, here / name)
    _check(here)


@pytest.mark.parametrize("only", quick(EVERYTHING, ("status.json",)))
def test_report_with_only_one_of_the_files(folder: Path, tmp_path: Path, only: str) -> None:
    _copy(folder / only, tmp_path / only)
    _check(tmp_path)


def _copy(source: Path, target: Path) -> None:
    """Copy as hard links, because a report refuses symbolic links out of the run."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    else:
        os.link(source, target)


def test_report_of_a_run_of_an_older_version(tmp_path: Path) -> None:
    """Rows and files from before the ledger existed."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "data_seconds", "tokens_per_second")
    _write(tmp_path / "metrics.jsonl", [{key: row[key] for key in keys} for row in step_rows(20)])
    (tmp_path / "status.json").write_text('{"state": "done", "attempt": 1, "step": 20}')
    text = _check(tmp_path).text()
    for sentence in (
        "The run is complete: 20 steps.",
        "Waiting for samples took 2.00% of the steps' time.",
        "There is no time ledger",
        "There were no alerts.",
    ):
        assert sentence in text


@pytest.mark.parametrize(
    "damage",
    [
        '{"step": 3, "lo',
        "nonsense\n",
        "[1, 2]\n",
        '{"step": "three"}\n',
        '{"loss": 1.0}\n',
        '{"step": null}\n',
        "\x00\x00\n",
    ],
)
def test_malformed_rows_are_skipped(tmp_path: Path, damage: str) -> None:
    names = ("metrics.jsonl", "eval.jsonl", "ledger.jsonl", "system/node-0.jsonl")
    good = (step_rows(9), eval_rows(9, 3), ledger_rows(9, 2, 5), system_rows(0, 18, 2, 1))
    for name, rows in zip(names, good, strict=True):
        _write(tmp_path / name, list(rows))
        with (tmp_path / name).open("a") as file:
            file.write(damage)
    (tmp_path / "alerts.jsonl").write_text(damage + "\n" + '{"name": "x"}\n{"step": "y", "parts": 3}\n')
    (tmp_path / "plan.json").write_text(damage)
    (tmp_path / "status.json").write_text(damage)
    (tmp_path / "config.yaml").write_text(damage + "\n: [")
    charts = _check(tmp_path).charts()
    assert charts["loss"]["series"][0]["x"] == list(range(1, 10))
    assert charts["ledger-shares"]["series"][0]["x"] == list(range(1, 10))


def test_running_run_with_an_old_status_is_dead(tmp_path: Path) -> None:
    _write(tmp_path / "metrics.jsonl", list(step_rows(90))[:9])
    (tmp_path / "config.yaml").write_text("train: {steps: 90}\nmonitor: {hang_seconds: 600}\n")
    status = tmp_path / "status.json"
    status.write_text('{"state": "running", "attempt": 1, "step": 12}')
    run = read_run(tmp_path, Progress.silent())
    assert (run_state(run), is_dead(run)) == (("running", "good"), False)
    assert summary_sentences(run)[0].startswith(
        "The run is in progress at step 12 of 90; about 2:42 left."
    )  # the status is newer than the rows
    os.utime(status, (time.time() - 700, time.time() - 700))
    run = read_run(tmp_path, Progress.silent())
    assert (run_state(run), is_dead(run)) == (("not alive", "error"), True)
    assert "the run is no longer alive" in summary_sentences(run)[0]


def test_samples_of_nodes_with_local_disks_are_added(folder: Path, tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere/system/node-7.jsonl", list(system_rows(7, 60, 2, 8)))
    run = read_run(folder, Progress.silent(), nodes=[tmp_path / "elsewhere"])
    assert list(run.nodes) == [0, 1, 7]


def test_hundred_nodes_are_drawn_as_a_range(tmp_path: Path) -> None:
    for node in range(100):
        _write(tmp_path / f"system/node-{node}.jsonl", list(system_rows(node, 60, 6, 1)))
    (tmp_path / "status.json").write_text('{"state": "running", "attempt": 1, "step": 12}')
    chart = _check(tmp_path).charts()["gpu-sm_clock_ratio_min"]
    assert len(chart["series"]) == 1
    assert min(value for value in chart["series"][0]["low"] if value is not None) == 0.55
    assert set(chart["series"][0]["mid"]) == {0.94, None}  # a gap between the attempts


def test_only_some_of_many_samples_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in range(2):
        _write(tmp_path / f"system/node-{node}.jsonl", list(system_rows(node, 6000, 6, 1)))
    monkeypatch.setattr(run_reader, "NODE_ROWS", 200)
    run = read_run(tmp_path, Progress.silent())
    assert [node.every for node in run.nodes.values()] == [10, 10]
    assert [node.curves.rows for node in run.nodes.values()] == [100, 100]
    assert run.nodes[0].names == {0: "NVIDIA H100 80GB HBM3"}  # of the first row
    assert "one in 10 was read" in hardware_section(run).intro[-1]


def test_reading_shows_progress(folder: Path) -> None:
    shown = io.StringIO()
    read_run(folder, Progress(shown, terminal=False, line_seconds=0.0))
    size = sum(path.stat().st_size for path in (*folder.glob("*.jsonl"), *folder.glob("system/*")))
    assert f"reading the run's rows: {quantity(size, 'B')} in " in shown.getvalue()


@pytest.mark.full
def test_report_of_a_million_steps_is_bounded(tmp_path: Path) -> None:
    """Page and memory stay small, and a single spike is still visible."""
    steps, spike = 1_000_000, 777_777
    with (tmp_path / "metrics.jsonl").open("w") as metrics, (tmp_path / "ledger.jsonl").open("w") as ledger:
        row, parts = {**next(step_rows(1)), "loss": 2.0}, next(ledger_rows(1, 4, 10))
        usual, spiked, part = (
            (json.dumps({**each, "step": "STEP"}) + "\n").split('"STEP"')
            for each in (row, {**row, "loss": 99.0}, parts)
        )
        for step in range(1, steps + 1):
            metrics.write(str(step).join(spiked if step == spike else usual))
            if step % 5 == 0:
                ledger.write(str(step).join(part))
    (tmp_path / "status.json").write_text('{"state": "running", "attempt": 1, "step": 12}')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    html = render_page(read_run(tmp_path, Progress.silent()))
    seconds, kilobytes = (
        time.process_time() - began,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
    )
    print(f"{seconds:.0f} s, {kilobytes / 1000:.0f} MB more memory, a page of {len(html) / 1e6:.1f} MB")
    assert len(html) < 8e6
    assert kilobytes < 300_000
    chart = Parsed(html).charts()["loss"]["series"][0]
    index = chart["high"].index(99.0)
    assert abs(chart["x"][index] - spike) < steps / 1000
    assert len(chart["x"]) <= 1200


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _check(folder: Path) -> Parsed:
    """Render the report and check that it is well-formed."""
    parsed = Parsed(render_page(read_run(folder, Progress.silent())))
    assert parsed.ends_open == []
    parsed.charts()
    return parsed


@pytest.mark.parametrize("name", ["attempts/001/log.txt", "config.yaml", "system"])
def test_link_out_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    """A shared report must not contain a private file that a downloaded run links to."""
    here, secret = tmp_path / "run", tmp_path / "secret"
    (here / name).parent.mkdir(parents=True)
    secret.write_text("key-of-mine")
    (here / name).symlink_to(secret)
    with pytest.raises(InputError, match="is a link to"):
        read_run(here, Progress.silent())


@pytest.mark.parametrize(
    "name", ["wandb/offline-run/logs/debug-core.log", "nodes/node-1/wandb/offline-run/logs/debug-core.log"]
)
def test_links_in_wandb_folders_are_ignored(tmp_path: Path, name: str) -> None:
    folder, log = tmp_path / "run", tmp_path / "core-debug.log"
    write_run(folder)
    log.write_text("of W&B")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(log)
    assert read_run(folder, Progress.silent()).status


def test_each_attempt_is_compared_with_its_own_plan(run: ReportData) -> None:
    """The second attempt had another engine and batch size."""
    (newest, second), (older, first) = attempt_comparisons(run)
    assert newest.startswith(f"Attempt 2, from step {STEPS // 2 + 1}, planned and measured: Engine megatron")
    assert older.startswith("Attempt 1, from step 1, planned and measured: Engine deepspeed")
    assert (first.plan["batch"]["tokens_per_step"], second.plan["batch"]["tokens_per_step"]) == (
        4_194_304,
        2 * 4_194_304,
    )
    assert first.total("step_seconds").count == STEPS // 2 == second.total("step_seconds").count
    assert first.total("step_seconds").sum + second.total("step_seconds").sum == pytest.approx(
        run.steps.total("step_seconds").sum
    )
    assert bubble_measured(first) == pytest.approx(PARTS["bubble"] / (PARTS["forward"] + PARTS["backward"]))


def test_attempts_and_alerts_are_marked_on_the_curves(parsed: Parsed) -> None:
    over_steps = parsed.charts()["loss"]["marks"]
    assert [(mark["x"], mark["level"], mark["label"]) for mark in over_steps] == [
        (STEPS // 2, "attempt", "attempt 2"),
        (150, "error", "non-finite"),
        (240, "warning", "throttling"),
        (270, "warning", "throttling"),
    ]
    over_time = next(chart for chart in parsed.charts().values() if chart["xFormat"] == "time")["marks"]
    assert [(mark["x"], mark["label"]) for mark in over_time] == [(BEGAN + 9000, "attempt 2")]


def test_fully_repeated_attempt_has_no_mark() -> None:
    def attempt(number: int, first: int | None) -> AttemptRecord:
        return AttemptRecord(
            number=number,
            began=None,
            ended=None,
            end="",
            start_seconds=None,
            log_end="",
            first=first,
            repeated=0,
            plan={},
            config={},
            environment={},
            probe={},
            hang="",
            restart=None,
            files=(),
        )

    every = [attempt(1, 0), attempt(2, 50), attempt(3, None), attempt(4, 20)]
    assert [(one.number, first) for one, first in effective_attempts(every)] == [(1, 0), (4, 20)]
