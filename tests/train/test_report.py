"""The report of a whole run shows what the run wrote.

pytest tests/train/test_report.py
"""

from __future__ import annotations

import json
from pathlib import Path

from launch.report import main
from tests.monitor.report.test_page import Parsed
from tests.train.tiny_run import STEPS, TinyRun
from toolkit.config.schema import RunConfig


def test_report_shows_the_charts_of_a_run(data: Path, tmp_path: Path) -> None:
    def sampled(config: RunConfig) -> None:
        config.monitor.system_seconds = 0.2

    start = TinyRun(tmp_path / "run", data, config=sampled)
    assert main([str(start.directory.path)]) == 0
    page = Parsed((start.directory.path / "report.html").read_text(encoding="utf-8"))
    charts, text = page.charts(), page.text()
    for chart in (
        "loss",
        "grad_norm",
        "lr",
        "speed",
        "seconds",
        "memory",
        "ledger-shares",
        "ledger-seconds",
        "host-memory_used_bytes",
    ):
        assert chart in charts, chart
        assert all(any(value is not None for value in series["mid"]) for series in charts[chart]["series"])
    metrics = [json.loads(line) for line in start.directory.metrics_file.read_text().splitlines()]
    assert charts["loss"]["series"][0]["mid"] == [row["loss"] for row in metrics]
    assert charts["loss"]["series"][1]["x"] == [2, 4, 6]
    ledger = [json.loads(line) for line in start.directory.ledger_file.read_text().splitlines()]
    assert {series["name"] for series in charts["ledger-shares"]["series"]} == {
        name for row in ledger for name in row["parts"]
    }
    for phrase in (
        "of the time went into forward, backward and optimizer",
        "packages.torch",
        "memory of the fullest rank",
        f"Every one of the {STEPS} steps is a point.",
        "train:",
    ):
        assert phrase in text
