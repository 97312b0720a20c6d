"""Speed, utilisation, time left and cost, by hand-made steps.

pytest tests/monitor/test_throughput.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit import rows as rows_of_files
from toolkit.config.schema import BatchRampConfig, Precision
from toolkit.monitor.throughput import Course, Spent, Throughput, spent
from toolkit.plan import make_plan
from toolkit.plan.flops import hardware_flops, model_flops, why_no_utilisation
from toolkit.plan.types import RunPlan, World
from toolkit.rows import last_row

BF16 = {"precision__name": Precision.bf16, "zero__stage": 1}
COMPUTED = 8 * 32  # tokens of a step of run_config()
NOTHING = Spent()


def planned(world: World, **changes: object) -> RunPlan:
    return make_plan(run_config(**changes), world)


def row(plan: RunPlan, seconds: float = 0.5, units: int = COMPUTED) -> dict[str, float]:
    return Throughput.of(plan).row(samples=8, units=units, computed=COMPUTED, seconds=seconds)


# ---- speed


def test_a_step_on_known_gpus() -> None:
    plan = planned(h100s(4), **BF16)
    flops = model_flops(plan)
    assert flops is not None
    assert row(plan, units=200) == pytest.approx(
        {
            "tokens_per_second": 400.0,
            "samples_per_second": 16.0,
            "tokens_per_second_per_gpu": 100.0,
            "model_tflops_per_gpu": flops * COMPUTED / 0.5 / 4 / 1e12,
            "mfu": flops * COMPUTED / 0.5 / 4 / 989.4e12,
        },
        rel=1e-12,
    )


def test_masked_tokens_are_no_speed_and_yet_computed() -> None:
    plan = planned(h100s(4), **BF16)
    half, full = row(plan, units=COMPUTED // 2), row(plan)
    assert half["tokens_per_second"] == full["tokens_per_second"] / 2
    assert half["mfu"] == full["mfu"]


def test_what_is_recomputed_has_its_own_figures() -> None:
    plan = planned(h100s(4), **BF16, train__activation_checkpointing=True)
    done, counts = hardware_flops(plan), model_flops(plan)
    assert done is not None
    assert counts is not None
    found = row(plan)
    assert found["hfu"] / found["mfu"] == pytest.approx(done / counts, rel=1e-12)
    assert found["hfu"] > 1.1 * found["mfu"]
    assert found["hardware_tflops_per_gpu"] / found["model_tflops_per_gpu"] == pytest.approx(
        done / counts, rel=1e-12
    )


@pytest.mark.parametrize(
    ("world", "changes", "keys", "reason"),
    [
        (replace(h100s(4), gpu=None), BF16, {"model_tflops_per_gpu"}, "devices.py"),
        (h100s(4), {}, {"model_tflops_per_gpu"}, "precision=fp32"),
        (h100s(4), {**BF16, "model__family": None, "model__target": "my.Model"}, set(), "model.target"),
    ],
)
def test_without_a_peak_or_a_formula_there_is_no_utilisation(
    world: World, changes: dict[str, object], keys: set[str], reason: str
) -> None:
    plan = planned(world, **changes)
    assert row(plan).keys() == {"tokens_per_second", "samples_per_second", "tokens_per_second_per_gpu"} | keys
    assert reason in (why_no_utilisation(plan) or "")


def test_on_cpus_nothing_is_told_per_gpu() -> None:
    assert row(planned(CPU)) == {"tokens_per_second": 512.0, "samples_per_second": 16.0}


# ---- time and cost


def driven(
    plan: RunPlan, steps: Sequence[tuple[float, float]], before: Spent = NOTHING, first: int = 1
) -> list[dict[str, float]]:
    """Rows of steps of (seconds, seconds until the next one begins), the first of which begins 7 seconds after the attempt."""
    course, now, found = Course(plan, before, 100.0), 107.0, []
    for number, (seconds, between) in enumerate(steps):
        now += seconds
        found.append(course.row(step=first + number, seconds=seconds, now=now))
        now += between
    return found


def test_time_and_cost_add_up_over_attempts() -> None:
    plan = planned(h100s(4), **BF16, monitor__price_per_gpu_hour=2.5)
    rows = driven(plan, [(3.0, 0.0), (1.0, 5.0), (1.0, 0.0)], Spent(seconds=1000.0, gpu_hours=2.0), first=11)
    assert [found["elapsed_seconds"] for found in rows] == [1010.0, 1011.0, 1017.0]
    assert rows[2]["gpu_hours"] == pytest.approx(2.0 + 17.0 * 4 / 3600, rel=1e-12)
    assert rows[2]["cost"] == pytest.approx(2.5 * rows[2]["gpu_hours"], rel=1e-12)
    assert "cost" not in driven(planned(h100s(4), **BF16), [(1.0, 0.0)])[0]
    assert driven(planned(CPU), [(1.0, 0.0)])[0] == {"elapsed_seconds": 8.0}


def test_the_time_left_leaves_out_the_first_step_and_has_evaluations_in_it() -> None:
    """100 steps of 2 s, 30 s after each tenth: at step 50, 50 steps and 5 evaluations are to come."""
    steps = [(90.0, 0.0), *((2.0, 30.0 if number % 10 == 0 else 0.0) for number in range(2, 101))]
    rows = driven(planned(CPU), steps)
    assert "eta_seconds" not in rows[0]
    assert rows[1]["eta_seconds"] == pytest.approx(98 * 2.0)
    left = sum(seconds + between for seconds, between in steps[50:])
    assert rows[49]["eta_seconds"] == pytest.approx(left, rel=0.15)
    assert rows[99]["eta_seconds"] == 0
    control = [(seconds, 0.0) for seconds, _ in steps]
    assert driven(planned(CPU), control)[49]["eta_seconds"] == pytest.approx(50 * 2.0)


def test_a_hiccup_does_not_move_the_time_left_and_a_change_of_pace_does() -> None:
    plan = planned(CPU, train__steps=1000)
    even = driven(plan, [(2.0, 0.0)] * 50)[-1]["eta_seconds"]
    assert even == pytest.approx(950 * 2.0)
    assert driven(plan, [(2.0, 0.0)] * 40 + [(600.0, 0.0)] + [(2.0, 0.0)] * 9)[-1][
        "eta_seconds"
    ] == pytest.approx(even)
    assert driven(plan, [(2.0, 0.0)] * 100 + [(4.0, 0.0)] * 150)[-1]["eta_seconds"] == pytest.approx(
        750 * 4.0
    )
    every_fifth = driven(plan, [(6.0 if number % 5 == 0 else 2.0, 0.0) for number in range(101)])[-1][
        "eta_seconds"
    ]
    assert every_fifth == pytest.approx(
        899 * 2.8, rel=0.06
    )  # what recurs is no hiccup: the median would say 2.0


def test_steps_to_come_may_be_larger() -> None:
    """The batch grows from 2 to 8 sequences: time goes by samples."""
    plan = planned(
        CPU,
        train__micro_batch=1,
        train__batch_ramp=BatchRampConfig(start=2, increment=2, samples=120),
        train__steps=100,
    )
    sizes = [plan.batch.at(step).size for step in range(100)]
    assert sizes[0] == 2
    assert sizes[-1] == 8
    rows = driven(plan, [(size / 2, 0.0) for size in sizes[:10]])
    assert rows[-1]["eta_seconds"] == pytest.approx(sum(sizes[10:]) / 2)


def test_a_run_of_months_is_reckoned_in_bounded_memory() -> None:
    course = Course(planned(CPU, train__steps=20_000), Spent(), 0.0)
    for step in range(1, 20_001):
        course.row(step=step, seconds=1.0, now=float(step))
    assert len(course._recent) == 100


def test_people_are_told_at_the_end() -> None:
    course = Course(
        planned(h100s(8), **BF16, train__micro_batch=1, monitor__price_per_gpu_hour=2.0), Spent(), 50.0
    )
    assert course.words(50.0 + 1800.0) == "30:00, 4 GPU-hours, cost 8.00 at 2 each"
    later = Course(
        planned(h100s(8), **BF16, train__micro_batch=1), Spent(seconds=36000.0, gpu_hours=1234.0), 0.0
    )
    assert later.words(3600.0) == "11:00:00 over all attempts, 1,242 GPU-hours"
    assert Course(planned(CPU), Spent(), 0.0).words(61.0) == "1:01"


# ---- earlier attempts


def test_what_was_spent_is_in_the_last_rows_of_what_stands_and_of_what_was_run_again() -> None:
    stands, again = {"elapsed_seconds": 60.0, "gpu_hours": 0.5}, {"elapsed_seconds": 90.0, "gpu_hours": 0.75}
    assert spent([stands, again]) == spent([again, stands]) == Spent(90.0, 0.75)
    assert spent([{"step": 3}]) == spent([]) == Spent()


def test_the_last_row_is_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_row(file) is None
    file.write_text("")
    assert last_row(file) is None
    file.write_text("".join(json.dumps({"step": step, "loss": 1 / 3}) + "\n" for step in range(1000)))
    for tail in (8, 64, 1 << 20):  # the first is less than a row
        monkeypatch.setattr(rows_of_files, "TAIL", tail)
        assert last_row(file) == {"step": 999, "loss": 1 / 3}
    file.write_text(file.read_text() + '{"step": 1000, "lo')
    for tail in (8, 1 << 20):
        monkeypatch.setattr(rows_of_files, "TAIL", tail)
        assert last_row(file) == {"step": 999, "loss": 1 / 3}
    file.write_text('{"step": 1}')
    assert last_row(file) is None  # torn: its line has no end
