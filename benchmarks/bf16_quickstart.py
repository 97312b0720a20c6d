"""Compare the final validation loss of bf16 runs of the quickstart in every layout with plain torch's.

    python benchmarks/bf16_quickstart.py         eight local runs, ten of both engines on two ranks, a control
    python benchmarks/bf16_quickstart.py --steps 20 --only local-micro1 megatron-tp2

In bf16 the order of summation alone changes a run: at the quickstart's learning rate runs diverge around
step 40 and end in different places. The spread is measured with runs of ``local`` that differ only in the
micro-batch that sums the global batch, or in the vector width of the kernels. A run of an engine agrees if
it lies in the prediction interval of one more local run, mean +- t s sqrt(1 + 1/n), with t chosen so that
ten correct runs all agree with probability 95% (``alone`` is the narrower interval of a single run). The
means are compared by Welch's t-test. Two layouts run twice, with another micro-batch, to show how far one
layout moves. The control, a fifth of the learning rate, must be outside.

Results go to benchmarks/results/bf16_quickstart.json after every run; a stored run with equal options is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.environment import describe_machine, package_versions

from toolkit.plan.devices import HIDE_GPUS
from toolkit.progress import Progress
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
COMMON = (
    "+exp=quickstart",
    "precision=bf16",
    "checkpoint.every=never",
    "checkpoint.at_end=false",
    "monitor.prompt=null",
    "monitor=files",
    "monitor.every=100",
    "debug.threads=1",
)
NARROW = {"ATEN_CPU_CAPABILITY": "avx2"}
LOCAL = {f"local-micro{size}": ("engine=local", f"train.micro_batch={size}") for size in (1, 2, 4, 8, 16)}
LOCAL |= {f"local-narrow-micro{size}": ("engine=local", f"train.micro_batch={size}") for size in (4, 8, 16)}
# Sum micro-batches in fp32, as the plan advises.
PIPE = (
    "engine=deepspeed",
    "zero=stage1",
    "parallel.pipeline=2",
    "+engine.deepspeed.data_types.grad_accum_dtype=fp32",
)
ENGINES = {
    "deepspeed-dp2-zero1": ("engine=deepspeed", "zero=stage1"),
    "deepspeed-dp2-zero3": ("engine=deepspeed", "zero=stage3"),
    "deepspeed-tp2-zero1": ("engine=deepspeed", "zero=stage1", "parallel.tensor=2"),
    "deepspeed-pp2-zero1": (*PIPE, "train.micro_batch=4"),
    "deepspeed-pp2-zero1-again": (*PIPE, "train.micro_batch=8"),
    "megatron-dp2-zero1": ("engine=megatron", "zero=stage1"),
    "megatron-tp2": ("engine=megatron", "zero=stage0", "parallel.tensor=2"),
    "megatron-tp2-again": ("engine=megatron", "zero=stage0", "parallel.tensor=2", "train.micro_batch=8"),
    "megatron-pp2": ("engine=megatron", "zero=stage0", "parallel.pipeline=2", "train.micro_batch=4"),
    "megatron-cp2": ("engine=megatron", "zero=stage0", "parallel.context=2"),
}
CONTROL = {"control": ("engine=local", "train.micro_batch=16", "optim.lr=4e-4")}
EVERY = {**LOCAL, **ENGINES, **CONTROL}
# Two-sided critical values of Student's t by degrees of freedom from 1 on, for 5% and for 5% / 10
# (Bonferroni, for ten runs of engines).
T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
)
T_TEN = (
    127.32,
    14.089,
    7.453,
    5.598,
    4.773,
    4.317,
    4.029,
    3.833,
    3.690,
    3.581,
    3.497,
    3.428,
    3.372,
    3.326,
    3.286,
    3.252,
)


def train(overrides: list[str], ranks: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run one configuration; return its last validation loss and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "launch" / "train.py"),
            *overrides,
            f"run.dir={folder}/run",
            f"cluster.cpu_ranks={ranks}",
            f"data.path={ROOT / 'data' / 'stdlib'}",
        ]
        started = time.monotonic()
        settings = {**os.environ, **HIDE_GPUS, "TORCHDYNAMO_DISABLE": "1", **environ}
        done = subprocess.run(command, env=settings, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
        rows = list(read_rows(RunDirectory(f"{folder}/run").eval_file))
        return {
            "validation_loss": rows[-1]["loss"],
            "step": rows[-1]["step"],
            "seconds": round(time.monotonic() - started, 1),
        }


def compare_with_local(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the spread of local runs, the position of each engine run in it, and both means."""
    local = [runs[name]["validation_loss"] for name in LOCAL if name in runs]
    if len(local) < len(LOCAL):
        return {"local": local}
    mean, deviation, freedom = statistics.mean(local), statistics.stdev(local), len(local) - 1
    alone, reach = (t[freedom - 1] * deviation * math.sqrt(1 + 1 / len(local)) for t in (T, T_TEN))
    results: dict[str, Any] = {
        "mean": mean,
        "standard_deviation": deviation,
        "least": min(local),
        "greatest": max(local),
        "reach_alone": alone,
        "reach": reach,
    }
    results["runs"] = {
        name: {
            "from_mean": runs[name]["validation_loss"] - mean,
            "agrees": abs(runs[name]["validation_loss"] - mean) <= reach,
            "agrees_alone": abs(runs[name]["validation_loss"] - mean) <= alone,
        }
        for name in (*ENGINES, *CONTROL)
        if name in runs
    }
    losses = [runs[name]["validation_loss"] for name in ENGINES if name in runs]
    if len(losses) > 1:
        results["means"] = welch_t(local, losses)
    return results


def welch_t(a: list[float], b: list[float]) -> dict[str, Any]:
    """Return Welch's t (1947) of two samples, and the t that 5% of equal pairs exceed."""
    parts = [statistics.variance(each) / len(each) for each in (a, b)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True)
    )
    t, limit = (statistics.mean(b) - statistics.mean(a)) / math.sqrt(sum(parts)), T[int(freedom) - 1]
    return {
        "difference": statistics.mean(b) - statistics.mean(a),
        "t": t,
        "t_95": limit,
        "agree": abs(t) <= limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=[*EVERY], default=[*EVERY])
    parser.add_argument("--words", nargs="*", default=[], help="options of every run: model.hidden_size=128")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "bf16_quickstart.json")
    given = parser.parse_args()
    common = [*COMMON, f"train.steps={given.steps}", f"eval.every={given.steps}", *given.words]
    earlier = json.loads(given.out.read_text()) if given.out.exists() else {}
    runs: dict[str, dict[str, Any]] = earlier.get("runs", {}) if earlier.get("words") == common else {}
    missing = [name for name in given.only if name not in runs]
    with Progress() as progress, progress.task("bf16 runs", total=len(missing), unit="runs") as task:
        for name in missing:
            overrides = EVERY[name]
            runs[name] = {
                "words": overrides,
                **train(
                    [*common, *overrides], 2 if name in ENGINES else 1, NARROW if "narrow" in name else {}
                ),
            }
            results = {
                "machine": describe_machine(),
                "versions": package_versions(),
                "words": common,
                "runs": runs,
                "verdict": compare_with_local(runs),
            }
            given.out.write_text(json.dumps(results, indent=1) + "\n")
            task.advance(note=f"{name} {runs[name]['validation_loss']:.4f}")
            print(
                f"{name:>22}: {runs[name]['validation_loss']:.5f} in {runs[name]['seconds']:.0f} s",
                flush=True,
            )
    print(json.dumps(compare_with_local(runs), indent=1))


if __name__ == "__main__":
    main()
