"""The parity checks themselves: distances, controls, and gathering shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from toolkit.checkpoint.shard import WEIGHT, Box, Shard, TensorKey
from toolkit.testing import parity
from toolkit.testing.tiny import LENGTH, micro_batches, tiny_plan


@pytest.fixture(scope="module")
def reference() -> parity.RunTrace:
    return parity.run_trace(tiny_plan())


def test_run_has_no_distance_to_itself(reference: parity.RunTrace) -> None:
    parity.check_parity(parity.run_trace(tiny_plan()), reference)


@pytest.mark.parametrize("what", ["loss", "norm", "weight"])
def test_each_difference_is_detected(reference: parity.RunTrace, what: str) -> None:
    last = reference.results[-1]
    weights = {name: value.clone() for name, value in reference.weights.items()}
    if what == "loss":
        last = replace(last, loss=last.loss + 2e-5)
    elif what == "norm":
        last = replace(last, grad_norm=last.grad_norm + 2e-4)
    else:
        weights["model.norm.weight"][5] += 2e-4
    changed = parity.RunTrace((*reference.results[:-1], last), weights)
    with pytest.raises(AssertionError, match=f"{what}="):
        parity.check_parity(changed, reference)
    with pytest.raises(AssertionError, match="passes as correct"):
        parity.check_control(changed, reference)


def test_reference_that_does_not_learn_is_refused() -> None:
    still = parity.run_trace(tiny_plan(optim__lr=0.0), steps=3)
    with pytest.raises(AssertionError, match="invalid cell"):
        parity.check_parity(still, still)


def test_controls_exceed_the_tolerance() -> None:
    sgd = {"optim__name": "sgd", "optim__lr": 0.1, "optim__momentum": 0.9}
    right = parity.run_trace(tiny_plan("qwen2", **sgd, optim__clip=0.0))
    assert right.losses[0] - right.losses[-1] > parity.REQUIRED_FALL
    parity.check_control(
        parity.run_trace(tiny_plan("qwen2", **sgd, optim__clip=0.0), task=parity.DoubledGradients()), right
    )
    parity.check_control(parity.run_trace(tiny_plan("qwen2", **sgd, optim__clip=1.0)), right)


def test_samples_do_not_depend_on_the_layout() -> None:
    """The global batch is the same; its micro-batches have different numbers of tokens."""
    layouts = [(1, 8), (1, 2), (2, 2), (4, 1), (4, 2)]
    for step in (0, 3):
        rows = []
        for ranks, size in layouts:
            plan = tiny_plan(ranks=ranks, train__micro_batch=size)
            batches = [batch for rank in range(ranks) for batch in micro_batches(plan, step, rank)]
            rows.append(
                sorted(
                    row
                    for batch in batches
                    for row in torch.cat([batch["input_ids"], batch["labels"]], 1).tolist()
                )
            )
        assert all(found == rows[0] for found in rows)
        assert len(rows[0]) == 8
    units = [int((batch["labels"] != -100).sum()) for batch in micro_batches(tiny_plan(), 0)]
    assert len(set(units)) == len(units)
    assert max(units) <= 2 * LENGTH


def test_gathering_detects_holes_and_overlaps() -> None:
    key = TensorKey(WEIGHT, "w")

    def part(low: int, high: int, replicas: int = 1) -> Shard:
        return Shard(
            key, (4,), Box((low,), (high - low,)), torch.arange(float(low), float(high)), 0, replicas
        )

    assert parity.gather_tensors([part(0, 1), part(1, 4)], 0, 1)[key].tolist() == [0, 1, 2, 3]
    assert parity.gather_tensors([part(0, 4, 2), part(0, 4, 2)], 0, 1)[key].tolist() == [0, 1, 2, 3]
    for wrong in ([part(0, 3)], [part(0, 3), part(2, 4)], [part(0, 4, 2)]):
        with pytest.raises(AssertionError, match="covered"):
            parity.gather_tensors(wrong, 0, 1)
