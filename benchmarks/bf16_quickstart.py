"""Whether bf16 trains to the same place in every layout: 300 steps of the quickstart, the final validation loss against ``local``'s.

    python benchmarks/bf16_quickstart.py                    on two CPU ranks: five runs of local, eight of both engines
    python benchmarks/bf16_quickstart.py --steps 20 --only local-micro1 megatron-tp2

Bf16 rounds, so the order of summation alone moves a run. How far is measured: five runs of ``local`` differ in nothing but the
micro-batch that the same global batch is summed by. An engine's run agrees if it lies where a sixth run of local would with 95%: mean
+- t(4) s sqrt(1 + 1/5) of the five. (Least and greatest of the five are told too; a sixth run of local leaves those once in three.)
Written to benchmarks/results/bf16_quickstart.json after every run; a run that is there with the same words is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.monitor.jsonl import read_rows
from toolkit.progress import Progress
from toolkit.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
COMMON = ("+exp=quickstart", "precision=bf16", "checkpoint.every=never", "checkpoint.at_end=false", "monitor.prompt=null",
          "monitor=files", "monitor.every=100", "debug.threads=1")
LOCAL = {f"local-micro{size}": ("engine=local", f"train.micro_batch={size}") for size in (1, 2, 4, 8, 16)}
ENGINES = {
    "deepspeed-dp2-zero1": ("engine=deepspeed", "zero=stage1"),
    "deepspeed-dp2-zero3": ("engine=deepspeed", "zero=stage3"),
    "deepspeed-tp2-zero1": ("engine=deepspeed", "zero=stage1", "parallel.tensor=2"),
    # Micro-batches are added up in fp32, as the plan advises where there are several.
    "deepspeed-pp2-zero1": ("engine=deepspeed", "zero=stage1", "parallel.pipeline=2", "train.micro_batch=4",
                            "+engine.deepspeed.data_types.grad_accum_dtype=fp32"),
    "megatron-dp2-zero1": ("engine=megatron", "zero=stage1"),
    "megatron-tp2": ("engine=megatron", "zero=stage0", "parallel.tensor=2"),
    "megatron-pp2": ("engine=megatron", "zero=stage0", "parallel.pipeline=2", "train.micro_batch=4"),
    "megatron-cp2": ("engine=megatron", "zero=stage0", "parallel.context=2"),
}
T_OF_FOUR = 2.776  # Student's t with four degrees of freedom, 97.5%


def train(words: list[str], ranks: int) -> dict[str, Any]:
    """One whole run: its last validation loss, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "launch" / "train.py"), *words, f"run.dir={folder}/run", f"cluster.cpu_ranks={ranks}",
                   f"data.path={ROOT / 'data' / 'stdlib'}"]
        environ = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
        started = time.monotonic()
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
        rows = list(read_rows(RunDirectory(f"{folder}/run").eval_file))
        return {"validation_loss": rows[-1]["loss"], "step": rows[-1]["step"], "seconds": round(time.monotonic() - started, 1)}


def judged(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The spread of local, and where each engine's run lies in it."""
    local = [runs[name]["validation_loss"] for name in LOCAL if name in runs]
    if len(local) < len(LOCAL):
        return {"local": local}
    mean, deviation = statistics.mean(local), statistics.stdev(local)
    reach = T_OF_FOUR * deviation * math.sqrt(1 + 1 / len(local))
    found: dict[str, Any] = {"mean": mean, "standard_deviation": deviation, "least": min(local), "greatest": max(local), "reach_95": reach}
    found["engines"] = {
        name: {"from_mean": runs[name]["validation_loss"] - mean, "agrees": abs(runs[name]["validation_loss"] - mean) <= reach,
               "between_least_and_greatest": min(local) <= runs[name]["validation_loss"] <= max(local)}
        for name in ENGINES if name in runs}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=[*LOCAL, *ENGINES], default=[*LOCAL, *ENGINES])
    parser.add_argument("--words", nargs="*", default=[], help="of every run: model.hidden_size=128")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "bf16_quickstart.json")
    given = parser.parse_args()
    common = [*COMMON, f"train.steps={given.steps}", f"eval.every={given.steps}", *given.words]
    held = json.loads(given.out.read_text()) if given.out.exists() else {}
    runs: dict[str, dict[str, Any]] = held.get("runs", {}) if held.get("words") == common else {}
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed", "megatron-core", "transformers")}
    missing = [name for name in given.only if name not in runs]
    with Progress() as progress, progress.task("bf16 runs", total=len(missing), unit="runs") as task:
        for name in missing:
            words = LOCAL.get(name) or ENGINES[name]
            runs[name] = {"words": words, **train([*common, *words], 1 if name in LOCAL else 2)}
            found = {"machine": {"cpu": platform.machine(), "cores": os.cpu_count()}, "versions": versions, "words": common, "runs": runs,
                     "verdict": judged(runs)}
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            task.advance(note=f"{name} {runs[name]['validation_loss']:.4f}")
            print(f"{name:>22}: {runs[name]['validation_loss']:.5f} in {runs[name]['seconds']:.0f} s", flush=True)
    print(json.dumps(judged(runs), indent=1))


if __name__ == "__main__":
    main()
