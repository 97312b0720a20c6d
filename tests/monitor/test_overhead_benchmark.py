"""benchmarks/monitoring.py tells what costs 1% from what does not, and stops and counts all processes of a job.

    pytest tests/monitor/test_overhead_benchmark.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark_module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import monitoring

        yield monitoring


def turns(cost: float, noise: float = 0.01, pairs: int = 36) -> tuple[np.ndarray, np.ndarray]:
    """Seconds a step of both sides: a machine that drifts, and one turn in ten that something else disturbs."""
    random = np.random.default_rng(1)
    drift = 0.25 * (1 + 0.1 * np.sin(np.arange(pairs)))
    ours, theirs = (drift * random.normal(1, noise, pairs) * np.where(random.random(pairs) < 0.1, 1.5, 1.0) for _ in range(2))
    return ours * (1 + cost), theirs


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1])
def test_bounds_hold_what_it_costs(benchmark_module: ModuleType, cost: float) -> None:
    row = benchmark_module.against(*turns(cost))
    assert row["lower_95"] <= row["ratio"] <= row["upper_95"]
    assert row["lower_95"] - 0.002 < 1 + cost < row["upper_95"] + 0.002
    assert row["upper_95"] - row["lower_95"] < 0.02


def found(benchmark_module: ModuleType, on: float, asleep: float, flood: float, seconds: float = 0.25) -> dict[str, Any]:
    costs = {"on": on, "asleep": asleep, "flood": flood}
    return {name: {**benchmark_module.against(*turns(cost, noise=0.005)), "step_seconds": {"off": seconds}} for name, cost in costs.items()}


def test_verdicts(benchmark_module: ModuleType) -> None:
    assert benchmark_module.mistakes(found(benchmark_module, 0.001, 0.02, 0.001)) == []
    for wrong, says in (
        (found(benchmark_module, 0.02, 0.02, 0.0), "on: upper bound"), (found(benchmark_module, 0.0, 0.02, 0.02), "flood: upper bound"),
        (found(benchmark_module, 0.0, 0.0, 0.0), "the control of 2% does not show"),
    ):
        (told,) = benchmark_module.mistakes(wrong)
        assert told.startswith(says)
        assert "would tell" not in told
    (told,) = benchmark_module.mistakes(found(benchmark_module, 0.0085, 0.02, 0.0))
    assert told.endswith("more --pairs or a quieter machine would tell")
    assert len(benchmark_module.mistakes(found(benchmark_module, 0.0, 0.02, 0.0, seconds=0.1))) == 3


def test_a_job_is_all_its_processes(benchmark_module: ModuleType) -> None:
    """A child that works, of a parent that waits for it."""
    spin = "import time\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass\n"
    work = f"{spin}print('done', flush=True)\ntime.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"done\n"
        members = list(benchmark_module.family(parent.pid))
        used = sum(map(benchmark_module.cpu_seconds, members))
        for process in members:
            os.kill(process, 9)
    assert members[0] == parent.pid
    assert len(members) == 2
    assert 0.2 <= used < 5
