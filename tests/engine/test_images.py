"""A vision transformer on image records under ZeRO: the same images and losses as ``local``.

pytest tests/engine/test_images.py -m full     the other stages, more ranks, bf16
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.images import evaluate_images, image_plan, make_small_tiles, trace_images
from toolkit.config.schema import EvalConfig, Precision
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, RunTrace, check_control, check_parity

TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-5)
BATCH: dict[str, Any] = {"train__global_batch": 16, "train__micro_batch": 4, "optim__lr": 3e-3}


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tiles"
    make_small_tiles(folder, train=256, validation=37)
    return folder


@pytest.fixture(scope="module")
def reference(tiles: Path) -> RunTrace:
    return trace_images(0, 1, image_plan(tiles, **BATCH))


def test_zero2_on_two_ranks_matches_local(tiles: Path, reference: RunTrace, pool: RankPool) -> None:
    traces = pool.run(trace_images, image_plan(tiles, ranks=2, zero__stage=2, **BATCH), ranks=2)
    check_parity(traces[0], reference, TOLERANCE)
    assert traces[0].results == traces[1].results


def test_control_another_sample_order(tiles: Path, reference: RunTrace) -> None:
    """The same images, shuffled by another seed."""
    plan = image_plan(tiles, data__shuffle_seed=1, **BATCH)
    check_control(trace_images(0, 1, plan), reference, TOLERANCE)


def test_evaluation_counts_each_image_once(tiles: Path, pool: RankPool) -> None:
    """37 images in global batches of 16: in the last one a rank has fewer images."""
    evaluation = EvalConfig(every=1, batches=9)
    alone = evaluate_images(0, 1, image_plan(tiles, **BATCH), evaluation)
    two = pool.run(evaluate_images, image_plan(tiles, ranks=2, zero__stage=3, **BATCH), evaluation, ranks=2)
    assert alone.tokens == 37
    assert two[0] == two[1]
    assert (two[0].tokens, two[0].others) == (alone.tokens, alone.others)
    assert two[0].loss_sum == pytest.approx(alone.loss_sum, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "ranks", "micro"), [(0, 2, 8), (1, 2, 2), (2, 4, 1), (3, 2, 4), (3, 4, 2)])
def test_every_stage_matches_local(
    stage: int, ranks: int, micro: int, tiles: Path, reference: RunTrace, pool: RankPool
) -> None:
    plan = image_plan(tiles, ranks=ranks, zero__stage=stage, **{**BATCH, "train__micro_batch": micro})
    check_parity(pool.run(trace_images, plan, ranks=ranks)[0], reference, TOLERANCE)


@pytest.mark.full
def test_bf16_learns(tiles: Path, reference: RunTrace, pool: RankPool) -> None:
    plan = image_plan(tiles, ranks=2, zero__stage=2, precision__name=Precision.bf16, **BATCH)
    losses = pool.run(trace_images, plan, ranks=2)[0].losses
    assert max(abs(a - b) for a, b in zip(losses, reference.losses, strict=True)) < 0.1
