"""launch/calibrate.py: output and errors.

pytest tests/launch/test_calibrate.py
pytest tests/launch/test_calibrate.py -m full      measures this machine, alone and with two ranks
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launch.calibrate import main
from tests.launch.processes import ROOT, command
from tests.monitor.test_calibration_runs import plan_of, write_run
from toolkit.estimate.calibration_file import read_calibration

CALIBRATE = ROOT / "launch" / "calibrate.py"


def test_runs_are_added_and_residuals_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "mine", plan_of()), tmp_path / "cluster.json"
    assert main([str(run), f"out={out}"]) == 0
    printed = capsys.readouterr().out
    for shown in ("1 run on h100", "matrix products", "mine", "communication/data", "mean error", str(out)):
        assert shown in printed
    assert [run.name for run in read_calibration(out).runs.values()] == ["mine"]


def test_help_shows_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    message = capsys.readouterr().out
    for word in ("python -m toolkit.launch.calibrate runs/", "torchrun", "out=", "Exit code"):
        assert word in message


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (["nowhere"], "run=nowhere"),
        (["empty"], "no folder attempts/"),
        (["empty", "output=x"], "output=x"),
        (["out=missing/file.json"], "out=missing/file.json"),
        (["mine", "out=damaged.json"], "a calibration is a file of format 1"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    shows: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.json").write_text("{}")
    if "mine" in words:
        write_run(tmp_path / "mine", plan_of())
    assert main(words) == 2
    message = capsys.readouterr().err
    assert shows in message
    assert "remedy" in message
    assert not (tmp_path / "calibration.json").exists()


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "ranks"), [("python", None), ("torchrun", 2)])
def test_this_machine_is_measured_within_two_minutes(
    tmp_path: Path, launcher: str, ranks: int | None
) -> None:
    out = tmp_path / "calibration.json"
    done = subprocess.run(
        command(launcher, CALIBRATE, f"out={out}", ranks=ranks),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = read_calibration(out).measurements
    assert measured is not None
    assert measured.ranks_per_node == (ranks or 1)
    assert len(measured.collectives) == (20 if ranks else 0)
    assert "matrix products" in done.stdout
    assert json.loads(out.read_text())["values"]["matmul_fraction"] > 0
