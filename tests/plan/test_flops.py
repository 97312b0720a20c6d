"""What is recomputed, in each way that a plan has; other tools' ways of counting beside ours, on one model, as the guide has them.

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
from toolkit.plan.flops import hardware_flops, model_flops, peak_flops, without_utilisation
from toolkit.plan.types import RunPlan, World

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
MEGATRON = {"engine__name": EngineName.megatron}


def planned(world: World = CPU, **changes: Any) -> RunPlan:
    return make_plan(run_config(**changes), world)


def again(plan: RunPlan) -> float:
    done, counts = hardware_flops(plan), model_flops(plan)
    assert done is not None
    assert counts is not None
    return done - counts


def forward(plan: RunPlan) -> ForwardFlops:
    assert plan.shape is not None
    return get_family(plan.shape.family).forward_flops(plan.shape, plan.config.train.sequence_length)


def test_nothing_is_recomputed_unless_it_is_asked_for() -> None:
    for changes in ({}, MEGATRON, {"zero__stage": 3}):
        assert again(planned(**changes)) == 0


def test_torch_recomputes_all_of_a_block_but_its_last_matrix() -> None:
    plan = planned(train__activation_checkpointing=True)
    parts = forward(plan)
    assert again(plan) == pytest.approx(parts.projections + parts.scores + parts.up, rel=1e-12)
    assert again(planned(train__activation_checkpointing=True, zero__stage=3)) == pytest.approx(
        parts.blocks, rel=1e-12
    )


def test_megatron_recomputes_what_it_is_told_to() -> None:
    def megatron(world: World = CPU, **keys: Any) -> RunPlan:
        return planned(world, **MEGATRON, engine__megatron=keys, model__num_hidden_layers=8)

    parts = forward(megatron())
    whole = planned(**MEGATRON, train__activation_checkpointing=True, model__num_hidden_layers=8)
    assert again(whole) == pytest.approx(parts.blocks, rel=1e-12)
    uniform = megatron(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4)
    assert again(uniform) == pytest.approx(parts.blocks, rel=1e-12)
    block = megatron(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    assert again(block) == pytest.approx(parts.blocks * 3 / 8, rel=1e-12)
    assert again(megatron(recompute_granularity="selective")) == pytest.approx(parts.scores, rel=1e-12)
    modules = megatron(recompute_granularity="selective", recompute_modules=["mlp", "layernorm"])
    assert again(modules) == pytest.approx(parts.up + parts.down, rel=1e-12)


def test_each_stage_of_a_pipeline_recomputes_its_first_blocks() -> None:
    keys = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    plan = planned(
        replace(CPU, ranks=4, ranks_per_node=4),
        **MEGATRON,
        engine__megatron=keys,
        model__num_hidden_layers=8,
        parallel__pipeline=2,
    )
    assert again(plan) == pytest.approx(forward(plan).blocks * 2 / 8, rel=1e-12)
    virtual = planned(
        replace(CPU, ranks=4, ranks_per_node=4),
        **MEGATRON,
        model__num_hidden_layers=8,
        parallel__pipeline=2,
        engine__megatron={**keys, "virtual_pipeline_model_parallel_size": 2},
    )
    assert again(virtual) == pytest.approx(forward(plan).blocks * 4 / 8, rel=1e-12)


def test_a_peak_is_of_a_known_gpu_in_16_bits() -> None:
    bf16 = {"precision__name": Precision.bf16, "zero__stage": 1}
    assert peak_flops(planned(h100s(4), **bf16)) == 989.4e12
    assert without_utilisation(planned(h100s(4), **bf16)) is None
    for world, changes, reason in (
        (h100s(4), {}, "precision=fp32"),
        (replace(h100s(4), gpu=None), bf16, "cluster.gpu"),
        (CPU, {}, "CPUs"),
    ):
        plan = planned(world, **changes)
        assert peak_flops(plan) is None
        assert reason in (without_utilisation(plan) or "")


# ---- other tools


@pytest.mark.parametrize("name", MODELS)
def test_the_guide_has_other_tools_conventions_in_numbers(name: str) -> None:
    """Each line of its table: GFLOPs a token of training, and its difference to ours."""
    table = {
        match[1]: match[2]
        for match in re.finditer(r"^\| ([^|]+?) \| (.+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for convention in CONVENTIONS:
        assert table[convention].split(" | ")[list(MODELS).index(name)] == cell(convention, name), (
            convention,
            name,
        )


def test_our_count_is_the_plans() -> None:
    for name, model in MODELS.items():
        config = run_config(model=PUBLISHED[model], train__sequence_length=LENGTH[name])
        assert model_flops(make_plan(config, CPU)) == pytest.approx(flops("this toolkit", name), rel=1e-12)
