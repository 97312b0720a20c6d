"""Finished runs refine a calibration: once each, from the same hardware, without warm-up.

pytest tests/monitor/test_calibration_runs.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from toolkit import __version__
from toolkit.config.compose import compose, to_yaml
from toolkit.errors import InputError
from toolkit.estimate.calibrated_profile import scale_profile
from toolkit.estimate.calibration_file import read_calibration, write_calibration
from toolkit.estimate.plan_report import to_json
from toolkit.estimate.profile import load_profile, shipped_profile
from toolkit.estimate.step import estimate_step
from toolkit.goodput import AttemptTimes, write_times
from toolkit.monitor.calibration_runs import add_measured_runs, format_residuals
from toolkit.monitor.measured_steps import LEAST_STEPS, WARM_UP_STEPS, read_measured_steps
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

STEPS = 12
KEYS = (
    "+exp=quickstart",
    "model.hidden_size=8192",
    "model.intermediate_size=22016",
    "model.max_position_embeddings=4096",
    "train.sequence_length=4096",
    "train.micro_batch=1",
    "train.activation_checkpointing=full",
    "model.num_attention_heads=64",
    "model.num_key_value_heads=8",
    "precision=bf16",
)
SLOW_NETWORK = {"inside": 2.0}
TENSOR = ("engine=megatron", "zero=stage1", "parallel.tensor=4")


@cache
def plan_of(*words: str, gpu: str | None = "h100") -> RunPlan:
    device = Device.CPU if gpu is None else Device.CUDA
    world = World(ranks=8, ranks_per_node=8, device=device, gpu=gpu, has_nvcc=True, has_compiler=True)
    return make_plan(compose((*KEYS, *words)), world)


def write_run(
    folder: Path,
    plan: RunPlan,
    *,
    truth: Mapping[str, float] = SLOW_NETWORK,
    steps: int = STEPS,
    toolkit: str = __version__,
    cores: int = 96,
    change: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write a run on a machine that differs from the shipped profile by ``truth``.

    Args:
        change: fields of the ledger's rows by step.
    """
    profile = load_profile(plan.config.cluster, plan.world)
    assert profile is not None
    made = estimate_step(plan, scale_profile(profile, truth))
    assert made is not None
    attempt = folder / "attempts/001"
    attempt.mkdir(parents=True)
    (attempt / "config.yaml").write_text(to_yaml(plan.config))
    (attempt / "plan.json").write_text(json.dumps(to_json(plan)))
    environment = {"toolkit": toolkit, "cores": cores}
    (attempt / "environment.json").write_text(json.dumps({"environment": environment}))
    write_times(attempt, AttemptTimes(began=1e9 + len(folder.name), seen=1e9 + 100, first=0, step=steps))
    rows = []
    for step in range(1, steps + 1):
        slow = 10.0 if step <= WARM_UP_STEPS else 1.0
        parts = {name: [slow * seconds] * 3 for name, seconds in made.parts.items()}
        rows.append({"step": step, "wall_seconds": slow * made.seconds, "parts": parts})
        rows[-1] |= (change or {}).get(step, {})
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    layouts = {"zero1": ("zero=stage1",), "zero3": ("zero=stage3",), "tensor": TENSOR}
    return [write_run(tmp_path / name, plan_of(*words)) for name, words in layouts.items()]


