"""The utilisation of published runs, computed from their sizes and step times.

    pytest tests/monitor/test_published_runs.py

- A100, Megatron-LM: Korthikanti et al., 2205.05198, table 5: seconds per iteration, MFU and HFU with
  selective recomputation.
- H100, Megatron-LM: README of Megatron-LM with mcore 0.8: TFLOP/s per GPU and MFU. The seconds per
  iteration follow from its formula (12 l h^2 (...), with the whole attention matrix; Narayanan et al.,
  2104.04473).
- H100, llm-foundry: scripts/train/benchmarking/README.md: tokens per second, MFU and HFU, parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.plan.cases import run_config
from tests.plan.conventions import llm_foundry, megatron_lm_2024, megatron_lm_2025
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName, Precision
from toolkit.monitor.throughput import Throughput
from toolkit.plan import make_plan
from toolkit.plan.flops import hardware_flops, model_flops
from toolkit.plan.types import Device, RunPlan, World

POINT = 0.01


def planned(
    gpu: str,
    gpus: int,
    *,
    hidden: int,
    layers: int,
    heads: int,
    length: int,
    vocabulary: int,
    batch: int,
    **changes: Any,
) -> RunPlan:
    model = ModelConfig(
        family="gpt2",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
    )
    config = run_config(
        model=model,
        train__sequence_length=length,
        train__global_batch=batch,
        train__micro_batch=1,
        precision__name=Precision.bf16,
        zero__stage=1,
        **changes,
    )
    world = World(
        ranks=gpus,
        ranks_per_node=8,
        device=Device.CUDA,
        gpu=gpu,
        has_compiler=True,
        device_memory_bytes=10**15,
    )  # the published runs fitted
    return make_plan(config, world)


def speed(plan: RunPlan, seconds: float) -> dict[str, float]:
    samples = plan.batch.global_batch
    units = samples * plan.units_per_sample
    return Throughput.from_plan(plan).row(samples=samples, units=units, computed=units, seconds=seconds)


# ---- Korthikanti et al.


A100 = {  # hidden, layers, heads, pipeline, GPUs, batch, seconds, MFU, HFU
    "22B": (6144, 48, 64, 1, 8, 4, 1.10, 0.415, 0.437),
    "175B": (12288, 96, 96, 8, 64, 64, 13.75, 0.514, 0.528),
    "530B": (20480, 105, 128, 35, 280, 280, 37.83, 0.560, 0.570),
    "1T": (25600, 128, 160, 64, 512, 512, 71.49, 0.563, 0.570),
}


def first_quick(names: Iterable[str]) -> list[Any]:
    """Mark all names but the first as part of the full suite."""
    first, *rest = names
    return [first, *(pytest.param(name, marks=pytest.mark.full) for name in rest)]


@pytest.mark.parametrize("name", first_quick(A100))
def test_selective_recomputation_on_a100(name: str) -> None:
    hidden, layers, heads, pipeline, gpus, batch, seconds, mfu, hfu = A100[name]
    plan = planned(
        "a100-80gb",
        gpus,
        hidden=hidden,
        layers=layers,
        heads=heads,
        length=2048,
        vocabulary=51200,
        batch=batch,
        engine__name=EngineName.megatron,
        engine__megatron={"recompute_granularity": "selective"},
        parallel__tensor=8,
        parallel__pipeline=pipeline,
    )
    found = speed(plan, seconds)
    assert found["mfu"] == pytest.approx(mfu, abs=POINT / 2)
    # The published HFU has s/3h and the MFU s/6h in 72 B l s h^2 (1 + s/6h + V/12lh), which counts forward
    # and backward of the attention matrix twice. Only its forward pass, a third of that, is recomputed.
    share = 2048 / (6 * hidden) / (1 + 2048 / (6 * hidden) + 51200 / (12 * layers * hidden))
    assert found["hfu"] / found["mfu"] == pytest.approx(1 + share / 3, rel=1e-9)
    assert found["mfu"] * (1 + share) == pytest.approx(hfu, abs=POINT / 2)
    assert found["hfu"] == pytest.approx(hfu - 2 / 3 * share * mfu, abs=POINT / 2)


# ---- Megatron-LM on H100


H100 = {  # hidden, layers, heads, tensor, pipeline, GPUs, batch, TFLOP/s, MFU
    "h4096": (4096, 30, 32, 2, 1, 96, 192, 465.9, 0.47),
    "h8192": (8192, 84, 64, 8, 2, 768, 384, 419.7, 0.42),
    "h12288": (12288, 96, 96, 8, 6, 2304, 1152, 432.8, 0.44),
}


def megatron_on_h100(name: str) -> tuple[RunPlan, float]:
    """Return the plan and the seconds of an iteration."""
    hidden, layers, heads, tensor, pipeline, gpus, batch, tera, _ = H100[name]
    plan = planned(
        "h100",
        gpus,
        hidden=hidden,
        layers=layers,
        heads=heads,
        length=4096,
        vocabulary=131072,
        batch=batch,
        engine__name=EngineName.megatron,
        parallel__tensor=tensor,
        parallel__pipeline=pipeline,
    )
    narayanan = (
        72 * batch * 4096 * layers * hidden**2 * (1 + 4096 / (6 * hidden) + 131072 / (12 * layers * hidden))
    )
    assert plan.shape is not None
    assert megatron_lm_2024(plan.shape, 4096) * batch * 4096 == pytest.approx(narayanan, rel=1e-9)
    return plan, narayanan / (tera * 1e12 * gpus)


@pytest.mark.parametrize("name", first_quick(H100))
def test_megatron_lm_on_h100(name: str) -> None:
    plan, seconds = megatron_on_h100(name)
    found = speed(plan, seconds)
    tera, mfu = H100[name][-2:]
    assert found["model_tflops_per_gpu"] == pytest.approx(tera, rel=1e-9)
    assert found["mfu"] == pytest.approx(mfu, abs=POINT)


@pytest.mark.parametrize(("name", "points"), [("h4096", 3.1), ("h8192", 1.6), ("h12288", 1.1)])
def test_half_attention_matrix_lowers_mfu(name: str, points: float) -> None:
    """Later versions of Megatron-LM would report lower MFU for the same runs."""
    plan, seconds = megatron_on_h100(name)
    assert plan.shape is not None
    theirs = megatron_lm_2025(plan.shape, 4096) * plan.units_per_step / seconds / plan.world.ranks / 989.4e12
    assert 100 * (speed(plan, seconds)["mfu"] - theirs) == pytest.approx(points, abs=0.05)


# ---- llm-foundry on H100


MPT = {  # hidden, layers, heads, length, GPUs, batch, checkpointing, tokens a second, MFU, HFU, parameters
    "7b": (4096, 32, 32, 2048, 8, 48, False, 85144, 0.4644, 0.4644, 6658859008),
    "13b": (5120, 40, 40, 4096, 8, 240, True, 37740, 0.4160, 0.5547, 12864440320),
    "30b": (7168, 48, 64, 8192, 8, 168, True, 11072, 0.2992, 0.3990, 30019254272),
}


@pytest.mark.parametrize("name", first_quick(MPT))
def test_llm_foundry_on_h100(name: str) -> None:
    """llm-foundry counts all parameters, including position embeddings and biases: up to 0.5% of the FLOPs.

    Its HFU is 4/3 of the MFU; ours recomputes neither the head nor the last matrix of each block.
    """
    hidden, layers, heads, length, gpus, batch, checkpointing, tokens, mfu, hfu, parameters = MPT[name]
    plan = planned(
        "h100",
        gpus,
        hidden=hidden,
        layers=layers,
        heads=heads,
        length=length,
        vocabulary=50368,
        batch=batch,
        train__activation_checkpointing=checkpointing,
    )
    assert sum(spec.numel for spec in plan.parameters) == parameters
    found = speed(plan, batch * length / tokens)
    assert found["mfu"] == pytest.approx(mfu, abs=POINT)
    assert plan.shape is not None
    theirs, ours, done = llm_foundry(plan.shape, length), model_flops(plan), hardware_flops(plan)
    assert ours is not None
    assert done is not None
    assert found["mfu"] * theirs / ours == pytest.approx(mfu, rel=0.001)
    if checkpointing:
        assert found["mfu"] * theirs / ours * 4 / 3 == pytest.approx(hfu, rel=0.001)
        assert found["hfu"] == pytest.approx(hfu * done / (theirs * 4 / 3), rel=0.001)
        assert 0.02 < hfu - found["hfu"] < 0.06
    else:
        assert "hfu" not in found
