"""Each detector names its injected fault within 20 steps, and none raises an alert in a healthy run.

pytest tests/monitor/test_step_detectors.py
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.monitor.synthetic_rows import EVAL, GIB, RANKS, SAVE, Fault, Step, alerts_of, simulate_steps
from toolkit.config.checkpoint import Cadence
from toolkit.config.schema import RunConfig
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.build import build_detectors, data_remedy
from toolkit.monitor.health.checkpoints import LateCheckpoint, SlowCheckpoint, best_interval
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.health.loss import LOSS, JumpDetector, LossScaleCollapse, NonFinite, RisingValidation
from toolkit.monitor.health.throughput import FallingThroughput, Straggler
from toolkit.monitor.sink import Kind
from toolkit.plan.types import RunPlan
from toolkit.step_parts import BACKWARD, DATA, FORWARD, OPTIMIZER, communication
from toolkit.testing.tiny import tiny_plan

SINCE = 400


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return tiny_plan(ranks=RANKS, zero__stage=1)


@pytest.mark.parametrize(
    ("seed", "ledger"),
    [(0, True), (0, False), *(pytest.param(seed, True, marks=pytest.mark.full) for seed in (1, 2))],
)
def test_healthy_run_gives_no_alert(plan: RunPlan, seed: int, ledger: bool) -> None:
    found = alerts_of(
        [*build_detectors(_without_ledger(plan) if not ledger else plan)],
        simulate_steps(seed, 2000 if ledger else 700, noise=0.08 + 0.04 * seed),
    )
    assert [str(alert) for alert in found] == []


def _without_ledger(plan: RunPlan) -> RunPlan:
    config: RunConfig = dataclasses.replace(
        plan.config, monitor=dataclasses.replace(plan.config.monitor, ledger=False)
    )
    return dataclasses.replace(plan, config=config)


# ---- faults, each from step SINCE on


def slow_loader(step: Step, random: np.random.Generator) -> None:
    step.parts[DATA] += 0.3 * random.lognormal(0, 0.2, RANKS)


def slow_loader_in_chunks(step: Step, random: np.random.Generator) -> None:
    step.parts[DATA] += 2.0 if step.number % 5 == 0 else 0.0


def slow_loader_of_rank_2(step: Step, random: np.random.Generator) -> None:
    step.parts[DATA][2] += 0.4


def slow_rank_3(step: Step, random: np.random.Generator) -> None:
    for part in (FORWARD, BACKWARD):
        step.parts[part][3] *= 1.6


def garbage(step: Step, random: np.random.Generator) -> None:
    step.gc_seconds = 0.15 * random.lognormal(0, 0.2)
    step.parts[FORWARD] += step.gc_seconds


def pauses_in_backward(step: Step, random: np.random.Generator) -> None:
    if step.number % 4 == 0:
        step.parts[BACKWARD][1] += 3.5


def slow_network(step: Step, random: np.random.Generator) -> None:
    step.parts[communication("data")] += 0.3 * random.lognormal(0, 0.1)


def two_long_data_waits(step: Step, random: np.random.Generator) -> None:
    """72% of the time of the 20 steps."""
    step.parts[DATA] += 26.0 if step.number in (SINCE + 5, SINCE + 15) else 0.0


def two_long_data_waits_of_rank_1(step: Step, random: np.random.Generator) -> None:
    step.parts[DATA][1] += 26.0 if step.number in (SINCE + 5, SINCE + 15) else 0.0


def stopped_rank_2(step: Step, random: np.random.Generator) -> None:
    """For 3 s, in forward or backward."""
    if step.number % 7 == 0:
        step.stopped[2] = 3.0
        step.parts[(FORWARD, BACKWARD)[step.number % 2]][2] += 3.0


def hog_on_a_core_of_rank_3(step: Step, random: np.random.Generator) -> None:
    """The rank and another process take turns on shared cores."""
    for part in (FORWARD, BACKWARD, OPTIMIZER):
        step.parts[part][3] *= 2.2
        step.starved[3] += step.parts[part][3] / 2
    step.crowded = 1.0


def slow_save_of_rank_0(step: Step, random: np.random.Generator) -> None:
    """The other ranks wait in the next step."""
    if step.number % 3 == 0:
        step.saved[0] += 4.0


def slower(step: Step, random: np.random.Generator) -> None:
    for seconds in step.parts.values():
        seconds *= 1.5


def nan_loss(step: Step, random: np.random.Generator) -> None:
    step.loss = step.grad_norm = math.nan


def infinite_gradient(step: Step, random: np.random.Generator) -> None:
    step.grad_norm = math.inf


def infinite_gradient_then_nan(step: Step, random: np.random.Generator) -> None:
    step.grad_norm = math.inf
    step.loss = math.nan if step.number > SINCE else step.loss


def one_spike(step: Step, random: np.random.Generator) -> None:
    step.loss += 2.0 if step.number in (SINCE, SINCE + 1) else 0.0


def diverging(step: Step, random: np.random.Generator) -> None:
    step.loss += 0.4


def gradient_spike(step: Step, random: np.random.Generator) -> None:
    step.grad_norm *= 100.0 if step.number == SINCE else 1.0


def host_leak(step: Step, random: np.random.Generator) -> None:
    step.host_bytes += (step.number - SINCE) * GIB // 50


def device_leak(step: Step, random: np.random.Generator) -> None:
    step.device_bytes += (step.number - SINCE) * 80 * 2**20


# (injected fault, name of the alert, its fault, where, part of the cause)
FAULTS: list[tuple[Fault, str, str, str, str]] = [
    (slow_loader, "data-stall", "", "", "the data pipeline is slow"),
    (slow_loader_in_chunks, "data-stall", "", "", "the data pipeline is slow"),
    (slow_loader_of_rank_2, "data-stall", "", "rank 2", "the data pipeline of rank 2 is slow"),
    (two_long_data_waits, "data-stall", "", "", "the data pipeline is slow"),
    (two_long_data_waits_of_rank_1, "data-stall", "", "rank 1", "the data pipeline of rank 1 is slow"),
    (stopped_rank_2, "slow-steps", "stopped-process", "rank 2", "the process of rank 2 is stopped"),
    (hog_on_a_core_of_rank_3, "host-busy", "", "node 0", "the host is busy"),
    (slow_save_of_rank_0, "slow-checkpoint", "slow-save", "", "saving takes"),
    (slow_rank_3, "straggler", "", "rank 3", "rank 3 (local rank 3 of node 0) computes longer"),
    (garbage, "slow-steps", "garbage-collection", "", "garbage collection stops training"),
    (pauses_in_backward, "slow-steps", "pauses", BACKWARD, "than the others, in backward"),
    (slow_network, "slow-collective", "", "axis data", "collectives along axis data have become slow"),
    (slower, "slow-steps", "falling-throughput", "", "training has become slower"),
    (nan_loss, "non-finite", "loss", "", f"the loss is not a finite number, first in step {SINCE}: forward"),
    (
        infinite_gradient,
        "non-finite",
        "gradient",
        "",
        f"the gradient norm is not a finite number, first in step {SINCE}: backward",
    ),
    (infinite_gradient_then_nan, "non-finite", "gradient", "", f"first in step {SINCE}: backward"),
    (one_spike, "loss-jump", "loss-spike", "", "and returned"),
    (diverging, "loss-jump", "loss-shift", "", f"has risen in step {SINCE} and stays"),
    (gradient_spike, "loss-jump", "gradient-spike", "", f"jumped in step {SINCE} and returned"),
    (host_leak, "memory-growth", "process-memory", "", "grows step by step"),
    (device_leak, "memory-growth", "device-memory", "", "grows step by step"),
]
# Faults that may be reported as well, because they follow from the same cause.
FOLLOWS = {"falling-throughput"}


@pytest.fixture(scope="module")
def healthy(plan: RunPlan) -> list[Detector]:
    """The detectors after the steps before SINCE. Tests copy them."""
    detectors = list(build_detectors(plan))
    assert alerts_of(detectors, simulate_steps(7, SINCE - 1)) == []
    return detectors


@pytest.mark.parametrize(
    ("inject", "name", "fault", "where", "cause"), FAULTS, ids=[inject.__name__ for inject, *_ in FAULTS]
)
def test_fault_is_named_within_20_steps(
    healthy: list[Detector], inject: Fault, name: str, fault: str, where: str, cause: str
) -> None:
    steps = simulate_steps(7, SINCE + 20, inject, SINCE)
    found = alerts_of(copy.deepcopy(healthy), itertools.islice(steps, SINCE - 1, None))
    assert found
    assert min(alert.step for alert in found) >= SINCE
    right = [alert for alert in found if (alert.name, alert.fault, alert.where) == (name, fault, where)]
    assert right, [(alert.name, alert.fault, alert.where) for alert in found]
    assert right[0].step < SINCE + 20
    assert cause in right[0].cause
    assert any(character.isdigit() for character in right[0].evidence)
    assert right[0].next_step
    assert right[0].level is (Level.ERROR if name == "non-finite" else Level.WARNING)
    assert {alert.fault for alert in found} <= {fault} | FOLLOWS, "no wrong cause"


# ---- single detectors


@pytest.mark.parametrize(("ranks", "where"), [(range(RANKS), ""), (range(1, 2), "rank 1")])
def test_long_data_waits_far_apart_are_detected(plan: RunPlan, ranks: range, where: str) -> None:
    """They take 72% of the time of 100 steps, but no window of 20 steps contains both."""

    def waits(step: Step, random: np.random.Generator) -> None:
        if step.number in (60, 95):
            step.parts[DATA][list(ranks)] += 130.0

    found = alerts_of(build_detectors(plan), simulate_steps(5, 100, waits))
    assert {(alert.name, alert.where) for alert in found} == {("data-stall", where)}
    assert found[0].step == 95
    assert 0.65 < found[0].lost_share < 0.75


def test_throughput_is_compared_for_the_same_number_of_samples(plan: RunPlan) -> None:
    """A batch ramp doubles the cost of a step without an alert; at the same batch size it gives one."""

    def ramped(step: Step, random: np.random.Generator) -> None:
        for seconds in step.parts.values():
            seconds *= 2

    batch = dataclasses.replace(
        plan.batch,
        stages=(
            dataclasses.replace(plan.batch.stages[0], size=8, steps=SINCE - 1),
            dataclasses.replace(
                plan.batch.stages[0], size=16, first_step=SINCE - 1, first_sample=8 * (SINCE - 1), steps=None
            ),
        ),
    )
    assert (
        alerts_of(
            build_detectors(dataclasses.replace(plan, batch=batch)),
            simulate_steps(1, SINCE + 60, ramped, SINCE),
        )
        == []
    )
    assert "falling-throughput" in {
        alert.fault
        for alert in alerts_of(build_detectors(plan), simulate_steps(1, SINCE + 60, ramped, SINCE))
    }


def test_short_steps_are_judged_in_groups_of_a_second() -> None:
    """Steps of 12 ms that take 30 ms, for some seconds or permanently."""

    def alerts(slow: Callable[[int], bool]) -> list[int]:
        detector = FallingThroughput(lambda step: 8)
        rows = (ledger(step, 0.03 if slow(step) else 0.012) for step in range(1, 10_000))
        return [row["step"] for row in rows if detector.check(Kind.LEDGER, row) is not None]

    assert alerts(lambda step: 5000 <= step < 5200) == []
    assert 5000 < alerts(lambda step: step >= 5000)[0] <= 6000


def ledger(step: int, busy: float, **more: Any) -> dict[str, Any]:
    """A ledger row of one rank."""
    return {
        "step": step,
        "ranks": 1,
        "wall_seconds": busy,
        "parts": {FORWARD: [busy] * 3},
        "slowest_rank": 0,
        "data_rank": 0,
        "slowest_busy_seconds": busy,
        "median_busy_seconds": busy,
        **more,
    }


def on_a_busy_host(step: Step, random: np.random.Generator) -> None:
    """Each rank is starved in turn, and neighbours make all of them slower."""
    for rank in range(RANKS):
        slower = random.uniform(1.0, 1.9)
        starved = random.exponential(0.5) * (random.random() < 0.6)
        for part in (FORWARD, BACKWARD, OPTIMIZER, communication("data")):
            step.parts[part][rank] *= slower
        step.parts[BACKWARD][rank] += starved
        step.starved[rank] = starved
    step.crowded = sum(seconds.max() for seconds in step.parts.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_busy_host_gives_only_its_own_alert(plan: RunPlan, seed: int) -> None:
    """Another process is active in 200 of every 600 steps."""

    def hog(step: Step, random: np.random.Generator) -> None:
        if step.number % 600 >= 400:
            on_a_busy_host(step, random)

    found = alerts_of(build_detectors(plan), simulate_steps(seed, 2000, hog, 1))
    assert [str(alert) for alert in found if alert.name != "host-busy"] == []
    assert 1 <= len(found) <= 3, "once per active phase"


@pytest.mark.parametrize(
    ("fault", "name", "where"),
    [
        (two_long_data_waits_of_rank_1, "data-stall", "rank 1"),
        (stopped_rank_2, "slow-steps", "rank 2"),
        (slow_save_of_rank_0, "slow-checkpoint", ""),
    ],
)
def test_large_fault_is_detected_on_a_busy_host(plan: RunPlan, fault: Fault, name: str, where: str) -> None:
    def both(step: Step, random: np.random.Generator) -> None:
        on_a_busy_host(step, random)
        if step.number >= SINCE:
            fault(step, random)

    found = alerts_of(build_detectors(plan), simulate_steps(1, SINCE + 40, both, 1))
    assert {(alert.name, alert.where) for alert in found} == {("host-busy", "node 0"), (name, where)}


def test_slow_decline_is_compared_with_the_best_steps(plan: RunPlan) -> None:
    """A decline of 0.05% per step, which no window of 200 steps shows."""

    def slower_and_slower(step: Step, random: np.random.Generator) -> None:
        for seconds in step.parts.values():
            seconds *= 1 + (step.number - SINCE) / 2000

    alerts = alerts_of(build_detectors(plan), simulate_steps(2, 1600, slower_and_slower, SINCE))
    found = [alert for alert in alerts if alert.fault == "falling-throughput"]
    assert found
    assert SINCE + 200 < found[0].step < SINCE + 700


def test_slow_leak_is_detected_over_the_whole_run(plan: RunPlan) -> None:
    """1 MiB per step is below the threshold of 20 steps but is a leak over a thousand."""

    def leak(step: Step, random: np.random.Generator) -> None:
        step.host_bytes = 2 * GIB + step.number * 2**20

    found = [
        alert
        for alert in alerts_of(build_detectors(plan), simulate_steps(3, 1500, leak, 1))
        if alert.fault == "process-memory"
    ]
    assert found
    assert "1 MiB a step" in found[0].evidence


def test_pipeline_stages_are_compared_with_their_usual_ratio() -> None:
    def rows(factor: float, since: int) -> list[Alert]:
        detector, found = Straggler(ranks_per_node=8, stages=4), []
        for step in range(1, 200):
            slow = 1.5 * (factor if step >= since else 1.4)
            row = ledger(step, slow, ranks=8, slowest_rank=7, median_busy_seconds=1.5)
            found += [alert for alert in [detector.check(Kind.LEDGER, row)] if alert is not None]
        return found

    assert rows(1.4, 1) == []  # the last stage has the logits
    found = rows(2.0, 100)
    assert found[0].where == "rank 7"
    assert found[0].step < 120


def test_slow_rank_of_two_is_compared_with_the_other() -> None:
    detector = Straggler(ranks_per_node=1, stages=1)
    found = [
        detector.check(Kind.LEDGER, ledger(step, 1.4, ranks=2, slowest_rank=1, median_busy_seconds=1.2))
        for step in range(1, 40)
    ]
    alert = found[-1]
    assert alert is not None
    assert "node 1" in alert.cause
    assert "the other rank for 1 s" in alert.evidence
    assert "system/node-1.jsonl" in alert.next_step


def test_saves_that_become_slow_are_detected(plan: RunPlan) -> None:
    def slow(step: Step, random: np.random.Generator) -> None:
        step.saved *= 6 if step.number % SAVE == 0 else 1

    found = alerts_of(build_detectors(plan), simulate_steps(4, 1000, slow, 650))
    assert {(alert.name, alert.step) for alert in found} <= {
        ("slow-checkpoint", 800),
        ("slow-checkpoint", 900),
        ("slow-checkpoint", 1000),
    }
    assert found[0].step == 800, "a single slow save gives no alert"
    assert "checkpoint.background=true" in found[0].next_step


def test_saves_that_take_a_large_share_are_detected() -> None:
    """Saves of 2 s, every 10 s of training."""
    detector, found = SlowCheckpoint(), []
    for step in range(1, 50):
        saved = 2.0 if step % 10 == 0 else 0.0
        row = ledger(step, 0.8, wall_seconds=0.8 + saved, parts={"checkpoint": [saved, saved, saved]})
        found += [alert for alert in [detector.check(Kind.LEDGER, row)] if alert is not None]
    assert "takes 20% of the time" in found[0].cause
    assert f"checkpoint.every={round(best_interval(2.0) / 60)}min" in found[0].next_step
    assert best_interval(2.0) == pytest.approx(math.sqrt(2 * 2 * 86400))


def test_overdue_checkpoint_is_detected() -> None:
    now = [0.0]
    for cadence, seconds, late_at in (
        (Cadence(steps=100), 1.0, 251),
        (Cadence(seconds=600.0), 10.0, 191),
        (Cadence(), 10.0, None),
    ):
        now[0] = 0.0
        detector, found = LateCheckpoint(cadence, lambda: now[0]), []
        for step in range(1, 400):
            now[0] += seconds
            if step in (50, 100):
                detector.saved(step)
            alert = detector.check(Kind.STEP, {"step": step})
            found += [alert] if alert else []
        assert (found[0].step if found else None) == late_at


def test_collapsing_loss_scale_is_detected_after_the_start() -> None:
    def alert_steps(first: int, count: int) -> list[int]:
        detector = LossScaleCollapse()
        rows = [
            {"step": step, "skipped": first <= step < first + count, "loss_scale": 65536.0}
            for step in range(1, 200)
        ]
        return [row["step"] for row in rows if detector.check(Kind.STEP, row) is not None]

    assert alert_steps(1, 15) == []
    assert alert_steps(100, 9) == []
    assert alert_steps(100, 12) == [109, 110, 111]
    skipped = {"step": 1, "loss": 1.0, "grad_norm": math.inf, "skipped": True, "lr": 1.0}
    assert NonFinite().check(Kind.STEP, {**skipped, "loss_scale": 2.0}) is None
    assert LossScaleCollapse().check(Kind.STEP, skipped) is None, "without a loss scale nothing can collapse"


@pytest.mark.parametrize(
    ("row", "ending"),
    [
        ({"skipped": True, "weights_finite": True}, "; the weights are finite, and the step was skipped"),
        ({"skipped": False, "weights_finite": True}, "; the weights are finite"),
        (
            {"skipped": True, "weights_finite": False},
            "; the weights are not finite either, and the step was skipped",
        ),
        ({}, "from a finite loss"),  # a row of an earlier version
    ],
)
def test_non_finite_alert_reports_whether_weights_are_finite(row: dict[str, bool], ending: str) -> None:
    alert = NonFinite().check(Kind.STEP, {"step": 1, "loss": 1.0, "grad_norm": math.inf, "lr": 1.0, **row})
    assert alert is not None
    assert alert.cause.endswith(ending)
    assert "lost" not in alert.cause


def validated(losses: list[float]) -> list[int]:
    detector = RisingValidation()
    rows = [
        {"step": EVAL * number, "set": "validation", "loss": loss} for number, loss in enumerate(losses, 1)
    ]
    return [row["step"] // EVAL for row in rows if detector.check(Kind.EVAL, row) is not None]


def test_rising_validation_loss_is_detected() -> None:
    random = np.random.default_rng(0)
    falling = [3 + 2 * math.exp(-number / 10) + random.normal(0, 0.01) for number in range(60)]
    assert validated(falling) == []
    rising = [loss + 0.02 * max(0, number - 40) for number, loss in enumerate(falling)]
    alerts = validated(rising)
    assert 43 <= alerts[0] <= 48
    assert validated([3.0, math.nan]) == [2]
    flat = list(3 + random.normal(0, 0.02, 400))
    assert validated(flat) == []


def test_smooth_falling_loss_is_no_jump() -> None:
    detector = JumpDetector(LOSS)
    losses = [5 * math.exp(-step / 100) for step in range(300)]
    assert [detector.check(Kind.STEP, {"step": step, "loss": loss}) for step, loss in enumerate(losses)] == [
        None
    ] * 300


def test_spike_of_a_zero_loss_is_detected() -> None:
    detector = JumpDetector(LOSS)
    losses = [0.0] * 60 + [1.0] + [0.0] * 10
    found = [
        alert
        for step, loss in enumerate(losses)
        if (alert := detector.check(Kind.STEP, {"step": step, "loss": loss})) is not None
    ]
    assert [(alert.fault, alert.step) for alert in found] == [("loss-spike", 63)]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda config: setattr(config.data, "name", "dataset"), "data.dataset.workers=4"),
        (lambda config: setattr(config.data, "path", "s3://bucket/data"), "data.cache.folder"),
        (lambda config: None, "data.path=FOLDER"),
    ],
)
def test_remedy_for_slow_data_depends_on_the_source(change: Callable[[RunConfig], None], remedy: str) -> None:
    plan = tiny_plan()
    change(plan.config)
    assert remedy in data_remedy(plan)
