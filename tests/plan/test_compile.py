"""What is compiled, and which runs cannot be compiled or compute in fp8.

pytest tests/plan/test_compile.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.kernels import CompileBackend, CompileMode
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.errors import PlanError
from toolkit.plan import make_plan
from toolkit.plan.rules_compile import INSTALL
from toolkit.plan.types import World

LAYERS: dict[str, Any] = {"compile__mode": CompileMode.layers}
FULL: dict[str, Any] = {"compile__mode": CompileMode.full}
FP8: dict[str, Any] = {"precision__name": Precision.bf16, "precision__fp8": True}
MEGATRON: dict[str, Any] = {"engine__name": EngineName.megatron}
EXPERTS: dict[str, Any] = {
    "model__family": "mixtral",
    "model__num_local_experts": 4,
    "model__num_experts_per_tok": 2,
}
GPUS = h100s(2)
NO_TRITON = replace(GPUS, lacking_for_compile=("triton",))


def refusals(world: World, **changes: Any) -> list[tuple[str, str]]:
    """Keys with values, and remedies, of the problems with compile and precision."""
    try:
        make_plan(run_config(**changes), world)
    except PlanError as error:
        return [
            (each.seen, each.remedy)
            for each in error.problems
            if each.key in ("compile.mode", "precision.fp8")
        ]
    return []


@pytest.mark.parametrize(
    ("world", "changes", "name", "word"),
    [
        (CPU, {}, "none", "CPUs"),
        (GPUS, {}, "layers", "one graph"),
        (GPUS, {"zero__stage": 3}, "layers", "one graph"),
        (GPUS, {"parallel__pipeline": 2}, "layers", "one graph"),
        (GPUS, {"parallel__tensor": 2, "zero__stage": 1}, "layers", "one graph"),
        (GPUS, {"compile__mode": CompileMode.none}, "none", "compile.mode=none"),
        (GPUS, FULL, "full", "compile.mode=full"),
        (CPU, LAYERS, "layers", "compile.mode=layers"),
        (GPUS, MEGATRON, "none", "Megatron-core"),
        (GPUS, EXPERTS, "layers", "one graph"),
        (GPUS, EXPERTS | {"model__router_aux_loss_coef": 0.01}, "none", "routers"),
        (GPUS, EXPERTS | {"parallel__expert": 2, "zero__stage": 1}, "none", "experts"),
        (NO_TRITON, {}, "none", "triton"),
        (replace(CPU, lacking_for_compile=("triton",)), LAYERS, "layers", "compile.mode"),
        (GPUS, {"model__family": None, "model__target": "my.Model"}, "none", "compile=layers"),
    ],
)
def test_the_plan_chooses_what_is_compiled(
    world: World, changes: dict[str, Any], name: str, word: str
) -> None:
    choice = make_plan(run_config(**changes), world).kernels.compile
    assert choice.name == name
    assert word in choice.reason


@pytest.mark.parametrize(
    ("world", "changes", "word", "remedy"),
    [
        (GPUS, LAYERS | MEGATRON, "megatron", "compile=none"),
        (GPUS, FULL | {"zero__stage": 3}, "zero.stage=3", "compile=layers"),
        (GPUS, FULL | {"parallel__tensor": 2}, "parallel.tensor=2", "compile=layers"),
        (GPUS, FULL | {"parallel__pipeline": 2}, "parallel.pipeline=2", "compile=layers"),
        (
            GPUS,
            LAYERS | EXPERTS | {"parallel__expert": 2, "zero__stage": 1},
            "parallel.expert=2",
            "compile=none",
        ),
        (GPUS, LAYERS | EXPERTS | {"model__router_aux_loss_coef": 0.01}, "coef=0.01", "compile=none"),
        (
            replace(GPUS, has_libaio=True),
            LAYERS
            | {
                "zero__stage": 3,
                "offload__parameters": OffloadDevice.nvme,
                "offload__optimizer": OffloadDevice.nvme,
                "offload__nvme_path": "/nvme",
            },
            "nvme",
            "offload=cpu",
        ),
        (NO_TRITON, LAYERS, "inductor", "pip install triton"),
        (replace(CPU, lacking_for_compile=("a C++ compiler",)), LAYERS, "inductor", "install g++"),
        (h100s(2), FP8 | {"precision__name": Precision.fp32}, "precision.name=fp32", "precision=fp8"),
        (replace(GPUS, gpu="a100-80gb"), FP8 | {"zero__stage": 1}, "a100-80gb", "precision=bf16"),
        (
            replace(GPUS, transformer_engine=None),
            FP8 | MEGATRON,
            "engine.name=megatron",
            "transformer-engine",
        ),
        (GPUS, FP8 | {"zero__stage": 3}, "zero.stage=3", "zero=stage2"),
        (GPUS, FP8 | {"zero__stage": 1, "parallel__tensor": 2}, "parallel.tensor=2", "parallel.tensor=1"),
        (GPUS, FP8 | EXPERTS | {"zero__stage": 1}, "mixtral", "precision=bf16"),
        (
            GPUS,
            FP8 | {"zero__stage": 1, "model__family": "gpt2", "model__num_key_value_heads": None},
            "gpt2",
            "bf16",
        ),
    ],
)
def test_impossible_runs_are_refused(world: World, changes: dict[str, Any], word: str, remedy: str) -> None:
    found = refusals(world, **changes)
    assert any(word in seen and remedy in text for seen, text in found), found


def test_a_run_without_inductor_needs_no_compiler() -> None:
    world = replace(GPUS, lacking_for_compile=tuple(INSTALL))
    assert refusals(world, **LAYERS)
    assert not refusals(world, **LAYERS, compile__backend=CompileBackend.aot_eager)


def test_fp8_is_planned_where_it_works() -> None:
    assert make_plan(run_config(**FP8, zero__stage=1), GPUS).deepspeed is not None
    plan = make_plan(run_config(**FP8, **MEGATRON), replace(GPUS, transformer_engine="2.10.0"))
    assert plan.megatron is not None
    assert plan.megatron["transformer"]["fp8"] == "hybrid"
    warned = make_plan(run_config(**FP8, zero__stage=1), CPU).warnings
    assert [each.rule for each in warned if each.key == "precision.fp8"]
