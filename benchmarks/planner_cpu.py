"""Compare predicted with measured step times on CPU ranks, after a calibration of this machine.

    python benchmarks/planner_cpu.py            about ten minutes on two idle cores; a second start continues
    python benchmarks/planner_cpu.py --again    measure everything again
    python benchmarks/planner_cpu.py --quick    smoke test of one minute: few layouts, one round, no results

Every layout is a short run of the toolkit's training loop. In each of several rounds, all layouts run one
after another in random order, those of the calibration among them, so that a machine that becomes slower does
so for all. The layouts of the calibration have other sizes than those that are judged, and none of these has
been seen by it.

Reported are the errors of the predicted step time, Kendall's tau of the ranking within each description, and
the regret of small cases: a description with some keys fixed by the user, of whose layouts the one with the
shortest prediction is chosen. The measured runs stay in data/planner_cpu; results go to
benchmarks/results/planner_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from harness.environment import describe_machine, package_versions
from harness.ranks import measure_rank, train_rank

from toolkit.cluster.jobs.job import resolve_world
from toolkit.config.compose import compose
from toolkit.data.registry import prepare_data
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.estimate.calibration_file import write_calibration
from toolkit.estimate.plan_report import to_json
from toolkit.estimate.profile import load_profile
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.files import write_whole
from toolkit.monitor.calibration_runs import add_measured_runs, add_measurements, format_residuals
from toolkit.monitor.measured_steps import read_measured_steps
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.progress import Progress
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool, rank_pool

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "planner_cpu.json"
WORK = ROOT / "data" / "planner_cpu"  # what was measured
DATA = ROOT / "data" / "stdlib"
MACHINE, MEASURED, CALIBRATION = "machine.json", "measured.json", "calibration.json"  # files of WORK
RANKS = 2
ROUNDS, STEPS = 3, 12  # of which monitor/measured_steps.py leaves out the first ones
RUN_SECONDS = 300.0  # after which a run is given up
GOOD_REGRET = 0.05  # a chosen layout that is at most this much slower than the best is a good choice
NOISE = 0.03  # smaller differences of measured layouts do not order them
COMMON = (
    "schedule=constant",
    "checkpoint.every=never",
    "checkpoint.at_end=false",
    "eval.every=0",
    "monitor.every=1000",
    "monitor.wandb=disabled",
    "monitor.probe=false",
    "monitor.hang_seconds=0",
    "debug.threads=1",
    "optim.lr=1e-3",
    f"data.path={DATA}",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=4",
    "model.tie_word_embeddings=true",
    f"cluster.cpu_ranks={RANKS}",
    "cluster.gpus_per_node=0",
    f"train.steps={STEPS}",
)
MEGATRON = ("engine=megatron", "+engine.megatron.sequence_parallel=false")
TENSOR, PIPELINE = ("parallel.tensor=2",), ("parallel.pipeline=2",)
FULL = ("train.activation_checkpointing=full",)


@dataclass(frozen=True)
class Description:
    """A model and batch, of which ``layouts`` are measured, by name."""

    name: str
    overrides: tuple[str, ...]
    layouts: Mapping[str, tuple[str, ...]]


def micro(size: int) -> str:
    return f"train.micro_batch={size}"


def layouts_of(large: int, small: int, *more: str) -> dict[str, tuple[str, ...]]:
    """Return four layouts with large micro-batches, and those named in ``more``."""
    known = {
        "zero0": ("zero=stage0", micro(large)),
        "zero2 small": ("zero=stage2", micro(small)),
        "zero3": ("zero=stage3", micro(large)),
        "zero3 full": ("zero=stage3", micro(large), *FULL),
        "megatron data": (*MEGATRON, "zero=stage1", micro(large)),
        "megatron data small": (*MEGATRON, micro(small)),
        "megatron tensor": (*MEGATRON, *TENSOR, micro(large)),
        "megatron pipeline": (*MEGATRON, *PIPELINE, micro(small)),
    }
    return {name: known[name] for name in ("zero0", "zero3", "megatron data", "megatron tensor", *more)}


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
    Description("wide", sizes(256, 4, 128, 8), layouts_of(4, 1, "zero2 small", "megatron pipeline")),
    Description("deep", sizes(128, 12, 64, 8), layouts_of(4, 1, "zero2 small", "megatron data small")),
    Description("long", sizes(128, 2, 512, 4), layouts_of(2, 1, "zero2 small", "megatron pipeline")),
    Description(
        "narrow", sizes(64, 6, 128, 16), layouts_of(8, 2, "zero3 full", "zero2 small", "megatron pipeline")
    ),
    Description("short", sizes(192, 4, 64, 16), layouts_of(8, 4, "zero2 small", "megatron data small")),
)
# The calibration learns from other sizes, and from layouts of each kind.
CALIBRATED = (
    Description(
        "calibration",
        sizes(160, 4, 96, 8),
        {
            "zero1": ("zero=stage1", micro(2)),
            "zero3": ("zero=stage3", micro(4)),
            "megatron data": (*MEGATRON, micro(2)),
            "megatron tensor": (*MEGATRON, *TENSOR, micro(4)),
            "megatron pipeline": (*MEGATRON, *PIPELINE, micro(2)),
        },
    ),
    Description(
        "calibration-deep",
        sizes(96, 8, 192, 8),
        {
            "zero3 full": ("zero=stage3", micro(2), *FULL),
            "zero2": ("zero=stage2", micro(4)),
            "megatron tensor": (*MEGATRON, *TENSOR, micro(8)),
        },
    ),
)
# What a user may have fixed, as a condition on a layout's name: each is a case of every description.
FIXED: Mapping[str, Callable[[str], bool]] = {
    "nothing": lambda layout: True,
    "engine": lambda layout: layout.startswith("megatron"),
    "other engine": lambda layout: not layout.startswith("megatron"),
    "no ZeRO 3": lambda layout: "zero3" not in layout,
    "no tensor ranks": lambda layout: "tensor" not in layout,
    "small micro-batches": lambda layout: "small" in layout or "pipeline" in layout,
    "large micro-batches": lambda layout: "small" not in layout and "pipeline" not in layout,
}


def run_overrides(description: Description, layout: str, folder: Path) -> list[str]:
    return [*COMMON, *description.overrides, *description.layouts[layout], f"run.dir={folder}"]


class MeasuredLayouts:
    """The machine and the runs that were measured so far, in the folder ``work``."""

    def __init__(self, work: Path, pool: RankPool) -> None:
        self._work, self._pool = work, pool
        work.mkdir(parents=True, exist_ok=True)
        file = work / MEASURED
        self.rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []

    def measure_machine(self) -> None:
        """Measure operators and collectives, unless an earlier start has."""
        file = self._work / MACHINE
        if not file.exists():
            measured = self._pool.run(measure_rank, timeout=RUN_SECONDS)[0]
            world = World(ranks=RANKS, ranks_per_node=RANKS, device=Device.CPU)
            add_measurements(file, measured, world, os.cpu_count() or 1)

    def has(self, number: int, description: Description, layout: str) -> bool:
        return any(
            (row["round"], row["description"], row["layout"]) == (number, description.name, layout)
            for row in self.rows
        )

    def measure(self, number: int, description: Description, layout: str) -> None:
        """Train one run, and add its row."""
        folder = self._work / "runs" / f"{number}-{description.name}-{layout}".replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was interrupted
        config = compose(run_overrides(description, layout, folder))
        data = prepare_data(config, None, Progress.silent())
        directory = RunDirectory(folder)
        attempt = directory.begin(config, to_json(make_plan(config, resolve_world(config.cluster))))
        try:
            self._pool.run(train_rank, config, attempt, data, timeout=RUN_SECONDS)
        finally:
            directory.release()
        steps = read_measured_steps(folder)
        self.rows.append(
            {
                "round": number,
                "description": description.name,
                "layout": layout,
                "seconds": steps.seconds,
                "parts": dict(steps.parts),
                "run": folder.name,
            }
        )
        write_whole(self._work / MEASURED, json.dumps(self.rows, indent=1) + "\n")

    def calibrate(self) -> Path:
        """Write the calibration of the machine and of its runs, and return its file."""
        names = {description.name for description in CALIBRATED}
        folders = [self._work / "runs" / row["run"] for row in self.rows if row["description"] in names]
        file = self._work / CALIBRATION
        calibration, residuals = add_measured_runs(self._work / MACHINE, folders)
        write_calibration(file, calibration)
        write_whole(self._work / "residuals.txt", format_residuals(calibration, residuals) + "\n")
        return file


def summed_up(rows: Sequence[Mapping[str, Any]], description: Description, layout: str) -> dict[str, Any]:
    """Return a layout's row: the median over its rounds."""
    own = [row for row in rows if (row["description"], row["layout"]) == (description.name, layout)]
    names = sorted({name for row in own for name in row["parts"]})
    return {
        "description": description.name,
        "layout": layout,
        "seconds": statistics.median(row["seconds"] for row in own),
        "rounds": [row["seconds"] for row in own],
        "parts": {name: statistics.median(row["parts"].get(name, 0.0) for row in own) for name in names},
    }


