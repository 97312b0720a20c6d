"""What the toolkit costs over a bare 40-line script with the same DeepSpeed settings, model and batch.

    python benchmarks/engine_overhead.py                       every ZeRO stage and plain DDP, about eleven minutes on two cores
    python benchmarks/engine_overhead.py --stages 2 --pairs 40

Both jobs are alive at once and take turns of a few steps, so a pair sees the same machine. The figure is the median over
pairs of (toolkit's median step / bare median step), with the 95% bounds that order statistics give for a median. The toolkit's
step has everything in it: data stream, hooks, metrics, W&B offline. The time to the first step is that of whole commands, from
typing to the end of step 1, in turns as well. Written to benchmarks/results/engine_overhead.json.
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
from typing import Any, TextIO

from toolkit.cluster.parent import free_port
from toolkit.config.compose import compose
from toolkit.families import get
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

ROOT = Path(__file__).resolve().parents[1]
SIDES = ROOT / "benchmarks" / "sides"
RANKS = 2
WARM_UP_BLOCKS = 2
SIZES = ("model.hidden_size=256", "model.intermediate_size=704", "model.num_hidden_layers=4", "model.num_attention_heads=4",
         "model.num_key_value_heads=2", "model.tie_word_embeddings=true")


def overrides(stage: int, steps: int, folder: Path) -> list[str]:
    return [f"zero=stage{stage}", *SIZES, "train.global_batch=8", "train.micro_batch=2", f"train.steps={steps}", "optim.lr=1e-3",
            "train.sequence_length=128", "schedule=constant", "checkpoint.every=never", "checkpoint.at_end=false", "eval.every=0",
            f"run.dir={folder}", "monitor.every=10", f"data.path={ROOT / 'data' / 'stdlib'}"]


def planned(words: list[str]) -> RunPlan:
    return make_plan(compose(words), World(ranks=RANKS, ranks_per_node=RANKS, device=Device.CPU))


class Job:
    """One side: a command of two ranks that runs a block of steps when told."""

    def __init__(self, name: str, script: str, spec: dict[str, Any], folder: Path, block: int) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        pipes = {end: self.folder / end for end in ("go", "done")}
        for pipe in pipes.values():
            os.mkfifo(pipe)
        spec_file = self.folder / "spec.json"
        spec_file.write_text(json.dumps({**spec, "baton": {**{end: str(pipe) for end, pipe in pipes.items()}, "block": block}}))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(SIDES)}
        argv = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", str(RANKS), "--master_port", str(free_port()),
                str(SIDES / script), str(spec_file)]
        self.started = time.perf_counter()
        self._log = (self.folder / "log.txt").open("w")
        self.process = subprocess.Popen(argv, env=environ, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT)
        self._go: TextIO | None = None
        self._done: TextIO | None = None
        self._pipes = pipes
        self.peak_bytes = 0

    def block(self) -> list[float]:
        """Seconds of each step of the next block."""
        if self._go is None or self._done is None:
            self._go = open_when_read(self._pipes["go"], self.process, self.folder)
            self._done = self._pipes["done"].open()
        print("go", file=self._go, flush=True)
        line = self._done.readline()
        assert line, f"the job ended early: {(self.folder / 'log.txt').read_text()[-3000:]}"
        answer = json.loads(line)
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        return answer["seconds"]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self._log.close()


def open_when_read(pipe: Path, process: subprocess.Popen[bytes], folder: Path, seconds: float = 180) -> TextIO:
    """Opening a pipe to write blocks until it is read; a job that died would never read it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log.txt").read_text()[-3000:]
                raise SystemExit(f"the job does not start:\n{log}") from None
            time.sleep(0.02)


