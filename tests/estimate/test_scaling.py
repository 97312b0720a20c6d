"""Strong and weak scaling on made-up networks whose efficiency is known.

pytest tests/estimate/test_scaling.py
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.plan.cases import h100s, run_config
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import InputError, PlanError
from toolkit.estimate.layout_changes import apply_changes, as_overrides, neighbours
from toolkit.estimate.scaling import (
    LEAST_EFFICIENCY,
    Estimator,
    Scaling,
    ScalingCurve,
    parse_ranks,
    scale,
    scaling_curve,
    verdict,
)
from toolkit.estimate.types import StepEstimate
from toolkit.plan.types import RunPlan

NODE = h100s(8)
AXES = ("parallel.tensor", "parallel.pipeline", "parallel.context")
PERFECT = float("inf")
SAMPLE_SECONDS = 0.1
GRADIENT_BYTES = 1e9


def network(inside: float, between: float) -> Estimator:
    """Estimate steps whose samples take ``SAMPLE_SECONDS`` and whose gradients take a ring.

    Args:
        inside, between: bytes per second of a link inside a node and between nodes.
    """

    def estimate(plan: RunPlan) -> StepEstimate:
        ranks = plan.world.ranks
        model_ranks = ranks // plan.batch.data_parallel
        computing = SAMPLE_SECONDS * plan.batch.global_batch / (plan.batch.data_parallel * model_ranks)
        slowest = inside if plan.world.nodes == 1 else between
        data = plan.batch.data_parallel
        ring = 2 * (data - 1) / data * GRADIENT_BYTES / model_ranks
        exchange = ring / max(slowest, 1e-300)
        seconds = computing + exchange
        parts = {"forward": computing / 3, "backward": computing * 2 / 3, "communication/data": exchange}
        return StepEstimate(seconds=seconds, low=seconds / 1.2, high=seconds * 1.2, parts=parts)

    return estimate


def curve(
    scaling: Scaling,
    text: str,
    estimate: Estimator,
    config: RunConfig | None = None,
    fixed: Collection[str] = (),
) -> ScalingCurve:
    config = config or run_config(train__global_batch=512)
    return scaling_curve(scaling, config, NODE, parse_ranks(text), estimate, fixed=fixed)


def test_ranges_double_and_lists_are_sorted() -> None:
    assert parse_ranks("1..1024") == tuple(2**power for power in range(11))
    assert parse_ranks("3..24") == (3, 6, 12, 24)
    assert parse_ranks("3..20") == (3, 6, 12)
    assert parse_ranks("64, 8,256,8") == (8, 64, 256)


@pytest.mark.parametrize(
    "text", ["", "0..8", "8..1", "1..", "a", "1,,2", "-1..8", "1...8", "1..2..4", "1..9999999"]
)
def test_other_texts_are_refused_with_a_remedy_that_works(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_ranks(text)
    assert parse_ranks(error.value.problems[0].remedy.split()[-1].removeprefix("scaling="))


def test_weak_scaling_on_a_perfect_network_is_perfect() -> None:
    found = curve(Scaling.WEAK, "1..1024", network(PERFECT, PERFECT))
    assert [point.written.plan.batch.global_batch for point in found.points if point.written] == [
        64 * point.ranks for point in found.points
    ]
    assert [point.efficiency.value for point in found.points if point.efficiency] == pytest.approx([1.0] * 11)
    assert found.first_broken is None


def test_strong_scaling_keeps_the_batch_and_ends_where_it_cannot_be_divided() -> None:
    found = curve(Scaling.STRONG, "1..1024", network(PERFECT, PERFECT), fixed=AXES)
    good = [point for point in found.points if point.written is not None]
    assert [point.ranks for point in good] == [2**power for power in range(9)]  # 512 / (256 x micro-batch 2)
    assert {point.written.plan.batch.global_batch for point in good if point.written} == {512}
    assert found.first_broken is not None
    assert found.first_broken.ranks == 512
    assert found.first_broken.problem is not None
    assert found.first_broken.problem.key == "train.global_batch"
    # Half of the micro-batch divides the batch among 512 ranks.
    assert found.first_broken.changed is not None
    assert found.first_broken.changed.overrides == ("train.micro_batch=1",)
    assert found.first_broken.changed.plan.batch.global_batch == 512


@pytest.mark.parametrize("scaling", list(Scaling))
def test_a_network_without_bandwidth_breaks_at_the_border_of_a_node(scaling: Scaling) -> None:
    found = curve(scaling, "1..64", network(PERFECT, 0.0))
    assert found.first_broken is not None
    assert found.first_broken.ranks == 16
    assert found.first_broken.cause == "communication/data"
    # Control: without a border the same network does not break.
    assert curve(scaling, "1..64", network(PERFECT, PERFECT)).first_broken is None


def test_efficiency_is_that_of_the_ring() -> None:
    found = curve(Scaling.WEAK, "1..8", network(1e9, 1e9))
    for point in found.points[1:]:
        assert point.efficiency is not None
        exchange = 2 * (point.ranks - 1) / point.ranks
        assert point.efficiency.value == pytest.approx(6.4 / (6.4 + exchange))
        assert point.efficiency.low < point.efficiency.value < point.efficiency.high
    assert found.points[0].efficiency is not None
    assert found.points[0].efficiency.low == found.points[0].efficiency.high == 1.0


def test_a_change_is_offered_where_efficiency_is_low_and_keeps_fixed_keys() -> None:
    config = run_config(engine__name=EngineName.megatron, train__global_batch=512)
    estimate = network(1e9, 1e8)
    found = curve(Scaling.STRONG, "8,64", estimate, config)
    point = found.first_broken
    assert point is not None
    assert point.ranks == 64
    assert point.efficiency is not None
    assert point.efficiency.value < LEAST_EFFICIENCY
    assert point.changed is not None
    assert point.changed_efficiency is not None
    assert point.changed_efficiency.value > point.efficiency.value
    assert any(text.startswith("parallel.") for text in point.changed.overrides)
    held = curve(Scaling.STRONG, "8,64", estimate, config, fixed=AXES).points[1].changed
    assert held is None or not any(text.startswith("parallel.") for text in held.overrides)


def test_weak_scaling_needs_a_whole_batch() -> None:
    config = run_config(train__global_batch=12, train__micro_batch=1)
    with pytest.raises(PlanError) as error:
        scale(Scaling.WEAK, config, NODE, 1)
    remedy = error.value.problems[0].remedy.split()[1].removeprefix("train.global_batch=").rstrip(",")
    assert (
        scale(Scaling.WEAK, run_config(train__global_batch=int(remedy)), NODE, 1)[0].train.global_batch == 3
    )
    assert scale(Scaling.STRONG, config, NODE, 4)[0].train.global_batch == 12


def test_nodes_are_filled() -> None:
    with pytest.raises(PlanError):
        scale(Scaling.STRONG, run_config(), NODE, 12)
    config, world = scale(Scaling.STRONG, run_config(), NODE, 16)
    assert (world.ranks, world.ranks_per_node, config.cluster.nodes, config.cluster.gpus_per_node) == (
        16,
        8,
        2,
        8,
    )
    config, world = scale(Scaling.STRONG, run_config(), NODE, 2)
    assert (world.ranks, world.ranks_per_node, config.cluster.nodes, config.cluster.gpus_per_node) == (
        2,
        2,
        1,
        2,
    )


def test_changes_are_of_one_key_and_back_again() -> None:
    config = run_config()
    for changes in neighbours(config, {}):
        assert len(changes) == 1
        assert apply_changes(config, changes) != config
    back = [changes for changes in neighbours(config, {"parallel.tensor": 2}) if not changes]
    assert len(back) == 1
    assert as_overrides({"zero.stage": 1, "parallel.tensor": 2}) == ("parallel.tensor=2", "zero.stage=1")


def test_verdicts_name_the_cause_the_rule_and_the_change() -> None:
    broken = " ".join(verdict(curve(Scaling.WEAK, "1..64", network(PERFECT, 1e8))))
    assert "falls below 80% at 16 ranks" in broken
    assert "communication/data" in broken
    ended = " ".join(verdict(curve(Scaling.STRONG, "1..1024", network(PERFECT, PERFECT), fixed=AXES)))
    assert "ends at 512 ranks" in ended
    assert "train.micro_batch=1 gives an efficiency of 100%" in ended
    perfect = " ".join(verdict(curve(Scaling.WEAK, "1..64", network(PERFECT, PERFECT))))
    assert perfect == "Weak scaling is at least 80% efficient from 1 to 64 ranks, 100% at 64 ranks."
    impossible = run_config(train__global_batch=7, train__micro_batch=2)
    assert "cannot run" in " ".join(verdict(curve(Scaling.STRONG, "1..4", network(1e9, 1e9), impossible)))
