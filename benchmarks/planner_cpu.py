"""Compare predicted with measured step times on CPU ranks, after a calibration of this machine.

    python benchmarks/planner_cpu.py               about 20 minutes on two idle cores
    python benchmarks/planner_cpu.py --quick       smoke test of two minutes: few layouts, no judgement
    python benchmarks/planner_cpu.py --only deep   measure one description again

launch/calibrate.py measures the machine and learns from a few runs of a model that is not measured later.
Then every layout of a description runs at the same time as the others and they take blocks of steps in turns,
so that all see the same machine (benchmarks/harness/alternating_turns.py). The calibration has seen none of
them.

Reported are the errors of the predicted step time, Kendall's tau of the ranking within each description, and
the regret of small cases: a description with some keys fixed by the user, of whose layouts the one with the
shortest prediction is chosen. Rows go to benchmarks/results/planner_cpu.json after each description; a second
start continues with the descriptions that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.alternating_turns import TurnJob
from harness.environment import describe_machine, package_versions
from harness.torchrun_job import ROOT

from toolkit.cluster.job import resolve_world
from toolkit.config.compose import compose
from toolkit.estimate.profile import load_profile
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.files import write_whole
from toolkit.plan import make_plan
from toolkit.plan.devices import HIDE_GPUS

RESULTS = ROOT / "benchmarks" / "results" / "planner_cpu.json"
WORK = ROOT / "data" / "planner_cpu"  # the calibration and its runs
DATA = ROOT / "data" / "stdlib"
CALIBRATION = "calibration.json"
BLOCK, BLOCKS, WARM_UP_BLOCKS = 5, 8, 2  # steps of a turn, and turns
GOOD_REGRET = 0.05  # a chosen layout that is at most this much slower than the best is a good choice
NOISE = 0.03  # smaller differences of measured layouts do not order them
# OMP_NUM_THREADS is the toolkit's: cores divided by ranks.
ENVIRON = {**HIDE_GPUS, "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
COMMON = (
    "schedule=constant",
    "checkpoint.every=never",
    "checkpoint.at_end=false",
    "eval.every=0",
    "monitor.every=1000",
    "optim.lr=1e-3",
    f"data.path={DATA}",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "model.tie_word_embeddings=true",
)
MEGATRON = ("engine=megatron", "+engine.megatron.sequence_parallel=false")
TENSOR, PIPELINE = ("parallel.tensor=2",), ("parallel.pipeline=2",)
FULL = ("train.activation_checkpointing=full",)


@dataclass(frozen=True)
class Description:
    """A model and batch, of which ``layouts`` are measured, by name."""

    name: str
    ranks: int
    words: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]


def micro(size: int) -> str:
    return f"train.micro_batch={size}"


def two_ranks(large: int, small: int) -> dict[str, tuple[str, ...]]:
    """Return layouts of two ranks with micro-batches of two sizes."""
    return {
        "zero0": ("zero=stage0", micro(large)),
        "zero2 small": ("zero=stage2", micro(small)),
        "zero3": ("zero=stage3", micro(large)),
        "zero3 full": ("zero=stage3", micro(large), *FULL),
        "megatron data": (*MEGATRON, "zero=stage1", micro(large)),
        "megatron data small": (*MEGATRON, micro(small)),
        "megatron tensor": (*MEGATRON, *TENSOR, micro(large)),
        "megatron pipeline": (*MEGATRON, *PIPELINE, micro(small)),
    }


def sizes(hidden: int, layers: int, sequence: int, batch: int) -> tuple[str, ...]:
    return (
        f"model.hidden_size={hidden}",
        f"model.intermediate_size={hidden * 11 // 4}",
        f"model.num_hidden_layers={layers}",
        f"train.sequence_length={sequence}",
        f"model.max_position_embeddings={sequence}",
        f"train.global_batch={batch}",
    )


DESCRIPTIONS = (
    Description("wide", 2, sizes(256, 4, 128, 8), two_ranks(4, 1)),
    Description("deep", 2, sizes(128, 12, 64, 16), two_ranks(8, 2)),
    Description("long", 2, sizes(128, 2, 512, 8), two_ranks(4, 2)),
    Description("narrow", 2, sizes(64, 6, 128, 32), two_ranks(16, 4)),
    Description(
        "single",
        1,
        sizes(192, 4, 128, 8),
        {
            "local": ("engine=local", "zero=stage0", micro(8)),
            "local small": ("engine=local", "zero=stage0", micro(2)),
            "local full": ("engine=local", "zero=stage0", micro(8), *FULL),
            "zero0": ("zero=stage0", micro(8)),
            "zero0 small": ("zero=stage0", micro(1)),
            "zero0 full": ("zero=stage0", micro(4), *FULL),
            "megatron": (*MEGATRON, micro(8)),
            "megatron small": (*MEGATRON, micro(2)),
        },
    ),
)
# The calibration learns from other sizes, and from one layout of each kind.
CALIBRATED = Description(
    "calibration",
    2,
    sizes(160, 4, 96, 8),
    {
        "zero1": ("zero=stage1", micro(2)),
        "zero3": ("zero=stage3", micro(4), *FULL),
        "megatron data": (*MEGATRON, micro(2)),
        "megatron tensor": (*MEGATRON, *TENSOR, micro(4)),
        "megatron pipeline": (*MEGATRON, *PIPELINE, micro(2)),
    },
)
CALIBRATED_ALONE = Description(
    "calibration-single",
    1,
    sizes(160, 4, 96, 8),
    {"local": ("engine=local", "zero=stage0", micro(4)), "zero0": ("zero=stage0", micro(2))},
)
# What a user may have fixed, as a condition on a layout's name: each is a case of every description.
FIXED: Mapping[str, Callable[[str], bool]] = {
    "nothing": lambda layout: True,
    "engine": lambda layout: layout.startswith("megatron"),
    "other engine": lambda layout: not layout.startswith("megatron"),
    "no recomputation": lambda layout: "full" not in layout,
    "small micro-batches": lambda layout: "small" in layout or "pipeline" in layout,
    "large micro-batches": lambda layout: "small" not in layout and "pipeline" not in layout,
}


def run_words(description: Description, layout: str, folder: Path, steps: int) -> list[str]:
    return [
        *COMMON,
        *description.words,
        *description.layouts[layout],
        f"cluster.cpu_ranks={description.ranks}",
        "cluster.gpus_per_node=0",
        f"train.steps={steps}",
        f"run.dir={folder}",
    ]


def calibrate(work: Path, steps: int, *, quick: bool) -> Path:
    """Write the calibration of this machine, unless an earlier start has.

    Args:
        quick: learn from two runs only, without measuring operators.
    """
    file = work / CALIBRATION
    if file.exists():
        return file
    work.mkdir(parents=True, exist_ok=True)
    draft = work / "draft.json"
    if not quick:
        command("launch/calibrate.py", f"out={draft}")
        command("launch/calibrate.py", f"out={draft}", ranks=2)
    folders = []
    for description in (CALIBRATED, CALIBRATED_ALONE):
        for layout in list(description.layouts)[: 1 if quick else None]:
            folder = work / f"{description.name} {layout}".replace(" ", "-")
            folders.append(folder)
            if not (folder / "finished").exists():
                command("launch/train.py", *run_words(description, layout, folder, steps))
                (folder / "finished").touch()
    command("launch/calibrate.py", f"out={draft}", *map(str, folders))
    draft.rename(file)
    return file


def command(script: str, *words: str, ranks: int = 1) -> None:
    """Run a script of the toolkit, under torchrun if there are several ranks. Raises SystemExit if it
    fails.
    """
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / script), *words],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(words)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def measure(description: Description, layouts: Sequence[str], blocks: int) -> list[dict[str, Any]]:
    """Return a row for each layout, whose jobs take turns."""
    seconds: dict[str, list[float]] = {layout: [] for layout in layouts}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as alive:
        folder, jobs = Path(temporary), {}
        steps = (blocks + WARM_UP_BLOCKS) * BLOCK
        for layout in layouts:
            name = layout.replace(" ", "-")
            words = run_words(description, layout, folder / f"{name}-run", steps)
            job = TurnJob(
                name,
                "toolkit_in_turns.py",
                {"overrides": words},
                folder,
                BLOCK,
                ranks=description.ranks,
                environ=ENVIRON,
            )
            jobs[layout] = alive.enter_context(job)
            job.block()  # jobs start one after another, so that the machine is not overloaded
        for turn in range(blocks + WARM_UP_BLOCKS - 1):
            for layout in layouts if turn % 2 else reversed(layouts):
                # While rank 0 waits for its turn, other ranks begin the block's first step.
                block = jobs[layout].block()[1:]
                if turn >= WARM_UP_BLOCKS - 1:
                    seconds[layout] += block
    return [
        {
            "description": description.name,
            "layout": layout,
            "seconds": statistics.median(seconds[layout]),
            "quartiles": statistics.quantiles(seconds[layout], n=4)[::2],
            "steps": len(seconds[layout]),
        }
        for layout in layouts
    ]


def predict(row: Mapping[str, Any], calibration: Path) -> StepEstimate:
    """Return the estimate of a measured layout."""
    description = next(one for one in DESCRIPTIONS if one.name == row["description"])
    words = run_words(description, row["layout"], ROOT / "runs" / "none", 100)
    config = compose([*words, f"cluster.calibration={calibration}"])
    plan = make_plan(config, resolve_world(config.cluster))
    profile = load_profile(config.cluster, plan.world)
    estimate = None if profile is None else estimate_step(plan, profile)
    assert estimate is not None, "the time of a family is predicted"
    return estimate


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return errors, ranking and regrets of rows with ``seconds`` and ``predicted``."""
    errors = [row["predicted"] / row["seconds"] - 1 for row in rows]
    pairs = [
        (first, second)
        for first, second in combinations(rows, 2)
        if first["description"] == second["description"]
    ]
    distinct = [(a, b) for a, b in pairs if abs(a["seconds"] / b["seconds"] - 1) > NOISE]
    cases = [
        {"description": name, "fixed": fixed, **regret(candidates)}
        for name in dict.fromkeys(row["description"] for row in rows)
        for fixed, allows in FIXED.items()
        if len(candidates := [row for row in rows if row["description"] == name and allows(row["layout"])])
        > 1
    ]
    return {
        "layouts": len(rows),
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "largest_error": max(errors, key=abs),
        "within_15_percent": statistics.fmean(abs(error) <= 0.15 for error in errors),
        "inside_80_percent_interval": statistics.fmean(
            row["low"] <= row["seconds"] <= row["high"] for row in rows
        ),
        "kendall_tau": kendall_tau(pairs),
        "kendall_tau_beyond_noise": kendall_tau(distinct),
        "cases": cases,
        "good_choices": statistics.fmean(case["regret"] <= GOOD_REGRET for case in cases) if cases else None,
    }


