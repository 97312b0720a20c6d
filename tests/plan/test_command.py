"""``launch/plan.py`` as typed by a user.

pytest tests/plan/test_command.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import plan
from toolkit.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ("cluster.nodes=8", "cluster.gpus_per_node=8", "cluster.gpu=h100")


def test_plan_of_a_described_cluster_does_not_import_torch() -> None:
    code = (
        "import runpy, sys, atexit; "
        "atexit.register(lambda: print('heavy:', [m for m in ('torch', 'deepspeed') if m in sys.modules])); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "launch/plan.py", "+exp=llama_8b_zero3_offload", *CLUSTER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 x h100 on 8 nodes" in done.stdout
    assert "offload_optimizer" in done.stdout
    assert done.stdout.endswith("heavy: []\n")


def test_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--json", "+exp=gpt2_125m", *CLUSTER]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["world"]["ranks"] == 64
    assert found["parameters"] > 124e6


def test_all_problems_are_printed_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["zero=stage2", "train.global_batch=63", "schedule.min_lr=5"]
    assert plan.main(["+exp=llama_8b_zero3_offload", *CLUSTER, *arguments]) == ExitCode.USER
    printed = capsys.readouterr().err
    for key in ("offload.parameters=cpu", "train.global_batch=63", "schedule.min_lr=5"):
        assert key in printed
    assert printed.count("remedy:") >= 3
    assert "Traceback" not in printed


TOO_LARGE = (
    "+exp=llama_8b_zero3_offload",
    "offload=none",
    "train.global_batch=2048",
    "train.micro_batch=32",
    *CLUSTER,
)


def test_remedy_for_too_little_memory_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(TOO_LARGE) == ExitCode.USER
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "fit on its device" in printed.splitlines()[1]
    remedy = printed.partition("remedy: write train.micro_batch=")[2].split()[0]
    assert plan.main([*TOO_LARGE, f"train.micro_batch={remedy}"]) == ExitCode.DONE


def test_warnings_are_printed_above_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["+exp=mixtral_8x7b", *CLUSTER]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert printed.startswith("warning: model.router_aux_loss_coef=0.02")
    assert "fits with 62.7 GB to spare: 21.924 GB of 85.521 GB a GPU (26%)" in printed


def test_help_lists_cluster_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--help"]) == ExitCode.DONE
    assert "cluster.gpu" in capsys.readouterr().out
