"""Measure a step through the toolkit against bare scripts on the same engine and plain torch.

    python benchmarks/engine_step.py                  on CPU ranks: each comparison below, about 1.5 minutes
        each
    python benchmarks/engine_step.py --only deepspeed-zero2 --pairs 40
    python benchmarks/engine_step.py --gpu            on one GPU: 1 B parameters in bf16, sequences of 4096
        tokens

On CPU two ranks train a small Llama. Both jobs run at the same time and alternate blocks of steps, so that a
pair sees the same machine (benchmarks/sides/turns.py). The toolkit's step includes everything: data stream,
hooks, metrics, W&B offline. The time to the first step is that of whole commands, alternating as well.

On a GPU compiled plain torch, DeepSpeed and Megatron-core (both through launch/train.py) run one after the
other:
tokens/s, MFU against the GPU's dense 16-bit peak (docs/plan.md), peak memory.

Results go to benchmarks/results/engine_step.json and engine_step_gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sides.torchrun import ROOT
from sides.turns import TurnJob, compare, median_with_bounds, steps_of

from toolkit.cluster.environment import detect_world, read_launch
from toolkit.cluster.machine_info import detect_machine
from toolkit.config.compose import compose
from toolkit.families import get_family
from toolkit.plan import make_plan
from toolkit.plan.flops import flops_per_step, peak_flops
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
# 1.1 B parameters: TinyLlama's sizes (Zhang et al., 2401.02385) at twice its length.
LARGE = (
    "model.hidden_size=2048",
    "model.intermediate_size=5632",
    "model.num_hidden_layers=22",
    "model.num_attention_heads=32",
    "model.num_key_value_heads=4",
    "model.vocab_size=32000",
    "model.max_position_embeddings=4096",
    "train.sequence_length=4096",
    "precision=bf16",
    "zero=stage1",
    "optim.lr=1e-4",
    "monitor.every=5",
)
QUIET = ("schedule=constant", "checkpoint.every=never", "checkpoint.at_end=false", "eval.every=0")
# Only the spec differs between the engines of bare.py.
BARE = {"deepspeed": "bare.py", "ddp": "bare.py", "megatron": "bare_megatron.py"}


@dataclass(frozen=True)
class Comparison:
    """The toolkit with the overrides ``words`` against a bare script on ``bare``, an engine or torch's
    DDP."""

    name: str
    bare: str
    words: tuple[str, ...]


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


def run_words(sizes: Sequence[str], words: Sequence[str], steps: int, folder: Path) -> list[str]:
    return [
        *sizes,
        *QUIET,
        *words,
        f"train.steps={steps}",
        f"run.dir={folder}",
        f"data.path={ROOT / 'data' / 'stdlib'}",
    ]


def bare_spec(engine: str, plan: RunPlan) -> dict[str, Any]:
    """Return what a bare script needs of the toolkit's plan, so that both sides compute the same."""
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
    """Return the toolkit's job and the bare one."""
    words = run_words(SMALL, comparison.words, steps, folder / "run")
    plan = make_plan(compose(words), World(ranks=RANKS, ranks_per_node=RANKS, device=Device.CPU))
    yield TurnJob("toolkit", "toolkit_side.py", {"overrides": words}, folder, block, ranks=RANKS)
    yield TurnJob("bare", BARE[comparison.bare], bare_spec(comparison.bare, plan), folder, block, ranks=RANKS)


def on_cpu(chosen: Sequence[Comparison], pairs: int, block: int, starts: int) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": RANKS, "steps_a_block": block, "steps": []}
    for comparison in chosen:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
            ours, bare = (
                alive.enter_context(job)
                for job in jobs(comparison, steps_of(pairs, block), block, Path(folder))
            )
            row = {
                "name": comparison.name,
                "against": f"bare {comparison.bare}",
                **compare(ours, bare, pairs),
            }
        found["steps"].append(row)
        low, high = row["ratio_95"]
        print(
            f"{row['name']:>20} over {row['against']:<15} {row['ratio']:.3f} [{low:.3f}, {high:.3f}], "
            f"{row['step_seconds']['bare'] * 1e3:.0f} ms a bare step",
            flush=True,
        )
    if starts:
        found["first_step"] = [
            first_step(comparison, starts)
            for comparison in chosen
            if comparison.name in ("deepspeed-zero2", "megatron-dp2")
        ]
    return found


