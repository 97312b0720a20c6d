"""Throughput, utilisation, remaining time and cost of simulated steps.

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
from toolkit.monitor.throughput import RunTimer, Throughput, TimeSpent, time_spent
from toolkit.plan import make_plan
from toolkit.plan.flops import hardware_flops, model_flops, why_no_utilisation
from toolkit.plan.types import RunPlan, World
from toolkit.rows import last_row

BF16 = {"precision__name": Precision.bf16, "zero__stage": 1}
COMPUTED = 8 * 32  # tokens in a step
NOTHING = TimeSpent()


def planned(world: World, **changes: object) -> RunPlan:
    return make_plan(run_config(**changes), world)


def row(plan: RunPlan, seconds: float = 0.5, units: int = COMPUTED) -> dict[str, float]:
    return Throughput.from_plan(plan).row(samples=8, units=units, computed=COMPUTED, seconds=seconds)


# ---- speed


def test_throughput_on_known_gpus() -> None:
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


def test_masked_tokens_count_for_flops_but_not_for_throughput() -> None:
    plan = planned(h100s(4), **BF16)
    half, full = row(plan, units=COMPUTED // 2), row(plan)
    assert half["tokens_per_second"] == full["tokens_per_second"] / 2
    assert half["mfu"] == full["mfu"]


def test_recomputation_has_hardware_figures() -> None:
    plan = planned(h100s(4), **BF16, train__activation_checkpointing="full")
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
def test_unknown_peak_or_flops_gives_no_utilisation(
    world: World, changes: dict[str, object], keys: set[str], reason: str
) -> None:
    plan = planned(world, **changes)
    assert row(plan).keys() == {"tokens_per_second", "samples_per_second", "tokens_per_second_per_gpu"} | keys
    assert reason in (why_no_utilisation(plan) or "")


def test_cpu_ranks_have_no_figures_per_gpu() -> None:
    assert row(planned(CPU)) == {"tokens_per_second": 512.0, "samples_per_second": 16.0}


# ---- time and cost


def driven(
    plan: RunPlan, steps: Sequence[tuple[float, float]], before: TimeSpent = NOTHING, first: int = 1
) -> list[dict[str, float]]:
    """Rows of steps given as (seconds, seconds until the next step); the first starts after 7 s."""
    run_timer, now, found = RunTimer(plan, before, 100.0), 107.0, []
    for number, (seconds, between) in enumerate(steps):
        now += seconds
        found.append(run_timer.row(step=first + number, seconds=seconds, now=now))
        now += between
    return found


def test_time_and_cost_add_up_over_attempts() -> None:
    plan = planned(h100s(4), **BF16, monitor__price_per_gpu_hour=2.5)
    rows = driven(
        plan, [(3.0, 0.0), (1.0, 5.0), (1.0, 0.0)], TimeSpent(seconds=1000.0, gpu_hours=2.0), first=11
    )
    assert [found["elapsed_seconds"] for found in rows] == [1010.0, 1011.0, 1017.0]
    assert rows[2]["gpu_hours"] == pytest.approx(2.0 + 17.0 * 4 / 3600, rel=1e-12)
    assert rows[2]["cost"] == pytest.approx(2.5 * rows[2]["gpu_hours"], rel=1e-12)
    assert "cost" not in driven(planned(h100s(4), **BF16), [(1.0, 0.0)])[0]
    assert driven(planned(CPU), [(1.0, 0.0)])[0] == {"elapsed_seconds": 8.0}


def test_eta_excludes_the_first_step_and_includes_evaluations() -> None:
    """100 steps of 2 s, 30 s after every tenth: at step 50, 50 steps and 5 evaluations remain."""
    steps = [(90.0, 0.0), *((2.0, 30.0 if number % 10 == 0 else 0.0) for number in range(2, 101))]
    rows = driven(planned(CPU), steps)
    assert "eta_seconds" not in rows[0]
    assert rows[1]["eta_seconds"] == pytest.approx(98 * 2.0)
    left = sum(seconds + between for seconds, between in steps[50:])
    assert rows[49]["eta_seconds"] == pytest.approx(left, rel=0.15)
    assert rows[99]["eta_seconds"] == 0
    control = [(seconds, 0.0) for seconds, _ in steps]
    assert driven(planned(CPU), control)[49]["eta_seconds"] == pytest.approx(50 * 2.0)


def test_eta_ignores_a_hiccup_but_follows_a_change_of_pace() -> None:
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
    )  # a recurring pause is no hiccup; the median would be 2.0


def test_eta_follows_a_batch_ramp() -> None:
    """The batch grows from 2 to 8 sequences, so the time per sample counts."""
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


def test_run_timer_has_bounded_memory() -> None:
    run_timer = RunTimer(planned(CPU, train__steps=20_000), TimeSpent(), 0.0)
    for step in range(1, 20_001):
        run_timer.row(step=step, seconds=1.0, now=float(step))
    assert len(run_timer._recent) == 100


def test_time_and_cost_are_formatted_at_the_end() -> None:
    run_timer = RunTimer(
        planned(h100s(8), **BF16, train__micro_batch=1, monitor__price_per_gpu_hour=2.0), TimeSpent(), 50.0
    )
    assert run_timer.format_spent(50.0 + 1800.0) == "30:00, 4 GPU-hours, cost 8.00 at 2 each"
    later = RunTimer(
        planned(h100s(8), **BF16, train__micro_batch=1), TimeSpent(seconds=36000.0, gpu_hours=1234.0), 0.0
    )
    assert later.format_spent(3600.0) == "11:00:00 over all attempts, 1,242 GPU-hours"
    assert RunTimer(planned(CPU), TimeSpent(), 0.0).format_spent(61.0) == "1:01"


# ---- earlier attempts


def test_time_spent_includes_repeated_steps() -> None:
    stands, again = {"elapsed_seconds": 60.0, "gpu_hours": 0.5}, {"elapsed_seconds": 90.0, "gpu_hours": 0.75}
    assert time_spent([stands, again]) == time_spent([again, stands]) == TimeSpent(90.0, 0.75)
    assert time_spent([{"step": 3}]) == time_spent([]) == TimeSpent()


def test_last_row_is_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_row(file) is None
    file.write_text("")
    assert last_row(file) is None
    file.write_text("".join(json.dumps({"step": step, "loss": 1 / 3}) + "\n" for step in range(1000)))
    for tail in (8, 64, 1 << 20):  # the first is shorter than a row
        monkeypatch.setattr(rows_of_files, "TAIL", tail)
        assert last_row(file) == {"step": 999, "loss": 1 / 3}
    file.write_text(file.read_text() + '{"step": 1000, "lo')
    for tail in (8, 1 << 20):
        monkeypatch.setattr(rows_of_files, "TAIL", tail)
        assert last_row(file) == {"step": 999, "loss": 1 / 3}
    file.write_text('{"step": 1}')
    assert last_row(file) is None  # an incomplete line
