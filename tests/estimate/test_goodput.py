"""Predicted goodput: Young's and Daly's formulas, a simulation of failures, and the plan's line.

pytest tests/estimate/test_goodput.py
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from math import inf, sqrt

import pytest

from toolkit.config.cluster import ClusterConfig
from toolkit.errors import ConfigError
from toolkit.estimate.goodput import GoodputEstimate, estimate_goodput, format_goodput
from toolkit.estimate.save_interval import (
    NODE_MTBF_HOURS,
    PAUSE_SECONDS,
    RESTART_SECONDS,
    optimal_interval,
    useful_share,
    waiting_share,
)
from toolkit.estimate.types import StepEstimate
from toolkit.plan.types import Device, RunPlan
from toolkit.testing.tiny import tiny_plan

STEP = StepEstimate(seconds=10.0, low=9.0, high=11.0, parts={})


def simulated_share(
    interval: float,
    save: float,
    restart: float,
    mean: float,
    *,
    segments: int,
    spares: int = 0,
    repair: float = 0.0,
) -> float:
    """The share of useful time of a run with exponentially distributed failures.

    Every node that fails is repaired in a time between 0 and twice ``repair``, evenly distributed. The run
    waits while more than ``spares`` are under repair.
    """
    rng = random.Random(0)
    now, failure = 0.0, rng.expovariate(1 / mean)
    repaired: list[float] = []  # moments at which the nodes under repair are ready

    def fail() -> None:
        nonlocal now, failure
        now = failure
        heapq.heappush(repaired, now + rng.uniform(0, 2 * repair))
        while repaired and repaired[0] <= now:
            heapq.heappop(repaired)
        if len(repaired) > spares:
            now = heapq.heappop(repaired)
        failure = now + rng.expovariate(1 / mean)

    for _ in range(segments):
        while now + interval + save > failure:  # the segment is lost, and so are restarts that fail
            fail()
            while now + restart > failure:
                fail()
            now += restart
        now += interval + save
    return segments * interval / now


@pytest.mark.parametrize(
    ("interval", "save", "restart", "mean"),
    [(600, 10, 300, 10_000), (3600, 60, 600, 7200), (100, 50, 10, 1000)],
)
def test_formula_agrees_with_a_simulation(interval: float, save: float, restart: float, mean: float) -> None:
    expected = simulated_share(interval, save, restart, mean, segments=20_000)
    assert useful_share(interval, save, restart, mean) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("spares", "repair"), [(0, 5_000), (1, 20_000), (3, 40_000)])
def test_goodput_with_spare_nodes_is_within_a_point_of_a_simulation(spares: int, repair: float) -> None:
    costs = (1200.0, 20.0, 300.0, 10_000.0)
    expected = simulated_share(*costs, segments=60_000, spares=spares, repair=repair)
    waiting = waiting_share(spares, repair, 10_000)
    assert useful_share(*costs) * (1 - waiting) == pytest.approx(expected, abs=0.01)
    assert waiting > 0.03, "the control: without waiting the formula would be further off"
    assert abs(useful_share(*costs) - expected) > 0.02


def test_waiting_needs_failures_and_ends_with_enough_spares() -> None:
    assert waiting_share(0, 1000, inf) == 0.0
    assert waiting_share(0, 1000, 1000) == 0.5  # fails after 1000 s and waits 1000 s
    assert waiting_share(50, 1000, 1000) < 1e-12


@pytest.mark.parametrize(("save", "mean"), [(1, 1e5), (60, 86_400), (300, 20_000), (300, 3000)])
def test_best_interval_has_the_highest_goodput(save: float, mean: float) -> None:
    best = optimal_interval(save, mean)
    share = useful_share(best, save, 600, mean)
    others = [useful_share(best * factor, save, 600, mean) for factor in (0.5, 0.8, 1.25, 2)]
    assert share > max(others)
    scan = max(useful_share(seconds, save, 600, mean) for seconds in range(10, 50_000, 10))
    assert share == pytest.approx(scan, rel=1e-3)


def test_short_saves_follow_young() -> None:
    assert optimal_interval(1, 1e6) == pytest.approx(sqrt(2 * 1e6), rel=0.002)
    assert optimal_interval(1e4, 1e3) == 1e3  # Daly's bound where a save takes longer than a run lasts


def test_without_failures_only_saves_take_time() -> None:
    assert useful_share(90, 10, 600, inf) == 0.9
    assert useful_share(90, 10, 600, 1e12) == pytest.approx(0.9, rel=1e-6)


def test_failures_of_llama_3() -> None:
    """419 interruptions in 54 days on 2,048 nodes: one in three hours (2407.21783)."""
    hours = NODE_MTBF_HOURS / 2048
    assert hours == pytest.approx(3.09, rel=0.01)


def forecast(nodes: int, device: Device = Device.CUDA, **changes: object) -> tuple[RunPlan, GoodputEstimate]:
    plan = tiny_plan("llama", train__steps=100_000)
    world = replace(plan.world, ranks=8 * nodes, ranks_per_node=8, device=device, gpu="h100")
    config = replace(plan.config, cluster=replace(plan.config.cluster, **changes))  # type: ignore[arg-type]
    plan = replace(plan, world=world, config=config)
    found = estimate_goodput(plan, STEP)
    assert found is not None
    return plan, found


def test_more_nodes_fail_more_often() -> None:
    few, many = forecast(8)[1], forecast(2048)[1]
    assert few.between_failures == pytest.approx(NODE_MTBF_HOURS * 3600 / 8)
    assert many.between_failures == pytest.approx(NODE_MTBF_HOURS * 3600 / 2048)
    assert few.goodput > 0.98 > 0.9 > many.goodput
    assert many.best_interval is not None
    assert many.best_goodput is not None
    assert many.best_interval < many.interval == 5000  # checkpoint.every=500 steps of 10 s
    assert many.best_goodput > many.goodput


def test_cpu_ranks_have_no_failures_unless_their_rate_is_given() -> None:
    quiet = forecast(1, Device.CPU)[1]
    assert (quiet.between_failures, quiet.best_interval) == (None, None)
    assert quiet.goodput == pytest.approx(1, abs=1e-3)
    given = forecast(1, Device.CPU, node_mtbf_hours=10.0)[1]
    assert given.between_failures == 36_000
    assert given.goodput < quiet.goodput


def test_the_table_names_a_better_interval_and_is_silent_without_losses() -> None:
    [(title, text)] = format_goodput(forecast(2048)[1])
    assert title == "goodput"
    assert "checkpoint.every=" in text
    assert not list(format_goodput(forecast(1)[1]))


def test_a_run_without_saves_that_fails_often_never_ends() -> None:
    plan, _ = forecast(2048)
    checkpoint = replace(plan.config.checkpoint, every="never")
    config = replace(plan.config, checkpoint=checkpoint, train=replace(plan.config.train, steps=10**7))
    found = estimate_goodput(replace(plan, config=config), STEP)
    assert found is not None
    assert (found.goodput, found.wall, found.to_json()["wall"]) == (0, inf, None)
    [(_, text)] = format_goodput(found)
    assert "never ends" in text
    assert "checkpoint.every=" in text


def test_spare_nodes_shorten_the_predicted_run() -> None:
    at_once, alone, spare = (
        forecast(2048)[1],
        forecast(2048, repair_hours=24.0)[1],
        forecast(2048, repair_hours=24.0, spare_nodes=16)[1],
    )
    assert at_once.waiting == 0.0
    assert alone.waiting > 0.8
    assert alone.goodput == pytest.approx(at_once.goodput * (1 - alone.waiting))
    assert at_once.goodput > spare.goodput > at_once.goodput - 0.01
    assert "waits for a repaired node" in dict(format_goodput(alone))["goodput"]
    assert "spare nodes: 16" in " ".join(spare.assumptions)


def test_measured_restart_replaces_the_published_one() -> None:
    published, measured = forecast(2048)[1], forecast(2048, restart_seconds=20.0)[1]
    assert published.restart - measured.restart == pytest.approx(RESTART_SECONDS - 20)
    assert measured.goodput > published.goodput + 0.02
    assert "20 s to find a failure and restart (cluster.restart_seconds)" in measured.assumptions


def test_automatic_interval_is_predicted() -> None:
    plan, fixed = forecast(2048)
    checkpoint = replace(plan.config.checkpoint, every="auto")
    found = estimate_goodput(replace(plan, config=replace(plan.config, checkpoint=checkpoint)), STEP)
    assert found is not None
    assert found.interval == pytest.approx(found.best_interval)
    assert found.goodput > fixed.goodput


def test_saves_in_the_background_stop_training_only_for_the_copy() -> None:
    plan, _ = forecast(8)
    times = {}
    for background in (False, True):
        found = estimate_goodput(replace(plan, saves=replace(plan.saves, background=background)), STEP)
        assert found is not None
        times[background] = found
    paused = times[True].save - PAUSE_SECONDS
    assert paused < times[True].write / 10
    assert times[False].save - PAUSE_SECONDS == pytest.approx(times[True].write)


def test_an_impossible_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.node_mtbf_hours is greater than 0"):
        ClusterConfig(node_mtbf_hours=0)