def first_step(comparison: Comparison, pairs: int) -> dict[str, Any]:
    """Return the seconds from the command to the end of its first step."""
    seconds: dict[str, list[float]] = {"toolkit": [], "bare": []}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            for job in jobs(
                comparison, 2, 1, Path(folder)
            ):  # each job starts after the previous one has ended
                with job:
                    job.block()
                    seconds[job.name].append(time.perf_counter() - job.started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["toolkit"] / medians["bare"]
    print(f"{comparison.name:>20} to the first step: {ratio:.2f} of {medians['bare']:.1f} s", flush=True)
    return {"name": comparison.name, "pairs": pairs, "seconds": medians, "ratio": ratio}


CONTENDERS: dict[str, tuple[str, ...] | None] = {  # None: plain torch
    "torch": None,
    "deepspeed": ("engine=deepspeed", "zero=stage2"),  # sums micro-batches in fp32, like the others
    "megatron": ("engine=megatron",),
}


def on_gpu(words: Sequence[str], blocks: int, block: int) -> dict[str, Any]:
    """``words`` come last, so that they override the sizes of LARGE."""
    rows: list[dict[str, Any]] = []
    for name, engine in CONTENDERS.items():
        with tempfile.TemporaryDirectory() as folder:
            text = run_words(
                LARGE,
                [*(engine or ()), "cluster.gpus_per_node=1", *words],
                steps_of(blocks, block),
                Path(folder) / "run",
            )
            config = compose(text)
            plan = make_plan(config, detect_world(config.cluster, read_launch({}, [])[0]))
            assert plan.world.ranks == 1, (
                f"this is a comparison on one GPU, the plan is of {plan.world.ranks}"
            )
            spec = (
                {"overrides": text}
                if engine
                else {
                    **bare_spec("torch", plan),
                    "device": plan.world.device.value,
                    "recompute": config.train.activation_checkpointing,
                }
            )
            script = "toolkit_side.py" if engine else "compiled.py"
            with TurnJob(name, script, spec, Path(folder), block, ranks=1, environ={}) as job:
                warm_up_and_timed = [job.block() for _ in range(steps_of(blocks, block) // block)]
                seconds = [step for turn in warm_up_and_timed[-blocks:] for step in turn]
            rows.append({"engine": name, **_speed(plan, seconds), "peak_bytes": job.peak_bytes})
        print({key: value for key, value in rows[-1].items() if key != "step_seconds_95"}, flush=True)
    for row in rows:
        row["tokens_per_second_over_torch"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return {"words": [*LARGE, *words], "contenders": rows}


def _speed(plan: RunPlan, seconds: Sequence[float]) -> dict[str, Any]:
    step, bounds = median_with_bounds(seconds)
    peak, flops = peak_flops(plan), flops_per_step(plan)
    return {
        "gpu": plan.world.gpu,
        "steps": len(seconds),
        "step_seconds": step,
        "step_seconds_95": bounds,
        "tokens_per_second": plan.units_per_step / step,
        "mfu": flops / step / peak if peak and flops else None,  # None for an unknown GPU
    }


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
    parser.add_argument("--gpu", action="store_true", help="run the comparison on one GPU instead")
    parser.add_argument(
        "--words",
        nargs="*",
        default=["train.global_batch=16", "train.micro_batch=4"],
        help="options of the run on a GPU",
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    machine = detect_machine()
    if given.gpu and not (machine.gpus and machine.torch_has_cuda):
        raise SystemExit("--gpu: this machine has no GPU")
    from toolkit.data.tokens.stdlib import ensure_stdlib

    ensure_stdlib(str(ROOT / "data" / "stdlib"), 4096)
    if given.gpu:
        found = on_gpu(given.words, blocks=3, block=given.block)
    else:
        chosen = [comparison for comparison in COMPARISONS if not given.only or comparison.name in given.only]
        found = on_cpu(chosen, given.pairs, given.block, given.starts)
    out = given.out or RESULTS / ("engine_step_gpu.json" if given.gpu else "engine_step.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": _machine(), "versions": _versions(), **found}, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    gpus = [gpu.product for gpu in detect_machine().gpus]
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "python": platform.python_version(),
    }


def _versions() -> dict[str, str | None]:
    """Return versions; None for a package that is not installed, such as Transformer Engine."""
    found: dict[str, str | None] = {}
    for name in ("torch", "deepspeed", "megatron-core", "transformer-engine", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    main()