def specs(stage: int | None, steps: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the toolkit's side and of the bare one; ``stage`` None: plain DDP against the toolkit's ZeRO 0."""
    words = overrides(stage or 0, steps, folder / "run")
    plan = planned(words)
    assert plan.shape is not None
    assert plan.deepspeed is not None
    bare = {
        "engine": "ddp" if stage is None else "deepspeed", "steps": steps, "tokens": str(tokens_of(plan)),
        "model": {key: value for key, value in get(plan.shape.family).hugging_face_config(plan.shape).items() if key != "architectures"},
        "deepspeed": dict(plan.deepspeed), "micro_batch": plan.batch.micro_batch, "sequence_length": plan.config.train.sequence_length,
        "accumulation": plan.batch.at(0).accumulation,
    }
    return {"overrides": words}, bare


def tokens_of(plan: RunPlan) -> Path:
    return max(Path(plan.config.data.path).rglob("*.bin"), key=lambda file: file.stat().st_size)


def compare(stage: int | None, pairs: int, block: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours, bare = specs(stage, (pairs + WARM_UP_BLOCKS) * block, folder)
        jobs = [Job("toolkit", "toolkit_side.py", ours, folder, block), Job("bare", "bare.py", bare, folder, block)]
        try:
            for job in jobs * WARM_UP_BLOCKS:
                job.block()
            seconds: dict[str, list[float]] = {"toolkit": [], "bare": []}
            for pair in range(pairs):
                for job in jobs if pair % 2 == 0 else reversed(jobs):
                    seconds[job.folder.name].append(statistics.median(job.block()))
        finally:
            for job in jobs:
                job.end()
        ratios = sorted(a / b for a, b in zip(seconds["toolkit"], seconds["bare"], strict=True))
        low, high = median_bounds(pairs)
        return {
            "against": "torch DDP" if stage is None else f"bare DeepSpeed ZeRO {stage}", "pairs": pairs, "steps_a_block": block,
            "ratio": statistics.median(ratios), "ratio_95": [ratios[low], ratios[high]],
            "step_seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "peak_bytes": {job.folder.name: job.peak_bytes for job in jobs},
        }


def median_bounds(count: int) -> tuple[int, int]:
    """Ranks (from 0) in a sorted sample between which its median lies with at least 95%: by the binomial distribution."""
    low, tail = 0, 0.5**count
    while low < count // 2 and tail + math.comb(count, low + 1) * 0.5**count <= 0.025:
        low += 1
        tail += math.comb(count, low) * 0.5**count
    return low, count - 1 - low


def first_step(stage: int, pairs: int) -> dict[str, Any]:
    """Seconds from the command to the end of its first step."""
    seconds: dict[str, list[float]] = {"toolkit": [], "bare": []}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as scratch:
            ours, bare = specs(stage, 2, Path(scratch))
            for name, script, spec in (("toolkit", "toolkit_side.py", ours), ("bare", "bare.py", bare)):
                job = Job(name, script, spec, Path(scratch), 1)
                try:
                    job.block()
                    seconds[name].append(time.perf_counter() - job.started)
                finally:
                    job.end()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"stage": stage, "pairs": pairs, "seconds": medians, "ratio": medians["toolkit"] / medians["bare"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--block", type=int, default=8, help="steps a turn")
    parser.add_argument("--starts", type=int, default=5, help="pairs of commands timed to their first step; 0: none")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "engine_overhead.json")
    words = parser.parse_args()
    from toolkit.data.stdlib import ensure

    ensure(str(ROOT / "data" / "stdlib"), 4096)
    found: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")},
        "ranks": RANKS, "steps": [],
    }
    for stage in [*words.stages, None]:
        row = compare(stage, words.pairs, words.block)
        found["steps"].append(row)
        low, high = row["ratio_95"]
        print(f"{row['against']:>22}: {row['ratio']:.3f} [{low:.3f}, {high:.3f}] of a bare step of "
              f"{row['step_seconds']['bare'] * 1e3:.0f} ms", flush=True)
    if words.starts:
        found["first_step"] = first_step(2, words.starts)
        start = found["first_step"]
        print(f"{'to the first step':>22}: {start['ratio']:.2f} of {start['seconds']['bare']:.1f} s", flush=True)
    words.out.parent.mkdir(parents=True, exist_ok=True)
    words.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
