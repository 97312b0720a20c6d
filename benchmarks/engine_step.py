"""Measure a step through the toolkit against baseline scripts on the same engine and plain torch.

    python benchmarks/engine_step.py                  each comparison below, about 1.5 minutes each
    python benchmarks/engine_step.py --only deepspeed-zero2 --pairs 40

Two CPU ranks train a small Llama. Both jobs run at the same time and alternate blocks of steps, so that a
pair sees the same machine (benchmarks/harness/alternating_turns.py). The toolkit's step includes
everything: data stream, hooks, metrics, W&B offline. The time to the first step is that of whole commands,
alternating as well. On a GPU: benchmarks/gpu.py.

Results go to benchmarks/results/engine_step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.alternating_turns import TurnJob, compare, steps_of
from harness.environment import describe_machine, package_versions
from harness.torchrun_job import ROOT

from toolkit.config.compose import compose
from toolkit.families import get_family
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

RESULTS = ROOT / "benchmarks" / "results"
RANKS = 2
SMALL = (
    "model.hidden_size=256",
    "model.intermediate_size=704",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.tie_word_embeddings=true",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.sequence_length=128",
    "optim.lr=1e-3",
    "monitor.every=10",
)
QUIET = ("schedule=constant", "checkpoint.every=never", "checkpoint.at_end=false", "eval.every=0")
# Only the spec differs between the engines of baseline.py.
BASELINES = {"deepspeed": "baseline.py", "ddp": "baseline.py", "megatron": "baseline_megatron.py"}


@dataclass(frozen=True)
class Comparison:
    """The toolkit with ``overrides`` against a script on ``baseline``, an engine or torch's DDP."""

    name: str
    baseline: str
    overrides: tuple[str, ...]


MEGATRON = ("engine=megatron",)
COMPARISONS = (
    *(Comparison(f"deepspeed-zero{stage}", "deepspeed", (f"zero=stage{stage}",)) for stage in range(4)),
    Comparison("deepspeed-zero0-ddp", "ddp", ("zero=stage0",)),
    Comparison("megatron-dp2", "megatron", MEGATRON),
    Comparison("megatron-dp2-zero1", "megatron", (*MEGATRON, "zero=stage1")),
    Comparison(
        "megatron-tp2",
        "megatron",
        (*MEGATRON, "parallel.tensor=2", "+engine.megatron.sequence_parallel=false"),
    ),
    Comparison("megatron-dp2-ddp", "ddp", MEGATRON),
)


def run_overrides(sizes: Sequence[str], overrides: Sequence[str], steps: int, folder: Path) -> list[str]:
    return [
        *sizes,
        *QUIET,
        *overrides,
        f"train.steps={steps}",
        f"run.dir={folder}",
        f"data.path={ROOT / 'data' / 'stdlib'}",
    ]


def baseline_spec(engine: str, plan: RunPlan) -> dict[str, Any]:
    """Return what a baseline script needs of the toolkit's plan, so that both sides compute the same."""
    assert plan.shape is not None
    config = get_family(plan.shape.family).hugging_face_config(plan.shape)
    return {
        "engine": engine,
        "steps": plan.config.train.steps,
        "tokens": str(tokens_of(plan)),
        "tensor": plan.axes.tensor,
        "model": {key: value for key, value in config.items() if key != "architectures"},
        "deepspeed": plan.deepspeed and dict(plan.deepspeed),
        "megatron": plan.megatron and dict(plan.megatron),
        "micro_batch": plan.batch.micro_batch,
        "sequence_length": plan.config.train.sequence_length,
        "accumulation": plan.batch.at(0).accumulation,
    }


def tokens_of(plan: RunPlan) -> Path:
    return max(Path(plan.config.data.path).rglob("*.bin"), key=lambda file: file.stat().st_size)


def jobs(comparison: Comparison, steps: int, block: int, folder: Path) -> Iterator[TurnJob]:
    """Return the toolkit's job and the baseline."""
    overrides = run_overrides(SMALL, comparison.overrides, steps, folder / "run")
    plan = make_plan(compose(overrides), World(ranks=RANKS, ranks_per_node=RANKS, device=Device.CPU))
    yield TurnJob("toolkit", "toolkit_in_turns.py", {"overrides": overrides}, folder, block, ranks=RANKS)
    yield TurnJob(
        "bare",
        BASELINES[comparison.baseline],
        baseline_spec(comparison.baseline, plan),
        folder,
        block,
        ranks=RANKS,
    )


def run_comparisons(chosen: Sequence[Comparison], pairs: int, block: int, starts: int) -> dict[str, Any]:
    results: dict[str, Any] = {"ranks": RANKS, "steps_a_block": block, "steps": []}
    for comparison in chosen:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
            ours, baseline = (
                alive.enter_context(job)
                for job in jobs(comparison, steps_of(pairs, block), block, Path(folder))
            )
            row = {
                "name": comparison.name,
                "against": f"bare {comparison.baseline}",
                **compare(ours, baseline, pairs),
            }
        results["steps"].append(row)
        low, high = row["ratio_95"]
        print(
            f"{row['name']:>20} over {row['against']:<15} {row['ratio']:.3f} [{low:.3f}, {high:.3f}], "
            f"{row['step_seconds']['bare'] * 1e3:.0f} ms a bare step",
            flush=True,
        )
    if starts:
        results["first_step"] = [
            first_step(comparison, starts)
            for comparison in chosen
            if comparison.name in ("deepspeed-zero2", "megatron-dp2")
        ]
    return results


def first_step(comparison: Comparison, pairs: int) -> dict[str, Any]:
    """Return the seconds from the command to the end of its first step."""
    seconds: dict[str, list[float]] = {"toolkit": [], "bare": []}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            # Each job starts after the previous one has ended.
            for job in jobs(comparison, 2, 1, Path(folder)):
                with job:
                    job.block()
                    seconds[job.name].append(time.perf_counter() - job.started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["toolkit"] / medians["bare"]
    print(f"{comparison.name:>20} to the first step: {ratio:.2f} of {medians['bare']:.1f} s", flush=True)
    return {"name": comparison.name, "pairs": pairs, "seconds": medians, "ratio": ratio}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[comparison.name for comparison in COMPARISONS],
        help="comparisons on CPU",
    )
    parser.add_argument("--pairs", type=int, default=24, help="timed turns per side")
    parser.add_argument("--block", type=int, default=8, help="steps per turn")
    parser.add_argument(
        "--starts",
        type=int,
        default=5,
        help="pairs of commands that are timed until their first step; 0: none",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_step.json")
    given = parser.parse_args(arguments)
    from toolkit.data.tokens.stdlib import ensure_stdlib

    ensure_stdlib(str(ROOT / "data" / "stdlib"), 4096)
    chosen = [comparison for comparison in COMPARISONS if not given.only or comparison.name in given.only]
    results = run_comparisons(chosen, given.pairs, given.block, given.starts)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    header = {"machine": describe_machine(), "versions": package_versions()}
    given.out.write_text(json.dumps({**header, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
