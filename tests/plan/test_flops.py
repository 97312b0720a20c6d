"""Recomputed FLOPs of each kind of plan, and FLOPs by other tools' conventions, as in the guide.

pytest tests/plan/test_flops.py
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from tests.plan.conventions import CONVENTIONS, LENGTH, MODELS, cell, flops
from toolkit.config.schema import EngineName, Precision
from toolkit.families import PUBLISHED, get_family
from toolkit.families.base import ForwardFlops
from toolkit.plan import make_plan
from toolkit.plan.flops import hardware_flops, model_flops, peak_flops, why_no_utilisation
from toolkit.plan.types import RunPlan, World

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "results.md"
MEGATRON = {"engine__name": EngineName.megatron}


def planned(world: World = CPU, **changes: Any) -> RunPlan:
    return make_plan(run_config(**changes), world)


def recomputed(plan: RunPlan) -> float:
    hardware, model = hardware_flops(plan), model_flops(plan)
    assert hardware is not None
    assert model is not None
    return hardware - model


def forward(plan: RunPlan) -> ForwardFlops:
    assert plan.shape is not None
    return get_family(plan.shape.family).forward_flops(plan.shape, plan.config.train.sequence_length)


def test_nothing_is_recomputed_by_default() -> None:
    for changes in ({}, MEGATRON, {"zero__stage": 3}):
        assert recomputed(planned(**changes)) == 0


def test_torch_recomputes_a_block_without_its_last_matrix() -> None:
    plan = planned(train__activation_checkpointing="full")
    parts = forward(plan)
    assert recomputed(plan) == pytest.approx(parts.projections + parts.scores + parts.up, rel=1e-12)
    assert recomputed(planned(train__activation_checkpointing="full", zero__stage=3)) == pytest.approx(
        parts.blocks, rel=1e-12
    )


def test_megatron_recomputes_the_configured_modules() -> None:
    def megatron(world: World = CPU, **keys: Any) -> RunPlan:
        return planned(world, **MEGATRON, engine__megatron=keys, model__num_hidden_layers=8)

    parts = forward(megatron())
    whole = planned(**MEGATRON, train__activation_checkpointing="full", model__num_hidden_layers=8)
    assert recomputed(whole) == pytest.approx(parts.blocks, rel=1e-12)
    uniform = megatron(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4)
    assert recomputed(uniform) == pytest.approx(parts.blocks, rel=1e-12)
    block = megatron(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    assert recomputed(block) == pytest.approx(parts.blocks * 3 / 8, rel=1e-12)
    assert recomputed(megatron(recompute_granularity="selective")) == pytest.approx(parts.scores, rel=1e-12)
    modules = megatron(recompute_granularity="selective", recompute_modules=["mlp", "layernorm"])
    assert recomputed(modules) == pytest.approx(parts.up + parts.down, rel=1e-12)


def test_each_pipeline_stage_recomputes_its_first_blocks() -> None:
    keys = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    plan = planned(
        replace(CPU, ranks=4, ranks_per_node=4),
        **MEGATRON,
        engine__megatron=keys,
        model__num_hidden_layers=8,
        parallel__pipeline=2,
    )
    assert recomputed(plan) == pytest.approx(forward(plan).blocks * 2 / 8, rel=1e-12)
    virtual = planned(
        replace(CPU, ranks=4, ranks_per_node=4),
        **MEGATRON,
        model__num_hidden_layers=8,
        parallel__pipeline=2,
        engine__megatron={**keys, "virtual_pipeline_model_parallel_size": 2},
    )
    assert recomputed(virtual) == pytest.approx(forward(plan).blocks * 4 / 8, rel=1e-12)


def test_peak_needs_a_known_gpu_and_16_bits() -> None:
    bf16 = {"precision__name": Precision.bf16, "zero__stage": 1}
    assert peak_flops(planned(h100s(4), **bf16)) == 989.4e12
    assert why_no_utilisation(planned(h100s(4), **bf16)) is None
    for world, changes, reason in (
        (h100s(4), {}, "precision=fp32"),
        (replace(h100s(4), gpu=None), bf16, "cluster.gpu"),
        (CPU, {}, "CPUs"),
    ):
        plan = planned(world, **changes)
        assert peak_flops(plan) is None
        assert reason in (why_no_utilisation(plan) or "")


# ---- other tools


@pytest.mark.parametrize("name", MODELS)
def test_guide_lists_flops_by_other_conventions(name: str) -> None:
    """Each row of its table has GFLOPs per training token and the difference to this toolkit."""
    table = {
        match[1]: match[2]
        for match in re.finditer(r"^\| ([^|]+?) \| (.+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for convention in CONVENTIONS:
        assert table[convention].split(" | ")[list(MODELS).index(name)] == cell(convention, name), (
            convention,
            name,
        )


def test_plan_uses_the_same_count() -> None:
    for name, model in MODELS.items():
        config = run_config(model=PUBLISHED[model], train__sequence_length=LENGTH[name])
        assert model_flops(make_plan(config, CPU)) == pytest.approx(flops("this toolkit", name), rel=1e-12)
