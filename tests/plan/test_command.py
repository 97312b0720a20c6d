"""``launch/plan.py`` as a person types it.

pytest tests/plan/test_command.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ("cluster.nodes=8", "cluster.gpus_per_node=8", "cluster.gpu=h100")


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    """In its own interpreter, which prints last whether torch was imported."""
    code = (
        "import runpy, sys, atexit; atexit.register(lambda: print('heavy:', [m for m in ('torch', 'deepspeed') if m in sys.modules])); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "launch/plan.py", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


def test_a_described_cluster_is_planned_without_torch() -> None:
    done = plan("+exp=llama_8b_zero3_offload", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert "64 x h100 on 8 nodes" in done.stdout
    assert "offload_optimizer" in done.stdout
    assert done.stdout.endswith("heavy: []\n")


def test_json_for_programs() -> None:
    done = plan("--json", "+exp=gpt2_125m", *CLUSTER)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[: done.stdout.rindex("heavy:")])
    assert found["world"]["ranks"] == 64
    assert found["parameters"] > 124e6


def test_every_problem_and_exit_code_2() -> None:
    done = plan(
        "+exp=llama_8b_zero3_offload", *CLUSTER, "zero=stage2", "train.global_batch=63", "schedule.min_lr=5"
    )
    assert done.returncode == 2
    for key in ("offload.parameters=cpu", "train.global_batch=63", "schedule.min_lr=5"):
        assert key in done.stderr
    assert done.stderr.count("remedy:") >= 3
    assert "Traceback" not in done.stderr


TOO_LARGE = (
    "+exp=llama_8b_zero3_offload",
    "offload=none",
    "train.global_batch=512",
    "train.micro_batch=8",
    *CLUSTER,
)


def test_what_does_not_fit_in_memory_is_refused_with_exit_code_2() -> None:
    done = plan(*TOO_LARGE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "fit on its device" in done.stderr.splitlines()[1]
    remedy = done.stderr.partition("remedy: write train.micro_batch=")[2].split()[0]
    assert plan(*TOO_LARGE, f"train.micro_batch={remedy}").returncode == 0


def test_warnings_stand_above_the_plan() -> None:
    done = plan("+exp=mixtral_8x7b", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("warning: model.router_aux_loss_coef=0.02")
    assert "fits: 21.119 GB of 85.521 GB a GPU (25%)" in done.stdout


def test_help_teaches() -> None:
    done = plan("--help")
    assert done.returncode == 0
    assert "cluster.gpu" in done.stdout
