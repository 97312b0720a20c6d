"""The report in a headless Chromium: no errors, no requests, and every chart drawn with all its points.

    pytest tests/monitor/report/test_browser.py
    REPORT_PICTURES=pictures pytest tests/monitor/report/test_browser.py      # keeps screenshots: light,
    dark, printed

Skipped with a warning if chromium is not installed (apt-get install chromium).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.report.browser import Browser, Page, find_browser
from tests.monitor.report.runs import write_run
from toolkit.monitor.report.page import render_page
from toolkit.monitor.report.run_reader import read_run
from toolkit.progress import Progress

STEPS = 300
# The content of each chart: its lines' names, points and path commands, and the circles.
DRAWN = """[...document.querySelectorAll("figure")].map((figure) => ({
  id: figure.id.replace("chart-", ""), points: Number(figure.querySelector("svg").dataset.points),
  lines: [...figure.querySelectorAll("path.line, path.area")].map((path) => ({
    name: path.dataset.series, points: Number(path.dataset.points),
    moves: (path.getAttribute("d").match(/[ML]/g) || []).length,
    width: path.getBBox().width, colour: getComputedStyle(path).stroke, fill: getComputedStyle(path).fill,
    wrong: /NaN|Infinity|undefined/.test(path.getAttribute("d"))})),
  ticks: figure.querySelectorAll("text.tick").length, dots: figure.querySelectorAll("circle").length,
  marks: figure.querySelectorAll("line.mark").length}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        reason = "no Chromium here, so the report was NOT looked at in a browser: apt-get install chromium"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    with Browser(binary, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "mine-1a2b3c4d", STEPS)
    (folder / "report.html").write_text(render_page(read_run(folder, Progress.silent())), encoding="utf-8")
    return folder / "report.html"


def charts(shown: Page) -> dict[str, dict[str, Any]]:
    return {
        chart["id"]: chart
        for chart in shown.value('JSON.parse(document.getElementById("charts").textContent)')
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn(browser: Browser, report: Path, scheme: str) -> None:
    shown = Page(browser, report, scheme)
    assert shown.complaints() == []
    assert [url for url in shown.requests() if not url.startswith("data:")] == [report.as_uri()]
    wanted, drawn = charts(shown), {chart["id"]: chart for chart in shown.value(DRAWN)}
    assert len(drawn) == len(wanted) >= 14
    assert int(shown.value("document.documentElement.dataset.drawn")) == len(wanted)
    for name, chart in wanted.items():
        lines = drawn[name]["lines"]
        assert [line["name"] for line in lines] == [series["name"] for series in chart["series"]]
        for line, series in zip(lines, chart["series"], strict=True):
            points = sum(value is not None for value in series["mid"])
            assert points > 0
            assert line["points"] == points, (name, line)
            assert line["moves"] == (2 * points if chart["stacked"] else points), (name, line)
            assert not line["wrong"], (name, line)
            # isolated points are dots
            assert line["width"] > 100 or drawn[name]["dots"] >= points, (name, line)
            assert (line["fill"] if chart["stacked"] else line["colour"]).startswith("rgb"), (name, line)
        assert drawn[name]["points"] == sum(line["points"] for line in lines)
        assert drawn[name]["ticks"] >= 4, name
        assert drawn[name]["marks"] == len(chart["marks"]), name
    assert shown.value("window.hurt") is None
    bright = [
        int(part) for part in shown.value("getComputedStyle(document.body).backgroundColor")[4:-1].split(",")
    ]
    assert (sum(bright) > 600) == (scheme == "light")
    assert shown.value("document.documentElement.scrollWidth") <= 1400  # nothing overflows horizontally
    if folder := os.environ.get("REPORT_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shown.picture(Path(folder) / f"{scheme}.png")
        shown.print(Path(folder) / f"{scheme}.pdf")


def test_chart_can_be_zoomed_and_read(browser: Browser, report: Path) -> None:
    shown = Page(browser, report)
    bounds = 'JSON.parse(JSON.stringify(document.querySelector("#chart-loss svg").getBoundingClientRect()))'
    shown.value(
        'document.querySelector("#chart-loss").scrollIntoView({block: "center", behavior: "instant"})'
    )
    box = shown.value(bounds)

    def at(share: float) -> tuple[float, float]:
        return box["x"] + 70 + share * (box["width"] - 90), box["y"] + box["height"] / 2

    def points(chart: str) -> int:
        return int(shown.value(f'document.querySelector("#chart-{chart} svg").dataset.points'))

    before = {name: points(name) for name in ("loss", "lr", "ledger-shares", "host-cpu_percent")}
    shown.drag(at(0.5), at(0.75))
    after = {name: points(name) for name in before}
    assert 0.2 < after["lr"] / before["lr"] < 0.3
    # all charts over steps are zoomed together
    assert 0.2 < after["ledger-shares"] / before["ledger-shares"] < 0.3
    assert after["host-cpu_percent"] == before["host-cpu_percent"]  # but not those over time
    assert shown.value('document.getElementById("whole").hidden') is False
    shown.move(*at(0.662))  # at an evaluation
    reading = shown.value('document.querySelector("#chart-loss .reading").textContent')
    assert reading.startswith("step ")
    assert "training" in reading
    assert "validation" in reading
    shown.value('document.querySelector("#chart-loss svg").focus()')
    shown.key("Escape")
    assert {name: points(name) for name in before} == before
    shown.value('document.querySelector("#chart-loss button.log").click()')
    shown.value('document.querySelector("#chart-loss button.key").click()')
    assert points("loss") == before["loss"] - 299  # all except the step that was not finite
    assert shown.complaints() == []


def test_narrow_window_and_run_with_one_step(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "small", 1, nodes=1, gpus=0, sample_seconds=1)
    (folder / "report.html").write_text(render_page(read_run(folder, Progress.silent())), encoding="utf-8")
    shown = Page(browser, folder / "report.html", width=420)
    assert shown.complaints() == []
    assert shown.value("document.documentElement.scrollWidth") <= 420
    drawn = {chart["id"]: chart for chart in shown.value(DRAWN)}
    assert drawn["grad_norm"]["dots"] == 1  # a single step is visible
    assert not any(line["wrong"] for chart in drawn.values() for line in chart["lines"])
