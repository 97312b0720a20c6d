"""The page and the plot of a scaling report, also in a headless Chromium.

    pytest tests/monitor/report/test_scaling_page.py
    REPORT_PICTURES=pictures pytest tests/monitor/report/test_scaling_page.py      # keeps a screenshot

The test in a browser is skipped with a warning if chromium is not installed.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.estimate.test_scaling import network
from tests.monitor.report.browser import Browser, Page, find_browser
from tests.monitor.report.runs import HOSTILE
from tests.plan.cases import h100s, run_config
from toolkit.estimate.measured_factors import MeasuredEstimate, fit_speed_factors
from toolkit.estimate.scaling_report import ScalingReport, create_report, format_scaling, scaling_to_json
from toolkit.monitor.report.scaling_page import render_scaling_page, render_scaling_plot
from toolkit.plan import make_plan

RANKS = (1, 2, 4, 8, 16, 64, 512)


@pytest.fixture(scope="module")
def report() -> ScalingReport:
    estimate = network(4e9, 2e8)
    predicted = estimate(make_plan(run_config(), h100s(2, per_node=2)))
    assert predicted is not None
    run = MeasuredEstimate(
        name=f"run {HOSTILE}",
        layout="data 2",
        ranks=2,
        global_batch=8,
        estimate=predicted,
        seconds=1.1 * predicted.seconds,
    )
    return create_report(
        run_config(train__global_batch=512),
        h100s(8),
        RANKS,
        estimate,
        measured=[run],
        factors=fit_speed_factors([run]),
    )


def test_page_is_self_contained_and_escapes_names(report: ScalingReport) -> None:
    html = render_scaling_page(report, 0.0)
    assert "<img" not in html
    assert "window.hurt" not in html.replace("&lt;script&gt;window.hurt", "")
    assert "1970-01-01 at 00:00:00 UTC" in html
    for sentence in report.sentences:
        assert sentence.split(":")[0] in html


def test_plot_is_a_picture_and_does_not_depend_on_the_time(report: ScalingReport) -> None:
    picture = render_scaling_plot(report)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture == render_scaling_plot(report)


def test_json_has_the_numbers_of_the_table(report: ScalingReport) -> None:
    from rich.console import Console

    found = json.loads(json.dumps(scaling_to_json(report), allow_nan=False))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(format_scaling(report))
    table = console.export_text()
    for curve in found["curves"].values():
        assert [point["ranks"] for point in curve["points"]] == list(RANKS)
        for point in curve["points"]:
            if point["written"] is not None:
                assert f"{point['written']['step_seconds']['seconds']:.3g} s" in table
                assert f"{point['written']['efficiency']['value']:.0%}" in table
            else:
                assert point["problem"]["remedy"]
    assert found["measured"][0]["measured_seconds"] == report.measured[0].seconds
    assert found["curves"]["weak"]["first_broken_ranks"] == 16


def test_page_in_a_browser(report: ScalingReport, tmp_path: Path) -> None:
    binary = find_browser()
    if binary is None:
        reason = "no Chromium here, so the page was NOT looked at: apt-get install chromium"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    file = tmp_path / "scaling.html"
    file.write_text(render_scaling_page(report, 0.0), encoding="utf-8")
    with Browser(binary, tmp_path / "profile") as browser:
        shown = Page(browser, file, "light")
        assert shown.complaints() == []
        assert [url for url in shown.requests() if not url.startswith("data:")] == [file.as_uri()]
        ticks = shown.value(
            '[...document.querySelectorAll("#chart-efficiency text.tick")].map((tick) => tick.textContent)'
        )
        assert [tick for tick in ticks if tick.isdigit()] == ["1", "4", "16", "64", "256"]  # not logarithms
        drawn = shown.value(
            '[...document.querySelectorAll("figure svg")].map((svg) => Number(svg.dataset.points))'
        )
        assert len(drawn) == 5
        assert all(drawn)
        if folder := os.environ.get("REPORT_PICTURES"):
            shown.picture(Path(folder) / "scaling.png")
