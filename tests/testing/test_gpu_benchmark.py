"""`benchmarks/gpu.py` runs everywhere; only its figures need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--cpu",
        "--only",
        "1b",
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, *arguments], cwd=ROOT, check=False, timeout=840)
    return done.returncode, json.loads(out.read_text())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_contenders_are_measured(tmp_path: Path) -> None:
    code, report = run_benchmark(tmp_path, "--folder", str(tmp_path / "runs"))
    assert [row["status"] for row in report["rows"]] == ["measured"] * 3, report
    assert report["parity"]["verdicts"] == {"equal": 2}
    assert code == 0
    torch, deepspeed, megatron = report["rows"]
    assert "ledger_seconds" not in torch
    for row in (deepspeed, megatron):
        assert {"forward", "backward", "optimizer"} <= row["ledger_seconds"].keys()
        assert row["over_torch"] > 0
        assert set(row["kernels"]) == {"layers", "attention", "loss", "compile", "optimizer"}
    assert Path(deepspeed["trace"]).is_file()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_failed_contender_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    code, report = run_benchmark(
        tmp_path, "--no-parity", "--contenders", "megatron", "torch", "--words", "zero=stage3"
    )
    megatron, torch = report["rows"]
    assert megatron["status"] == "failed"
    assert "zero.stage" in megatron["reason"]
    assert torch["status"] == "measured"
    assert code == 1