def predict(description: Description, layout: str, calibration: Path) -> StepEstimate:
    """Return the estimate of a layout."""
    overrides = run_overrides(description, layout, ROOT / "runs" / "none")
    config = compose([*overrides, f"cluster.calibration={calibration}"])
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


def table_row(summary: Mapping[str, Any]) -> str:
    """Return the row of docs/results.md."""
    good = summary["good_choices"]
    return (
        f"| Step time of {summary['layouts']} layouts of both engines on two CPU ranks, after a calibration "
        f"that has seen none of them | {summary['within_15_percent']:.0%} within 15%, mean error "
        f"{summary['mean_absolute_error']:.1%}. Kendall's tau {summary['kendall_tau']:.2f}. In "
        f"{good:.0%} of {len(summary['cases'])} small cases the chosen layout is within 5% of the best "
        "| `python benchmarks/planner_cpu.py` |"
    )


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
    parser.add_argument("--quick", action="store_true", help="smoke test, without a file of results")
    parser.add_argument("--again", action="store_true", help="measure everything again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    # Leaves the contexts below, which end the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    ensure_stdlib(str(DATA), 4096)
    if given.quick:
        with tempfile.TemporaryDirectory(prefix="planner-") as work:
            run_benchmark(Path(work), QUICK, 1, None)
        return
    if given.again:
        shutil.rmtree(WORK, ignore_errors=True)
    run_benchmark(WORK, [(one, layout) for one in DESCRIPTIONS for layout in one.layouts], ROUNDS, given.out)


QUICK = [(DESCRIPTIONS[0], layout) for layout in ("zero0", "megatron data", "megatron tensor")]


def run_benchmark(
    work: Path, judged: Sequence[tuple[Description, str]], rounds: int, out: Path | None
) -> None:
    """Measure what is missing in ``work``, and report the judged layouts."""
    started = time.monotonic()
    with rank_pool(RANKS) as pool:
        measurements = MeasuredLayouts(work, pool)
        measurements.measure_machine()
        print(f"measured the machine after {time.monotonic() - started:.0f} s", flush=True)
        calibrated = [(one, layout) for one in CALIBRATED for layout in one.layouts]
        for number in range(rounds):
            order = [*calibrated, *judged]
            random.Random(number).shuffle(order)
            for description, layout in order:
                if not measurements.has(number, description, layout):
                    measurements.measure(number, description, layout)
            print(f"round {number + 1} of {rounds} after {time.monotonic() - started:.0f} s", flush=True)
        calibration = measurements.calibrate()
    rows = [summed_up(measurements.rows, description, layout) for description, layout in judged]
    estimates = [predict(description, layout, calibration) for description, layout in judged]
    report(rows, estimates, out)


def report(rows: Sequence[Mapping[str, Any]], estimates: Sequence[StepEstimate], out: Path | None) -> None:
    """Print the rows with their predictions and the summary, and write them to ``out``."""
    full = [
        {
            **row,
            "predicted": one.seconds,
            "low": one.low,
            "high": one.high,
            "predicted_parts": dict(one.parts),
        }
        for row, one in zip(rows, estimates, strict=True)
    ]
    print(f"{'':<30} {'measured':>9} {'predicted':>9}  error")
    for row in full:
        print(
            f"{row['description']:>8} {row['layout']:<21} {row['seconds'] * 1e3:6.0f} ms "
            f"{row['predicted'] * 1e3:6.0f} ms  {row['predicted'] / row['seconds'] - 1:+5.0%}"
        )
    summary = summarise(full)
    print(json.dumps({name: value for name, value in summary.items() if name != "cases"}, indent=1))
    print(table_row(summary))
    if out is not None:
        found = {
            "machine": describe_machine(),
            "versions": package_versions(),
            "calibrated_layouts": sum(len(one.layouts) for one in CALIBRATED),
            "summary": summary,
            "rows": full,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
