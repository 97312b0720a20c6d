"""Whole plans, their JSON and table, worlds of up to 1,024 ranks, and names of GPUs.

pytest tests/plan/test_make.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.estimate.plan_report import format_plan, to_json
from toolkit.families import PUBLISHED
from toolkit.layout.axes import Axes
from toolkit.plan import make_plan
from toolkit.plan.devices import GPUS, find_gpu, normalise_gpu_name
from toolkit.plan.flops import flops_per_step
from toolkit.plan.types import World


@pytest.mark.parametrize("ranks", [1, 8, 64, 1024])
def test_plan_scales_to_many_ranks(ranks: int) -> None:
    config = run_config(
        model=PUBLISHED["llama-3-8b"],
        data__name="prepared",
        zero__stage=3,
        precision__name=Precision.bf16,
        train__global_batch=2048,
        train__micro_batch=1,
    )
    plan = make_plan(config, replace(h100s(ranks), gpu="b200"))
    assert plan.axes == Axes(data=ranks)
    assert plan.world.nodes == max(1, ranks // 8)
    assert plan.deepspeed is not None
    assert plan.deepspeed["gradient_accumulation_steps"] == 2048 // ranks
    assert plan.units_per_step == 2048 * 32


def test_run_directory_is_named_after_the_identity() -> None:
    plan = make_plan(run_config(), CPU)
    assert len(plan.identity) == 8
    assert plan.run_dir == f"runs/run-{plan.identity}"
    assert make_plan(run_config(zero__stage=3), replace(CPU, ranks=4)).run_dir == plan.run_dir
    assert make_plan(run_config(train__seed=7), CPU).run_dir != plan.run_dir
    assert make_plan(run_config(run__dir="elsewhere"), CPU).run_dir == "elsewhere"


def test_plan_of_a_target_model_has_no_sizes() -> None:
    config = run_config(model=ModelConfig(target="my.package.Model"))
    plan = make_plan(config, CPU)
    assert (plan.shape, plan.parameters, plan.memory, flops_per_step(plan)) == (None, (), None, None)
    assert plan.deepspeed is not None
    assert "reduce_bucket_size" not in plan.deepspeed["zero_optimization"]


def test_plan_json_has_stable_keys_and_plain_types() -> None:
    for config in (
        run_config(zero__stage=2),
        run_config(model=ModelConfig(target="my.Model")),
        run_config(engine__name=EngineName.megatron),
    ):
        found = to_json(make_plan(config, CPU))
        assert json.loads(json.dumps(found)) == found
        assert set(found) == {
            "format_version",
            "trace",
            "run_dir",
            "identity",
            "engine",
            "world",
            "axes",
            "batch",
            "model",
            "parameters",
            "flops_per_step",
            "flops",
            "step_seconds",
            "step_unknown",
            "cost",
            "goodput",
            "budget",
            "memory",
            "kernels",
            "saves",
            "verdict",
            "device_memory_bytes",
            "not_compared",
            "deepspeed",
            "megatron",
            "warnings",
        }


def test_plan_json_has_flops_constants() -> None:
    plan = make_plan(
        run_config(precision__name=Precision.bf16, zero__stage=1, train__activation_checkpointing="full"),
        h100s(2),
    )
    found = to_json(plan)
    assert found["flops"]["model_per_token"] * 8 * 32 == found["flops_per_step"]
    assert 1.1 < found["flops"]["hardware_per_token"] / found["flops"]["model_per_token"] < 4 / 3
    assert found["flops"]["peak_per_gpu"] == 989.4e12
    unknown = to_json(make_plan(run_config(model=ModelConfig(target="my.Model")), CPU))
    assert unknown["flops"] == {"model_per_token": None, "hardware_per_token": None, "peak_per_gpu": None}


def test_flops_per_step_equal_the_closed_form() -> None:
    plan = make_plan(run_config(model=PUBLISHED["gpt2"], train__sequence_length=1024), CPU)
    batch, layers, hidden, vocab, sequence = 8, 12, 768, 50257, 1024
    expected = (
        72
        * batch
        * sequence
        * layers
        * hidden**2
        * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    )
    assert flops_per_step(plan) == pytest.approx(expected, rel=1e-12)


def shown(config: RunConfig, world: World) -> str:
    out = StringIO()
    Console(width=140, file=out).print(format_plan(make_plan(config, world)))
    return out.getvalue()


def test_table_shows_layout_memory_and_compute() -> None:
    text = shown(
        run_config(
            model=PUBLISHED["gpt2"], zero__stage=2, precision__name=Precision.bf16, train__global_batch=64
        ),
        h100s(8),
    )
    for word in (
        "8 x h100 on 1 node",
        "data 8",
        "124,439,808 parameters",
        "accumulation 4",
        "2,048 a step",
        "optimizer",
        "of 85.5",
        "reduce_bucket_size",
        "a token",
        "TFLOP/s a GPU, MFU",
        "of 989.4 TFLOP/s a GPU, the dense 16-bit peak of h100",
    ):
        assert word in text, word
    assert "warning" not in text
    assert "warning: precision.name=fp16" in shown(
        run_config(precision__name=Precision.fp16, zero__stage=1), CPU
    )
    megatron = shown(run_config(engine__name=EngineName.megatron, zero__stage=1), CPU)
    for word in ("Megatron-core gets", "use_distributed_optimizer", "distributed optimizer: states sharded"):
        assert word in megatron, word
    assert "no estimate: the layers of a model without a family (model.target)" in shown(
        run_config(model=ModelConfig(target="my.Model")), CPU
    )
    assert "unknown" not in shown(run_config(engine__name=EngineName.local), replace(CPU, ranks=1))
    assert "with recomputation" in shown(run_config(train__activation_checkpointing="full"), CPU)
    assert "none: the peak of a GPU" in shown(run_config(), h100s(2))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("h100", "h100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100", None),
        ("GeForce RTX 9090", None),
        ("", None),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        # variants of those above with other peaks
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("MIG", None),
    ],
)
def test_gpu_names_of_drivers_are_recognised(name: str, key: str | None) -> None:
    assert normalise_gpu_name(name) == key
    assert find_gpu(name) is (GPUS[key] if key else None)


def test_gpu_keys_normalise_to_themselves() -> None:
    assert [normalise_gpu_name(key) for key in GPUS] == list(GPUS)
