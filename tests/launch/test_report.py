"""launch/report.py: output and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.report import main
from tests.launch.processes import ROOT
from tests.monitor.report.runs import write_run

REPORT = ROOT / "launch" / "report.py"


def test_report_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", 20)
    done = subprocess.run(
        [sys.executable, str(REPORT), str(run)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"the report is in {run / 'report.html'}\n")
    assert "Traceback" not in done.stderr
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_report_with_output_file_and_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = write_run(tmp_path / "mine", 20, nodes=1), write_run(tmp_path / "other", 20, nodes=2)
    (other / "system/node-0.jsonl").unlink()
    out = tmp_path / "page.html"
    assert main([str(run), f"out={out}", f"nodes={other}"]) == 0
    assert str(out) in capsys.readouterr().out
    assert "node 1, GPU 2" in out.read_text(encoding="utf-8")
    assert not (run / "report.html").exists()


def test_report_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    message = capsys.readouterr().out
    for word in ("python -m toolkit.launch.report runs/", "out=", "nodes=", "Exit code"):
        assert word in message


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        ([], "no run directory"),
        (["nowhere"], "run=nowhere"),
        (["empty"], "run=empty"),
        (["mine", "empty"], "2 run directories"),
        (["mine", "output=x"], "output=x"),
        (["mine", "nodes=empty"], "nodes=empty"),
        (["mine", "out=missing/page.html"], "out=missing/page.html"),
        (["mine/metrics.jsonl"], "run=mine/metrics.jsonl"),
    ],
)
def test_report_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    shows: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "mine", 2, nodes=1, gpus=0)
    (tmp_path / "empty").mkdir()
    assert main(words) == 2
    message = capsys.readouterr().err
    assert shows in message
    assert "rule:" in message
    assert "remedy:" in message
    assert "Traceback" not in message
    assert not list(tmp_path.rglob("*.html"))
