"""The estimates of measured runs, from made-up run directories.

pytest tests/monitor/test_scaling_runs.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.cases import h100s, run_config
from toolkit.config.compose import to_yaml
from toolkit.config.schema import RunConfig
from toolkit.errors import InputError
from toolkit.estimate.plan_report import to_json
from toolkit.estimate.types import StepEstimate
from toolkit.goodput import AttemptTimes, write_times
from toolkit.monitor.measured_steps import WARM_UP_STEPS, read_measured_steps
from toolkit.monitor.scaling_runs import estimate_measured
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan


def write_run(folder: Path, config: RunConfig, ranks: int = 2, *, steps: int = 20, warm: int = 0) -> Path:
    """Write a run whose steps take 0.5 s, and 3 s for the first ``warm`` steps and the warm-up after them."""
    attempt = folder / "attempts" / "001"
    attempt.mkdir(parents=True)
    plan = make_plan(config, h100s(ranks, per_node=ranks))
    (attempt / "config.yaml").write_text(to_yaml(config))
    (attempt / "plan.json").write_text(json.dumps(to_json(plan)))
    (attempt / "environment.json").write_text(json.dumps({"environment": {"cores": 2}}))
    write_times(attempt, AttemptTimes(began=0.0, seen=60.0, first=0))
    rows = [
        {"step": step, "wall_seconds": 3.0 if step <= warm + WARM_UP_STEPS else 0.5, "parts": {}}
        for step in range(1, steps + 1)
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def constant(plan: RunPlan) -> StepEstimate:
    return StepEstimate(seconds=0.4, low=0.3, high=0.5, parts={"forward": 0.4})


def test_runs_are_compared_by_rising_ranks(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{ranks}", run_config(), ranks) for ranks in (4, 2)]
    found = estimate_measured(runs, run_config(train__global_batch=512), h100s(64), constant)
    assert [(one.name, one.ranks, one.seconds) for one in found] == [("r2", 2, 0.5), ("r4", 4, 0.5)]
    assert found[0].layout == "data 2, micro-batch 2 x 2"
    assert found[0].estimate.seconds == 0.4


def test_another_model_or_gpu_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", run_config())
    for config, world, key in (
        (run_config(model__num_hidden_layers=3), h100s(8), "model.num_hidden_layers"),
        (run_config(train__sequence_length=16), h100s(8), "train.sequence_length"),
        (run_config(), replace(h100s(8), gpu="a100-80gb"), "world.gpu"),
    ):
        with pytest.raises(InputError) as error:
            estimate_measured([run], config, world, constant)
        assert key in str(error.value)


def test_runs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", run_config())
    (other / "attempts" / "001" / "plan.json").write_text('{"world": {"ranks": 2}}')
    short = write_run(tmp_path / "short", run_config(), steps=WARM_UP_STEPS + 4)
    for folder in (tmp_path / "none", other, short):
        with pytest.raises(InputError) as error:
            estimate_measured([folder], run_config(), h100s(8), constant)
        assert str(folder) in str(error.value)


def test_steps_of_the_batch_ramp_are_not_measured(tmp_path: Path) -> None:
    config = run_config(
        train__batch_ramp__start=4, train__batch_ramp__increment=4, train__batch_ramp__samples=20
    )
    steps = read_measured_steps(write_run(tmp_path / "run", config, warm=5))  # five steps of four samples
    assert steps.seconds == 0.5
    assert steps.steps == 20 - 5 - WARM_UP_STEPS
