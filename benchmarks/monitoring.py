"""Measure the cost of monitoring: everything on against everything off, with steps of at least 200 ms.

    python benchmarks/monitoring.py                           45 minutes on two idle cores
    python benchmarks/monitoring.py --launches 1 --pairs 8    a quick try with wide bounds

On a virtual machine steps vary by several per cent, so alternating whole steps would take hours to resolve
1%. Here two jobs run in slices of 50 to 100 ms, each stopped with all its processes while the other runs, so
that background work falls into its own job's slices (harness/time_slices.py). Time is counted by the parts of
a step that ran completely within a slice (harness/slice_statistics.py). A pair is about two seconds of each
job, and its figure is the ratio of their slowness; a comparison's figure is the median over pairs of several
launches. ``mean`` is the mean over pairs, and ``cpu`` the ratio of CPU time per step of all processes, which
includes work on cores that training does not use. All are compared with

    off      no sinks, not even files, no ledger, probe, sampler, replicas, watchdog

on one rank of DeepSpeed on two cores, since nodes that train have spare cores:

    on       the defaults: ledger, sampler, W&B offline, JSONL, console, alerts, watchdog, replicas
    flood    on, and 2,000 more metrics per step, as from 16 nodes
    same     off: the control that must show no difference
    asleep   off, and 2% of each step asleep: the control that must show a difference

and on two ranks of ZeRO 3, one per core, where monitoring competes with training (no bound is checked):

    crowded  on

Results go to benchmarks/results/monitoring.json. Exit code 1: a bound is exceeded, or a control fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness.environment import describe_machine, package_versions
from harness.slice_statistics import (
    Floats,
    complete_parts,
    mean_seconds_by_position,
    median_over_launches,
    ratios,
)
from harness.time_slices import SlicedJob, take_slices
from harness.torchrun_job import ON_CPU, ROOT

RESULTS = ROOT / "benchmarks" / "results" / "monitoring.json"
STEP_SECONDS = 0.2  # minimum
SLICES_A_PAIR = 25  # per job, 2 s: every pair contains what happens once per second
ENDLESS = 1_000_000  # steps: jobs are stopped after the measurement
BOUND = 1.01
ASLEEP = 0.02
NODES, METRICS = 16, 2000
SETTLE_SECONDS = 10.0  # W&B starts during the first steps, on the cores of training
# Without these, malloc maps and unmaps each large tensor, which takes half of a step: mallopt(3).
KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
MODEL = (
    "model.hidden_size=256",
    "model.intermediate_size=704",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.tie_word_embeddings=true",
    "train.micro_batch=2",
    "train.sequence_length=128",
    "optim.lr=1e-3",
    "schedule=constant",
    "checkpoint.every=never",
    "checkpoint.at_end=false",
    "eval.every=0",
    "debug.threads=1",
)
# ZeRO 3 has the most collectives per step, and each is timed.
RANKS = {
    1: ("engine=deepspeed", "zero=stage1", "train.global_batch=6"),
    2: ("engine=deepspeed", "zero=stage3", "train.global_batch=8"),
}
OFF = (
    "monitor.wandb=disabled",
    "monitor.ledger=false",
    "monitor.probe=false",
    "monitor.system_seconds=0",
    "monitor.replicas_every=0",
    "monitor.hang_seconds=0",
)
ON = ("monitor.wandb=offline", "monitor.every=10")
NOTHING = {"overrides": OFF, "without_sinks": True}


def run_launch(
    name: str, spec: Mapping[str, Any], ranks: int, pairs: int, number: int
) -> tuple[Floats, dict[str, Any]]:
    """Run both jobs once, from start to end. The order of starting alternates.

    Returns:
        The figure of each pair, and other facts about the launch.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
        jobs = {}
        for side, its in sorted({"off": NOTHING, name: spec}.items(), reverse=number % 2 == 1):
            overrides = [
                *MODEL,
                *RANKS[ranks],
                *its["overrides"],
                f"train.steps={ENDLESS}",
                f"run.dir={Path(folder, 'runs', side)}",
                f"data.path={ROOT / 'data' / 'stdlib'}",
            ]
            job = SlicedJob(
                side,
                "toolkit_in_slices.py",
                {**its, "overrides": overrides},
                Path(folder),
                ranks=ranks,
                environ={**ON_CPU, **KEEPS_MEMORY},
            )
            jobs[side] = alive.enter_context(job)
        off, other = jobs["off"], jobs[name]
        for job in jobs.values():
            job.wait_for_a_step()
        time.sleep(SETTLE_SECONDS)
        for job in jobs.values():
            job.stop()
        before = {side: (job.cpu_seconds(), len(job.marks())) for side, job in jobs.items()}
        slices = pairs * SLICES_A_PAIR
        take_slices([off, other], slices, seed=number)
        marks = {side: job.marks() for side, job in jobs.items()}
        cpu = {
            side: (job.cpu_seconds() - before[side][0]) / (len(marks[side]) - before[side][1])
            for side, job in jobs.items()
        }
        parts = {side: complete_parts(marks[side], job.slices) for side, job in jobs.items()}
    usual = {side: mean_seconds_by_position(parts[side], marks["off"].shape[1]) for side in parts}
    return ratios(parts[name], parts["off"], usual["off"], slices, SLICES_A_PAIR), {
        "cpu": cpu[name] / cpu["off"],
        "step_seconds": {side: float(seconds.sum()) for side, seconds in usual.items()},
    }


