"""benchmarks/monitoring.py tells what costs 1% from what does not, on a machine whose speed changes, and counts all processes of a job.

pytest tests/monitor/test_overhead_benchmark.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SLICES, SLICES_A_PAIR = 250, 25
LONG = 0  # the place of a part that many slices cut

Floats = npt.NDArray[np.float64]
Slices = list[tuple[float, float]]


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import monitoring
        from sides import marks, slices, slowness

        yield SimpleNamespace(monitoring=monitoring, marks=marks, slices=slices, slowness=slowness)


def parts_of_a_step() -> Floats:
    """Seconds on a machine at full speed."""
    parts = np.random.default_rng(3).uniform(0.001, 0.015, 30)
    parts[LONG] = 0.03
    return parts


def two_jobs(ours: Floats, theirs: Floats, seed: int) -> tuple[tuple[Floats, Slices], tuple[Floats, Slices]]:
    """Marks and slices of both, whose steps have these parts, on a machine that for half of the time, in bursts of some 200 ms, takes 1.25
    times as long for everything."""
    draw = np.random.default_rng(seed)
    lengths = np.repeat(draw.integers(50, 110, SLICES), 2)  # milliseconds, one of each job
    owner = np.repeat(np.tile([0, 1], SLICES), lengths)
    slow = np.cumsum(draw.random(len(owner)) < 0.005) % 2
    ends = np.cumsum(lengths) / 1000
    wall = np.arange(len(owner) + 1) / 1000

    def job(parts: Floats, number: int) -> tuple[Floats, Slices]:
        done = (
            np.concatenate([[0], np.cumsum((owner == number) / (1 + 0.25 * slow))]) / 1000
        )  # seconds' worth of work
        steps = int(done[-1] / parts.sum())
        marks = np.interp(np.cumsum(np.tile(parts, steps)), done, wall).reshape(steps, -1)
        return marks, [
            (end - length / 1000, end)
            for end, length in zip(ends[number::2], lengths[number::2], strict=True)
        ]

    return job(ours, 0), job(theirs, 1)


def figures(bench: SimpleNamespace, ours: Floats, theirs: Floats, seed: int, weighted: bool = True) -> Floats:
    parts = [bench.slowness.whole_parts(*job) for job in two_jobs(ours, theirs, seed)]
    if not weighted:
        parts = [replace(each, weights=np.ones_like(each.weights)) for each in parts]
    usual = bench.slowness.usual_seconds(parts[1], len(theirs))
    found: Floats = bench.slowness.ratios(*parts, usual, SLICES, SLICES_A_PAIR)
    return found


@pytest.mark.parametrize("cost", [0.0, 0.005, 0.02])
def test_bounds_hold_what_it_costs(bench: SimpleNamespace, cost: float) -> None:
    theirs = parts_of_a_step()
    ours = theirs + np.eye(len(theirs))[-1] * cost * theirs.sum()  # all of it after the step
    row = bench.monitoring.summarise([figures(bench, ours, theirs, seed) for seed in range(8)])
    assert row["pairs"] == 8 * SLICES // SLICES_A_PAIR
    assert row["lower_95"] - 0.002 < 1 + cost < row["upper_95"] + 0.002
    assert row["upper_95"] - row["lower_95"] < 0.012
    assert cost < 0.01 or row["lower_95"] > 1.01


def test_what_long_parts_cost_counts_in_full(bench: SimpleNamespace) -> None:
    """They are seen whole less often, so that without weights much of it would be missed."""
    theirs = parts_of_a_step()
    ours = theirs * np.where(np.arange(len(theirs)) == LONG, 1.25, 1)
    cost = 0.25 * theirs[LONG] / theirs.sum()

    def seen(weighted: bool) -> float:
        return float(np.mean([figures(bench, ours, theirs, seed, weighted) for seed in range(8)])) - 1

    assert seen(weighted=True) == pytest.approx(cost, rel=0.2)
    assert seen(weighted=False) < 0.7 * cost


def test_only_whole_parts_count(bench: SimpleNamespace) -> None:
    marks = np.array([[0.010, 0.020], [0.030, 0.090], [0.120, 0.130]])
    parts = bench.slowness.whole_parts(marks, [(0.004, 0.05), (0.07, 0.115), (0.116, 0.15)])
    assert parts.places.tolist() == [
        1,
        0,
    ]  # neither what a stop cut, twice, nor what began within 5 ms of going on
    assert parts.slices.tolist() == [0, 0]
    assert parts.seconds == pytest.approx([0.01, 0.01])
    assert parts.weights == pytest.approx(1 / (0.041 + 0.04 + 0.029 - 3 * 0.01))
    with pytest.raises(SystemExit, match="1 of a step's 3 parts were never seen whole"):
        bench.slowness.usual_seconds(parts, 3)


def test_marks_of_whole_steps_are_read(bench: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "marks"
    marker = bench.marks.StepMarker(file)
    for _ in range(3):
        marker.mark()
        marker.end_step()
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    assert bench.marks.read_marks(file).shape == (2, 2)
    file.write_bytes(whole)
    found = bench.marks.read_marks(file)
    assert found.shape == (3, 2)
    assert (np.diff(found.ravel()) > 0).all()
    with pytest.raises(RuntimeError, match="a step of 1 marks after one of 2"):
        marker.end_step()


def found(
    bench: SimpleNamespace,
    *,
    on: float = 1.001,
    flood: float = 1.001,
    same: float = 1.0,
    asleep: float = 1.02,
    bounds: float = 0.003,
    seconds: float = 0.25,
) -> dict[str, Any]:
    return {
        name: {
            "ratio": ratio,
            "lower_95": ratio - bounds,
            "upper_95": ratio + bounds,
            "step_seconds": {"off": seconds},
        }
        for name, ratio in {"on": on, "flood": flood, "same": same, "asleep": asleep}.items()
    }


def test_verdicts(bench: SimpleNamespace) -> None:
    mistakes = bench.monitoring.find_problems
    assert mistakes(found(bench)) == []
    for wrong, says in (
        (found(bench, on=1.02), "on: upper bound"),
        (found(bench, flood=1.02), "flood: upper bound"),
        (found(bench, asleep=1.0), "the control of 2% does not show"),
        (found(bench, same=1.006), "two jobs that do the same differ"),
    ):
        (told,) = mistakes(wrong)
        assert told.startswith(says)
        assert "use more" not in told
    (told,) = mistakes(found(bench, on=1.0085))
    assert told.endswith("use more --launches")
    assert len(mistakes(found(bench, seconds=0.1))) == 4


def test_a_job_is_all_its_processes(bench: SimpleNamespace) -> None:
    """A child that works, of a parent that waits for it."""
    spin = "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass\n"
    work = f"{spin}print('done', flush=True)\ntime.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        members = list(bench.slices.process_tree(parent.pid))
        used = sum(map(bench.slices.cpu_seconds, members))
        for process in members:
            os.kill(process, 9)
    assert members[0] == parent.pid
    assert len(members) == 2
    assert 0.2 <= used < 5
