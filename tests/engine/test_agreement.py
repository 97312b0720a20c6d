"""Arithmetic of the local engine that restates parts of DeepSpeed, compared with DeepSpeed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from toolkit.checkpoint.scalars import SCALER_STATE
from toolkit.config.schema import EngineName, Precision
from toolkit.engine.deepspeed import patches
from toolkit.engine.precision import LossScaler
from toolkit.models.build import build_model
from toolkit.optimizers import muon_update as muon
from toolkit.optimizers.muon import uses_muon
from toolkit.plan.types import Device
from toolkit.testing import parity
from toolkit.testing.dist import run_ranks
from toolkit.testing.tiny import tiny_plan

SHAPES = [(8, 8), (8, 24), (24, 8), (16, 64), (64, 1)]


def on_a_rank(rank: int, ranks: int) -> dict[str, Any]:
    """DeepSpeed's results for the same inputs, computed on a rank that may import it."""
    patches.import_deepspeed(Device.CPU, 0)
    from deepspeed import set_optimizer_flags
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    updates = []
    for gradient, momentum in matrices():
        updates.append((muon_update(gradient, momentum, 0.95), momentum))
    scales = []
    scaler = DynamicLossScaler(
        init_scale=2.0**20, scale_window=3, min_scale=1, delayed_shift=1, consecutive_hysteresis=False
    )
    for overflow in overflows():
        scaler.update_scale(overflow)
        scales.append({name: getattr(scaler, name) for name in SCALER_STATE})
    module = build_model(tiny_plan("mixtral"), "cpu", meta=True)
    set_optimizer_flags(type("Config", (), {"optimizer_name": "muon", "optimizer_params": {}}), module)
    flags = {name: parameter.use_muon for name, parameter in module.named_parameters()}
    return {"updates": updates, "scales": scales, "flags": flags}


def matrices() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator), 0.3 * torch.randn(shape, generator=generator))
        for shape in SHAPES
    ]


def overflows() -> list[bool]:
    draw = random.Random(0)
    return [draw.random() < 0.2 for _ in range(60)]


@pytest.fixture(scope="module")
def deepspeed() -> dict[str, Any]:
    return run_ranks(on_a_rank, 1)[0]


def test_muon_update_matches_deepspeed(deepspeed: dict[str, Any]) -> None:
    for (gradient, momentum), (update, moved) in zip(matrices(), deepspeed["updates"], strict=True):
        kept = gradient.clone()
        found = muon.muon_update(gradient, momentum, 0.95)
        assert torch.equal(gradient, kept), "the gradient is not changed in place"
        torch.testing.assert_close(momentum, moved)
        torch.testing.assert_close(found, update, atol=2e-3, rtol=0)
        largest = max(1.0, gradient.shape[0] / gradient.shape[1]) ** 0.5
        values = torch.linalg.svdvals(found) / largest
        assert values.max() < 1.3, "about orthogonal"
        assert values.max() > 0.6


def test_loss_scaler_matches_deepspeed(deepspeed: dict[str, Any]) -> None:
    scaler, found = LossScaler(cur_scale=2.0**20, window=3), []
    for overflow in overflows():
        scaler.update(overflow)
        found.append(scaler.state_dict())
    assert found == deepspeed["scales"]
    assert len({state["cur_scale"] for state in found}) > 4


def test_muon_parameters_match_deepspeed(deepspeed: dict[str, Any]) -> None:
    module = build_model(tiny_plan("mixtral"), "cpu", meta=True)
    assert {
        name: uses_muon(name, parameter.dim()) for name, parameter in module.named_parameters()
    } == deepspeed["flags"]
    assert set(deepspeed["flags"].values()) == {True, False}


RUNS: dict[str, dict[str, Any]] = {
    "dropout": {"model__dropout": 0.2},
    "fp16": {
        "precision__name": Precision.fp16,
        "precision__initial_scale_power": 24,
        "precision__scale_window": 3,
    },
    "muon": {"optim__name": "muon", "optim__momentum": 0.95, "optim__clip": 0.0},
}
# fp16: rounding of single gradients. Muon: Newton-Schulz enlarges rounding differences, and the norm is that
# of its updates.
TOLERANCES = {"fp16": parity.Distance(2e-4, 2e-3, 2e-4), "muon": parity.Distance(5e-5, 5e-2, 1e-3)}


@pytest.mark.parametrize("name", RUNS)
def test_local_engine_matches_deepspeed_on_one_rank(name: str) -> None:
    """Dropout masks, skipped steps, loss scales and clipped Muon updates are equal in both engines."""
    reference = parity.run_trace(tiny_plan(**RUNS[name]), steps=12)
    plan = tiny_plan(**RUNS[name], engine__name=EngineName.deepspeed, zero__stage=1)
    found = run_ranks(trace, 1, plan)[0]
    assert [result.skipped for result in found.results] == [result.skipped for result in reference.results]
    assert [result.loss_scale for result in found.results] == [
        result.loss_scale for result in reference.results
    ]
    assert any(result.skipped for result in reference.results) is (name == "fp16")
    taken = [(a, b) for a, b in zip(found.results, reference.results, strict=True) if not b.skipped]
    ours, theirs = (
        parity.RunTrace(tuple(pair[side] for pair in taken), trace.weights)
        for side, trace in ((0, found), (1, reference))
    )
    assert ours.distance(theirs).times(TOLERANCES.get(name, parity.TOLERANCE)) <= 1, ours.distance(theirs)


def trace(rank: int, ranks: int, plan: Any) -> parity.RunTrace:
    return parity.run_trace(plan, rank=rank, steps=12)