def kendall_tau(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float | None:
    """Return (concordant - discordant) / all pairs (Kendall 1938, "A new measure of rank correlation"); None
    without pairs.
    """
    signs = [
        1 if (a["seconds"] < b["seconds"]) == (a["predicted"] < b["predicted"]) else -1 for a, b in pairs
    ]
    return statistics.fmean(signs) if signs else None


def regret(candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the layout with the shortest prediction, the best measured one, and how much slower it is."""
    chosen = min(candidates, key=lambda row: row["predicted"])
    best = min(candidates, key=lambda row: row["seconds"])
    return {
        "chosen": chosen["layout"],
        "best": best["layout"],
        "regret": chosen["seconds"] / best["seconds"] - 1,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [description.name for description in DESCRIPTIONS]
    parser.add_argument("--quick", action="store_true", help="smoke test: three layouts, no file of results")
    parser.add_argument("--only", nargs="+", choices=names, help="measure these descriptions again")
    parser.add_argument("--again", action="store_true", help="calibrate and measure everything again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    from toolkit.data.tokens.stdlib import ensure_stdlib

    started = time.monotonic()
    ensure_stdlib(str(DATA), 4096)
    if given.quick:
        work = Path(tempfile.mkdtemp(prefix="planner-"))
        calibration = calibrate(work, 8, quick=True)
        layouts = ["zero0", "megatron data", "megatron tensor"]
        report(measure(DESCRIPTIONS[0], layouts, 2), calibration, None)
        return
    if given.again:
        (WORK / CALIBRATION).unlink(missing_ok=True)
        for mark in WORK.glob("*/finished"):
            mark.unlink()
    calibration = calibrate(WORK, 24, quick=False)
    print(f"calibrated after {time.monotonic() - started:.0f} s", flush=True)
    machine = describe_machine()
    known = json.loads(given.out.read_text()) if given.out.exists() and not given.again else {}
    rows = list(known["rows"]) if known.get("machine") == machine else []
    for description in DESCRIPTIONS:
        if any(row["description"] == description.name for row in rows) and description.name not in (
            given.only or ()
        ):
            continue
        rows = [row for row in rows if row["description"] != description.name]
        rows += measure(description, list(description.layouts), BLOCKS)
        report(rows, calibration, given.out)
        print(f"{description.name} after {time.monotonic() - started:.0f} s", flush=True)
    report(rows, calibration, given.out)


def report(rows: Sequence[Mapping[str, Any]], calibration: Path, out: Path | None) -> None:
    """Predict the rows, print them with the summary, and write them to ``out``."""
    full = []
    for row in rows:
        estimate = predict(row, calibration)
        full.append({**row, "predicted": estimate.seconds, "low": estimate.low, "high": estimate.high})
        print(
            f"{row['description']:>8} {row['layout']:<20} measured {row['seconds'] * 1e3:6.0f} ms, predicted "
            f"{estimate.seconds * 1e3:6.0f} ms, {estimate.seconds / row['seconds'] - 1:+.0%}",
            flush=True,
        )
    summary = summarise(full)
    print(json.dumps({name: value for name, value in summary.items() if name != "cases"}, indent=1))
    if out is not None:
        found = {
            "machine": describe_machine(),
            "versions": package_versions(),
            "calibrated_layouts": len(CALIBRATED.layouts) + len(CALIBRATED_ALONE.layouts),
            "summary": summary,
            "rows": full,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
