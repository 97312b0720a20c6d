"""Measure what standbys and snapshots in memory cost a run without failures.

    python benchmarks/snapshot_overhead.py                    about five minutes on two idle cores
    python benchmarks/snapshot_overhead.py --snapshots 4      a quick try

The model of restart.py (11 M parameters, ZeRO 1, two ranks on two cores) trains under plain ``python`` with
standbys and a snapshot every ``SNAPSHOT_EVERY`` steps. Steps vary by several per cent from minute to minute,
so a run with snapshots is not compared with another one without them. Each snapshot is compared with the
later steps until the next one: the copy delays the step after it, and the hashes and the writing share the
cores with a few more. Reported are

    snapshot      the seconds that a snapshot adds to the ``AFFECTED_STEPS`` steps from its own on
    control       the same for as many steps halfway between two snapshots; it must not differ from 0
    supervision   the share of the cores that the parent process and the standbys use
    overhead      the snapshots' share of the time, plus supervision

with standard errors over the snapshots. Results go to benchmarks/results/snapshot_overhead.json. Exit code 1:
the overhead is not below ``BOUND``, or the control differs from 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import psutil
from harness.environment import describe_machine, package_versions
from harness.running_training import RANKS, ROOT, RunningTraining, StepMoment

RESULTS = ROOT / "benchmarks" / "results" / "snapshot_overhead.json"
SNAPSHOT_EVERY = 40  # steps, about 15 s
AFFECTED_STEPS = 6
WARM_UP_STEPS = 12
BOUND = 0.01


def added_seconds(moments: Sequence[StepMoment], every: int, *, offset: int = 0) -> list[float]:
    """Return the seconds that each snapshot adds to the steps from its own on.

    The usual duration of a step is the mean of the other steps until the next snapshot.

    Args:
        moments: of one attempt. Its snapshots follow the steps that ``every`` divides.
        offset: count the steps that come so much later instead, as a control.
    """
    took = {after.step: after.time - before.time for before, after in pairwise(moments)}
    found = []
    for snapshot in sorted(step for step in took if step % every == 0):
        window = range(snapshot, snapshot + every)
        if any(step not in took for step in window):
            continue
        counted = range(snapshot + offset, snapshot + offset + AFFECTED_STEPS)
        usual = [took[step] for step in window if step not in counted and step >= snapshot + AFFECTED_STEPS]
        found.append(sum(took[step] - statistics.mean(usual) for step in counted))
    return found


def summarize(seconds: Sequence[float]) -> dict[str, Any]:
    error = statistics.stdev(seconds) / sqrt(len(seconds))
    return {"seconds": statistics.mean(seconds), "standard_error": error, "each": list(seconds)}


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(snapshots: int, data: str) -> dict[str, Any]:
    """Train until so many snapshots have been taken."""
    keys = (
        f"cluster.standbys={RANKS}",
        f"checkpoint.memory_every={SNAPSHOT_EVERY}",
        "checkpoint.every=never",
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningTraining("memory", keys, data, Path(folder), standbys=RANKS) as training,
    ):
        training.wait_until("stepping", partial(training.has_steps, WARM_UP_STEPS))
        training.wait_until("with standbys", training.standbys_are_ready, poll_seconds=0.5)
        ranks = {process.pid for process in training.ranks().values()}
        others = [process for process in training.processes() if process.pid not in ranks]
        before, began, first = cpu_seconds(others), time.monotonic(), len(training.moments())
        for _ in range(snapshots + 1):  # ``wait_until`` limits each of these waits
            count = len(training.moments()) + SNAPSHOT_EVERY
            training.wait_until("stepping", partial(training.has_steps, count), poll_seconds=0.5)
        used, wall = cpu_seconds(others) - before, time.monotonic() - began
        moments = training.moments()[first:]
    step = statistics.mean(after.time - before.time for before, after in pairwise(moments))
    snapshot = summarize(added_seconds(moments, SNAPSHOT_EVERY))
    control = summarize(added_seconds(moments, SNAPSHOT_EVERY, offset=SNAPSHOT_EVERY // 2))
    supervision = used / wall / len(os.sched_getaffinity(0))
    interval = SNAPSHOT_EVERY * step
    return {
        "snapshots": snapshots,
        "step_seconds": step,
        "interval_seconds": interval,
        "snapshot": snapshot,
        "control": control,
        "supervision": supervision,
        "overhead": snapshot["seconds"] / interval + supervision,
        "standard_error": snapshot["standard_error"] / interval,
    }


def find_problems(row: dict[str, Any]) -> list[str]:
    problems = []
    if row["overhead"] >= BOUND:
        problems.append(f"an overhead of {row['overhead']:.2%}, and {BOUND:.0%} is allowed")
    control = row["control"]
    if abs(control["seconds"]) > 3 * control["standard_error"]:
        problems.append(f"the control differs from 0: {control['seconds']:.3f} s")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--snapshots", type=int, default=15)
    parser.add_argument(
        "--data", default=str(ROOT / "data" / "stdlib"), help="folder of the embedded text, created if absent"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.snapshots < 2:
        parser.error("--snapshots is at least 2")
    row = measure(given.snapshots, given.data)
    problems = find_problems(row)
    versions = package_versions("torch", "deepspeed")
    result = {"machine": describe_machine(), "versions": versions, **row, "problems": problems}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"a snapshot adds {row['snapshot']['seconds']:.3f} s (standard error "
        f"{row['snapshot']['standard_error']:.3f}, control {row['control']['seconds']:+.3f}); one every "
        f"{row['interval_seconds']:.1f} s and supervision cost {row['overhead']:.2%}"
    )
    for line in problems:
        print(line)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