def test_slow_network_is_found_and_used(runs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    calibration, residuals = add_measured_runs(file, runs)
    write_calibration(file, calibration)
    assert calibration.factors["inside"] == pytest.approx(2.0, rel=0.05)
    calibrated = plan_of("zero=stage1", f"cluster.calibration={file}")
    profile = load_profile(calibrated.config.cluster, calibrated.world)
    assert profile is not None
    assert profile.inside_factor == pytest.approx(shipped_profile("h100").inside_factor / 2, rel=0.05)
    text = format_residuals(calibration, residuals)
    assert "links within a node" in text
    assert "zero3" in text
    assert "communication/data" in text


def test_adding_a_run_again_changes_nothing(runs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    write_calibration(file, add_measured_runs(file, runs)[0])
    before = file.read_text()
    write_calibration(file, add_measured_runs(file, [runs[1], runs[1]])[0])
    assert file.read_text() == before
    assert len(read_calibration(file).runs) == len(runs)


def test_order_of_runs_does_not_matter(runs: list[Path], tmp_path: Path) -> None:
    together = add_measured_runs(tmp_path / "a.json", runs)[0]
    for run in reversed(runs):
        one_by_one = add_measured_runs(tmp_path / "b.json", [run])[0]
        write_calibration(tmp_path / "b.json", one_by_one)
    assert one_by_one.factors == pytest.approx(together.factors, rel=1e-6)


def test_run_of_other_hardware_is_refused(runs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    write_calibration(file, add_measured_runs(file, runs)[0])
    other = write_run(tmp_path / "other", plan_of(gpu="a100-80gb"))
    with pytest.raises(InputError, match=r"calibration of h100; this is a100-80gb"):
        add_measured_runs(file, [other])
    with pytest.raises(InputError, match=r"here h100"):
        add_measured_runs(tmp_path / "new.json", [runs[0], other])


def test_runs_on_cpus_with_other_cores_are_refused(tmp_path: Path) -> None:
    plan = plan_of("precision=fp32", gpu=None)
    first, second = (write_run(tmp_path / f"run-{cores}", plan, cores=cores) for cores in (8, 16))
    with pytest.raises(InputError, match=r"cpu with 16 cores"):
        add_measured_runs(tmp_path / "new.json", [first, second])


def test_run_of_another_version_is_marked(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", plan_of(), toolkit="0.0.9")
    new = write_run(tmp_path / "new", plan_of("zero=stage3"))
    text = format_residuals(*add_measured_runs(tmp_path / "c.json", [old, new]))
    assert "old (toolkit 0.0.9)" in text
    assert "new (toolkit" not in text


def test_warm_up_saves_and_disturbed_steps_do_not_count(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", plan_of())
    expected = read_measured_steps(plain)
    assert expected.steps == STEPS - WARM_UP_STEPS
    rows = [json.loads(line) for line in (plain / "ledger.jsonl").read_text().splitlines()]
    calm = rows[-1]
    saved = {
        **calm,
        "wall_seconds": calm["wall_seconds"] + 9,
        "parts": {**calm["parts"], "checkpoint": [9] * 3},
    }
    late = {
        **calm,
        "wall_seconds": 5 * calm["wall_seconds"],
        "delays": {"starved": [calm["wall_seconds"], 0]},
    }
    changed = write_run(tmp_path / "changed", plan_of(), change={5: saved, 6: saved, 8: late, 9: late})
    found = read_measured_steps(changed)
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.parts == pytest.approx(expected.parts)
    assert found.steps == expected.steps - 2


def test_steps_of_the_batch_ramp_do_not_count(tmp_path: Path) -> None:
    ramp = ("train.batch_ramp.start=8", "train.batch_ramp.increment=8", "train.batch_ramp.samples=40")
    plan = plan_of(*ramp)
    full = plan.batch.stages[-1].first_step
    assert full > 0
    run = write_run(tmp_path / "run", plan, steps=STEPS + full)
    assert read_measured_steps(run).steps == STEPS - WARM_UP_STEPS


def test_busy_machine_is_subtracted(tmp_path: Path) -> None:
    """Every step waits half of its time for a core; control: a rank that waits a hundredth of it."""
    plan = plan_of()
    quiet = read_measured_steps(write_run(tmp_path / "quiet", plan))
    for share, expected in ((0.5, quiet.seconds), (0.01, 2 * quiet.seconds)):
        wall = 2 * quiet.seconds
        late = {
            "wall_seconds": wall,
            "parts": {name: [2 * seconds] * 3 for name, seconds in quiet.parts.items()},
            "delays": {"starved": [share * wall, 0]},
        }
        changes = dict.fromkeys(range(1, STEPS + 1), late)
        found = read_measured_steps(write_run(tmp_path / f"busy-{share}", plan, change=changes))
        assert found.seconds == pytest.approx(expected)
        assert sum(found.parts.values()) == pytest.approx(expected)


def test_steps_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan_of(), steps=20)
    times = AttemptTimes(began=2e9, seen=2e9, first=10, step=20)
    second = run / "attempts/002"
    second.mkdir()
    for name in ("config.yaml", "plan.json", "environment.json"):
        (second / name).write_text((run / "attempts/001" / name).read_text())
    before = read_measured_steps(replace_attempts(run, keep="001"))
    write_times(second, times)
    assert read_measured_steps(run).steps == 20 - 10 - WARM_UP_STEPS
    assert before.id != read_measured_steps(run).id


def replace_attempts(run: Path, *, keep: str) -> Path:
    """Return a copy of the run with one attempt."""
    copy = run.parent / "copy"
    copy.mkdir()
    (copy / "ledger.jsonl").write_text((run / "ledger.jsonl").read_text())
    target = copy / "attempts" / keep
    target.mkdir(parents=True)
    for file in (run / "attempts" / keep).iterdir():
        (target / file.name).write_text(file.read_text())
    return copy


@pytest.mark.parametrize(
    ("absent", "seen"),
    [
        ("ledger.jsonl", "0 steps in ledger.jsonl"),
        ("attempts/001/plan.json", "plan.json: No such file"),
        ("attempts/001/times.json", "did not begin to train"),
    ],
)
def test_incomplete_run_is_refused(tmp_path: Path, absent: str, seen: str) -> None:
    run = write_run(tmp_path / "run", plan_of())
    (run / absent).unlink()
    with pytest.raises(InputError, match=seen):
        add_measured_runs(tmp_path / "c.json", [run])


def test_short_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan_of(), steps=WARM_UP_STEPS + LEAST_STEPS - 1)
    with pytest.raises(InputError, match=rf"{LEAST_STEPS - 1} steps in ledger.jsonl"):
        add_measured_runs(tmp_path / "c.json", [run])


def test_run_that_this_version_cannot_plan_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plan_of())
    config = run / "attempts/001/config.yaml"
    config.write_text(config.read_text().replace("hidden_size: 8192", "hidden_size: 8191"))
    with pytest.raises(InputError, match="cannot plan it"):
        add_measured_runs(tmp_path / "c.json", [run])


def test_measured_parts_are_those_of_the_median_step(tmp_path: Path) -> None:
    plan = plan_of("zero=stage3")
    found = read_measured_steps(write_run(tmp_path / "run", plan, truth={}))
    made = estimate_step(plan, shipped_profile("h100"))
    assert made is not None
    assert found.seconds == pytest.approx(made.seconds)
    assert found.parts == pytest.approx(dict(made.parts))
    assert replace(found, parts={}) != found