def summarise(launches: Sequence[Floats]) -> dict[str, Any]:
    """Summarise ``launches``, the figures of the pairs of each launch."""
    ratio, lower, upper = median_over_launches(launches)
    return {
        "launches": len(launches),
        "pairs": sum(map(len, launches)),
        "ratio": ratio,
        "lower_95": lower,
        "upper_95": upper,
        "mean": float(np.concatenate(list(launches)).mean()),
    }


def run_comparison(
    name: str, spec: Mapping[str, Any], ranks: int, launches: int, pairs: int
) -> dict[str, Any]:
    """Run one comparison. ``spec`` is for ``toolkit_in_slices.py``; ``pairs`` counts pairs per launch."""
    figures, facts = zip(
        *(run_launch(name, spec, ranks, pairs, number) for number in range(launches)), strict=True
    )
    row = {
        "ranks": ranks,
        **summarise(figures),
        "cpu": float(np.mean([its["cpu"] for its in facts])),
        "step_seconds": {
            side: float(np.median([its["step_seconds"][side] for its in facts]))
            for side in facts[0]["step_seconds"]
        },
    }
    print(
        f"{name:>7} over off on {ranks} rank{'s' if ranks > 1 else ''}: {row['ratio']:.4f} "
        f"[{row['lower_95']:.4f}, {row['upper_95']:.4f}], mean {row['mean']:.4f}, CPU time {row['cpu']:.4f}; "
        f"{row['step_seconds']['off'] * 1e3:.0f} ms a step",
        flush=True,
    )
    return row


def find_problems(comparisons: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return every bound that is exceeded and every control that fails."""
    problems = [
        f"{name}: upper bound {row['upper_95']:.4f}, allowed {BOUND}"
        + ("; the figure itself keeps it: use more --launches" if row["ratio"] < BOUND else "")
        for name, row in comparisons.items()
        if name in ("on", "flood") and row["upper_95"] >= BOUND
    ]
    same, asleep = comparisons["same"], comparisons["asleep"]
    if abs(same["ratio"] - 1) >= (BOUND - 1) / 2:
        problems.append(f"two jobs that do the same differ: {same['ratio']:.4f}")
    if asleep["lower_95"] <= 1.0 or asleep["upper_95"] < BOUND:
        problems.append(
            f"the control of {ASLEEP:.0%} does not show: [{asleep['lower_95']:.4f}, {asleep['upper_95']:.4f}]"
        )
    return problems + [
        f"{name}: a step of {row['step_seconds']['off']:.3f} s, needed {STEP_SECONDS}"
        for name, row in comparisons.items()
        if row["step_seconds"]["off"] < STEP_SECONDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--launches",
        type=int,
        default=8,
        help="launches of both jobs per comparison; half as many for controls and two ranks",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=16,
        help="pairs per launch, about 4 s each; at least 30 in total for figures to report",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # otherwise stopped processes remain
    from toolkit.data.tokens.stdlib import ensure_stdlib

    ensure_stdlib(str(ROOT / "data" / "stdlib"), 4096)
    machine = describe_machine()
    on = {"overrides": ON}
    half = (given.launches + 1) // 2
    comparisons = {
        name: run_comparison(name, spec, ranks, launches, given.pairs)
        for name, spec, ranks, launches in (
            ("same", NOTHING, 1, half),
            ("on", on, 1, given.launches),
            ("flood", {**on, "nodes": NODES, "metrics": METRICS}, 1, given.launches),
            ("asleep", {**NOTHING, "sleep_share": ASLEEP}, 1, half),
            ("crowded", on, 2, half),
        )
    }
    problems = find_problems(comparisons)
    versions = package_versions("torch", "deepspeed", "wandb")
    result = {"machine": machine, "versions": versions, "over_off": comparisons, "mistakes": problems}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in problems:
        print(line)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
