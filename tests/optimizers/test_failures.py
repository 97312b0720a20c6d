"""Whole runs with a failing optimizer: one traceback of the user's code, no hang, exit code as documented."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "zero=stage2",
    "cluster.cpu_ranks=2",
    "cluster.restarts=0",
    "train.steps=6",
    "train.global_batch=4",
    "train.sequence_length=32",
    "model.num_hidden_layers=1",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "schedule.warmup=2",
    "monitor=files",
    "eval.every=0",
    "monitor.prompt=null",
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "code", "shown"),
    [
        (
            "FailsOnRankOne",
            ExitCode.FAILURE,
            r"rank 1: Traceback(?s:.)*line \d+, in step(?s:.)*ArithmeticError",
        ),
        ("RefusesToBuild", ExitCode.FAILURE, r"Traceback(?s:.)*line \d+, in __init__(?s:.)*RuntimeError"),
        ("NeedsClosure", ExitCode.USER, r"step requires closure \(.*own_optimizers.py:\d+\)"),
    ],
)
def test_failing_optimizer_ends_the_run(target: str, code: ExitCode, shown: str, tmp_path: Path) -> None:
    own = [
        "optim=custom",
        f"optim.target=tests.optimizers.own_optimizers.{target}",
        f"run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/train.py"), "+exp=quickstart", *SMALL, *own],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert re.search(shown, output), output
    assert output.count("Traceback") == (0 if code is ExitCode.USER else 1), output
    assert json.loads((tmp_path / "run/status.json").read_text())["exit_code"] == code
