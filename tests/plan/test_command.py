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
    code = ("import runpy, sys, atexit; atexit.register(lambda: print('heavy:', [m for m in ('torch', 'deepspeed') if m in sys.modules])); "
            "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')")
    return subprocess.run([sys.executable, "-c", code, "launch/plan.py", *words], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          check=False)


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
    done = plan("+exp=llama_8b_zero3_offload", *CLUSTER, "zero=stage2", "train.global_batch=63", "schedule.min_lr=5")
    assert done.returncode == 2
    for key in ("offload.parameters=cpu", "train.global_batch=63", "schedule.min_lr=5"):
        assert key in done.stderr
    assert done.stderr.count("remedy:") >= 3
    assert "Traceback" not in done.stderr


def test_help_teaches() -> None:
    done = plan("--help")
    assert done.returncode == 0
    assert "cluster.gpu" in done.stdout
