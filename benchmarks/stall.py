"""Measure how long training waits for samples: the quickstart, end to end, on each engine.

    python benchmarks/stall.py                      about two minutes on two cores
    python benchmarks/stall.py --steps 60 --only deepspeed

The share is the seconds that the slowest rank waited for its samples, divided by the seconds of the steps,
over all steps but the first, as every run reports at its end. tests/train/test_run.py checks that a slow
loader shows.

Results go to benchmarks/results/stall.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.environment import describe_machine, package_versions

from toolkit.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "stall.json"
# One rank per core of a machine with two cores.
ENGINES = {
    "local": ("engine=local", "cluster.cpu_ranks=1"),
    "deepspeed": ("engine=deepspeed", "cluster.cpu_ranks=2"),
    "megatron": ("engine=megatron", "zero=stage1", "cluster.cpu_ranks=2"),
}
QUIET = ("checkpoint.every=never", "checkpoint.at_end=false", "eval.every=0")
LIMIT_SECONDS = 300


def stall(overrides: tuple[str, ...], steps: int, data: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        asked = [*overrides, *QUIET, f"train.steps={steps}", f"run.dir={run}", f"data.path={data}"]
        argv = [sys.executable, str(ROOT / "launch" / "train.py"), "+exp=quickstart", *asked]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=environ, cwd=ROOT
        )
        if done.returncode:
            output = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise SystemExit(f"{' '.join(overrides)}: exit code {done.returncode}\n{output}")
        rows = list(read_rows(run / "metrics.jsonl"))[1:]
    step_seconds, data_seconds = (
        sum(row["step_seconds"] for row in rows),
        sum(row["data_seconds"] for row in rows),
    )
    return {
        "steps": len(rows),
        "step_seconds": step_seconds / len(rows),
        "data_seconds": data_seconds / len(rows),
        "share": data_seconds / step_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--data", default=str(ROOT / "data" / "stdlib"), help="folder of the embedded text, created if absent"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    stalls = {name: stall(ENGINES[name], given.steps, given.data) for name in given.only}
    for name, row in stalls.items():
        print(
            f"{name:>9}: {row['share']:.3%} of {row['step_seconds'] * 1e3:.0f} ms per step: waiting for data",
            flush=True,
        )
    result = {"machine": describe_machine(), "versions": package_versions(), "engines": stalls}
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
