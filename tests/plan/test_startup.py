"""What the machine must have: Transformer Engine, nvcc; the choice of layers and of the optimizer kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config import engine_keys, engine_keys_deepspeed, engine_keys_megatron
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.errors import PlanError, Problem, Severity
from toolkit.estimate.plan_report import kernel_choices
from toolkit.plan import make_plan
from toolkit.plan.transformer_engine import fits_megatron, install_command
from toolkit.plan.types import World

GPUS = replace(h100s(2), transformer_engine=None)
MEGATRON = {"engine__name": EngineName.megatron}


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.8.0", False),
        ("2.9.0", True),
        ("2.9.0.dev0+5228986c", True),
        ("2.11.0+cu13", True),
        ("2.12.0", False),
        ("2.20.2", False),
        ("unknown", False),
    ],
)
def test_range_of_transformer_engine(version: str, fits: bool) -> None:
    assert fits_megatron(version) is fits
    plan = make_plan(run_config(**MEGATRON), replace(GPUS, transformer_engine=version))
    assert plan.kernels.layers.name == ("transformer-engine" if fits else "megatron-core")
    assert plan.kernels.optimizer.name == "transformer-engine", "Megatron-core imports it at any version"
    assert [problem.key for problem in plan.warnings] == ([] if fits else ["engine.name"])
    assert fits or version in plan.warnings[0].seen


def test_slow_layers_are_a_warning_with_cost_and_remedy() -> None:
    plan = make_plan(run_config(**MEGATRON), replace(GPUS, torch_cuda="12.8"))
    (warning,) = plan.warnings
    assert warning.severity is Severity.WARNING
    assert "FP8" in warning.rule
    command = "pip install --no-build-isolation 'transformer-engine[core_cu12,pytorch]>=2.9,<2.12'"
    assert command in warning.remedy
    assert "core_cu13" in install_command("13.0")
    assert dict(kernel_choices(plan))["layers"].reason.endswith("Transformer Engine is not installed")


def test_other_engines_and_cpus_do_not_need_transformer_engine() -> None:
    assert not make_plan(run_config(), GPUS).warnings
    plan = make_plan(run_config(**MEGATRON), CPU)
    assert not plan.warnings
    assert plan.kernels.layers.name == "megatron-core"
    assert plan.kernels.optimizer.name == "torch"


def test_settings_of_transformer_engine_need_it() -> None:
    config = run_config(**MEGATRON, engine__megatron={"apply_rope_fusion": True})
    with pytest.raises(PlanError, match="apply_rope_fusion=true") as raised:
        make_plan(config, GPUS)
    assert "transformer-engine[core,pytorch]" in raised.value.problems[0].remedy
    make_plan(config, replace(GPUS, transformer_engine="2.11.0"))


NVME = {
    "zero__stage": 3,
    "offload__optimizer": OffloadDevice.nvme,
    "offload__parameters": OffloadDevice.nvme,
    "offload__nvme_path": "/nvme",
}
QUANTISED = {"zero__stage": 3, "zero__quantized_weights": True, "precision__name": Precision.bf16}


def errors(changes: dict[str, Any], world: World) -> list[Problem]:
    try:
        make_plan(run_config(**changes), world)
    except PlanError as error:
        return [problem for problem in error.problems if problem.severity is Severity.ERROR]
    return []


@pytest.mark.parametrize("changes", [NVME, QUANTISED])
@pytest.mark.parametrize(
    ("world", "seen"),
    [
        (replace(GPUS, has_nvcc=False, torch_cuda="13.0"), "no nvcc, and torch was built with CUDA 13.0"),
        (replace(GPUS, has_nvcc=False, nvcc="12.4", torch_cuda="13.0"), "nvcc of CUDA 12.4, and torch"),
    ],
)
def test_kernels_that_need_nvcc_are_refused_without_it(
    changes: dict[str, Any], world: World, seen: str
) -> None:
    (problem,) = errors(changes, world)
    assert seen in problem.seen
    assert "the CUDA toolkit 13.0" in problem.remedy
    assert "CUDA_HOME" in problem.remedy
    assert not errors(changes, replace(world, has_nvcc=True))


def test_nvme_on_cpus_and_cpu_adam_do_not_need_nvcc() -> None:
    """The CPU builds of DeepSpeed's kernels are plain C++."""
    assert not errors(NVME, CPU)
    assert not errors(
        {"zero__stage": 2, "offload__optimizer": OffloadDevice.cpu}, replace(GPUS, has_nvcc=False)
    )


def leaves(section: str) -> list[str]:
    """The keys of DeepSpeed below ``section``, or itself."""
    node = engine_keys.DEEPSPEED.known()
    for part in section.split("."):
        node = (node.fields or {})[part]
    return [f"{section}.{name}" for name in node.fields] if node.fields else [section]


@pytest.mark.parametrize("section", engine_keys_deepspeed.NO_EFFECT)
def test_deepspeed_keys_without_effect_are_refused(section: str) -> None:
    for name in leaves(section):
        written: Any = 1
        for part in reversed(name.split(".")):
            written = {part: written}
        (problem,) = engine_keys.problems(run_config(engine__deepspeed=written))
        assert problem.key == f"engine.deepspeed.{name}"
        assert problem.remedy


@pytest.mark.parametrize(
    "name",
    [
        "tp_comm_overlap",
        "tp_comm_bulk_wgrad",
        "tp_comm_bulk_dgrad",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_disable_fc1",
        "tp_comm_bootstrap_backend",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_use_single_mempool",
        "cuda_graph_retain_backward_graph",
        "cuda_graph_warmup_steps",
        "use_te_rng_tracker",
        "pipeline_model_parallel_comm_backend",
        "hierarchical_context_parallel_sizes",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "memory_efficient_layer_norm",
        "batch_invariant_mode",
    ],
)
def test_megatron_keys_without_effect_are_refused(name: str) -> None:
    """Only Megatron-LM's training loop reads them, or modules that the engine replaces."""
    assert name in engine_keys_megatron.DERIVED
    (problem,) = engine_keys.problems(run_config(**MEGATRON, engine__megatron={name: 1}))
    assert problem.key == f"engine.megatron.{name}"


@pytest.mark.parametrize(
    ("key", "value", "offload"),
    [
        ("aio", {"queue_depth": 32}, NVME),
        (
            "zero_optimization",
            {"offload_optimizer": {"buffer_count": 5}},
            {"zero__stage": 3, "offload__optimizer": OffloadDevice.cpu},
        ),
        ("zero_optimization", {"offload_param": {"buffer_count": 6}}, NVME),
    ],
)
def test_settings_of_offload_need_offload(key: str, value: Any, offload: dict[str, Any]) -> None:
    own = {"engine__deepspeed": {key: value}}
    (problem,) = errors({"zero__stage": 3, **own}, CPU)
    assert problem.key.startswith(f"engine.deepspeed.{key}")
    assert "offload" in problem.remedy
    assert not errors({**offload, **own}, CPU)
