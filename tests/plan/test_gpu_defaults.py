"""Defaults of both engines on GPUs: the plan decides them, only there, and the user's keys win.

pytest tests/plan/test_gpu_defaults.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.engine_keys_megatron import sections
from toolkit.config.schema import EngineName, Precision
from toolkit.config.vendors import installed
from toolkit.config.vendors.key_schema import KeySchema
from toolkit.families import get_family
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan, World

NODE = replace(h100s(8), transformer_engine=None)
WITH_TE = replace(NODE, transformer_engine="2.11.0")
BF16 = {"precision__name": Precision.bf16}
LARGE = {"model__hidden_size": 4096, "model__intermediate_size": 14336, "model__num_hidden_layers": 8}


def plan_of(world: World = NODE, **changes: Any) -> RunPlan:
    return make_plan(run_config(**{"train__global_batch": 4 * world.ranks, **changes}), world)


def megatron(world: World = NODE, **changes: Any) -> dict[str, dict[str, Any]]:
    found = plan_of(world, engine__name=EngineName.megatron, **changes).megatron
    assert found is not None
    return {name: dict(section) for name, section in found.items()}


def zero(world: World = NODE, **changes: Any) -> dict[str, Any]:
    found = plan_of(world, **{**BF16, "zero__stage": 2, **changes}).deepspeed
    assert found is not None
    return dict(found["zero_optimization"])


def wrong_keys(section: Mapping[str, Any], schema: KeySchema) -> list[str]:
    """Keys that the installed package does not have, or not with this value."""
    fields = schema.fields or {}
    return [
        name
        for name, value in section.items()
        if name not in fields or fields[name].broken_rule(value) is not None
    ]


# -- Megatron-core

FUSED = ("bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion")


def test_megatron_fuses_without_transformer_engine() -> None:
    found = megatron(**BF16)["transformer"]
    assert [found[name] for name in FUSED] == [True, True, True]
    assert not {"apply_rope_fusion", "moe_grouped_gemm", "moe_permute_fusion"} & found.keys()


def test_transformer_engine_adds_its_kernels() -> None:
    dense = megatron(WITH_TE, **BF16)["transformer"]
    assert dense["apply_rope_fusion"]
    assert "moe_grouped_gemm" not in dense
    experts = megatron(
        WITH_TE, **BF16, model__family="mixtral", model__num_local_experts=4, model__num_experts_per_tok=2
    )["transformer"]
    assert [experts[name] for name in ("moe_grouped_gemm", "moe_permute_fusion")] == [True, True]
    newer = megatron(replace(NODE, transformer_engine="2.14.0"), **BF16)["transformer"]
    assert "apply_rope_fusion" not in newer, "Megatron-core's range ends below"
    positions = {"model__family": "gpt2", "model__num_key_value_heads": None}
    assert not megatron(WITH_TE, **BF16, **positions)["transformer"]["apply_rope_fusion"]


def test_fusion_needs_what_torch_compile_needs_and_no_fp16() -> None:
    uncompiled = megatron(replace(NODE, lacking_for_compile=("triton",)), **BF16)["transformer"]
    assert [uncompiled[name] for name in FUSED] == [False, False, True]
    assert not megatron(precision__name=Precision.fp16)["transformer"]["gradient_accumulation_fusion"]


def test_stages_exchange_messages_without_synchronising() -> None:
    found = megatron(**BF16, parallel__pipeline=2)["transformer"]
    assert found["batch_p2p_sync"] is False
    assert found["deallocate_pipeline_outputs"] is True
    assert "batch_p2p_sync" not in megatron(**BF16)["transformer"]


def test_virtual_stages_gather_parameters_together() -> None:
    virtual = {
        "model__num_hidden_layers": 4,
        "parallel__pipeline": 2,
        "engine__megatron": {"virtual_pipeline_model_parallel_size": 2},
    }
    assert megatron(**BF16, zero__stage=1, **virtual)["ddp"]["align_param_gather"] is True
    assert "align_param_gather" not in megatron(**BF16, zero__stage=0, **virtual)["ddp"]
    assert "align_param_gather" not in megatron(**BF16, zero__stage=1, parallel__pipeline=2)["ddp"]


def test_the_users_megatron_keys_win() -> None:
    own = {"bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "overlap_grad_reduce": False}
    found = megatron(**BF16, engine__megatron=own)
    assert [found["transformer"][name] for name in FUSED] == [True, False, False]
    assert found["ddp"]["overlap_grad_reduce"] is False


@pytest.mark.parametrize(
    ("world", "expected"), [(CPU, "torch"), (NODE, "fused"), (WITH_TE, "transformer-engine")], ids=str
)
def test_megatron_optimizer_kernel(world: World, expected: str) -> None:
    assert plan_of(world, engine__name=EngineName.megatron).kernels.optimizer.name == expected


def test_megatron_defaults_on_cpus_have_no_fusion() -> None:
    found = megatron(CPU, parallel__pipeline=2)
    assert not {*FUSED, "batch_p2p_sync", "deallocate_pipeline_outputs"} & found["transformer"].keys()
    assert found["ddp"]["overlap_grad_reduce"] is False


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_megatron_has_every_default(family: str) -> None:
    schemas = sections()
    assert schemas is not None
    more = {"gpt2": {"model__num_key_value_heads": None}}.get(family, {})
    if family == "mixtral":
        more = {"model__num_local_experts": 4, "model__num_experts_per_tok": 2}
    for world in (NODE, WITH_TE):
        found = megatron(world, **BF16, model__family=family, zero__stage=1, parallel__pipeline=2, **more)
        assert get_family(family).name == family
        for name in ("transformer", "ddp", "optimizer"):
            fields = {
                key: value
                for key, value in found[name].items()
                if key not in ("activation_func", "params_dtype")
            }
            unknown = [key for key in fields if key not in schemas[name]]
            assert unknown == []


# -- DeepSpeed


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_overlap_with_small_buckets(stage: int) -> None:
    found = zero(zero__stage=stage, **LARGE)
    assert found["overlap_comm"] is True
    assert found["contiguous_gradients"] is True
    assert found["use_multi_rank_bucket_allreduce"] is True
    assert found["reduce_bucket_size"] == 40_000_000
    assert not any(name.startswith("stage3") for name in found)


def test_buckets_grow_with_the_ranks_and_not_beyond_the_model() -> None:
    assert zero(h100s(256), **LARGE)["reduce_bucket_size"] == 256_000_000
    assert zero()["reduce_bucket_size"] == 48_288


def test_stage_3_states_what_it_gathers() -> None:
    found = zero(zero__stage=3, **LARGE)
    assert found["overlap_comm"] is True
    assert found["reduce_bucket_size"] == 40_000_000
    assert found["stage3_prefetch_bucket_size"] == 50_000_000
    assert found["stage3_param_persistence_threshold"] == 100_000
    assert found["stage3_max_live_parameters"] == found["stage3_max_reuse_distance"] == 1_000_000_000
    assert zero(h100s(256), zero__stage=3, **LARGE)["stage3_prefetch_bucket_size"] == 256_000_000


def test_a_pipeline_and_a_single_rank_do_not_overlap() -> None:
    assert "overlap_comm" not in zero(zero__stage=1, parallel__pipeline=2)
    assert "overlap_comm" not in zero(h100s(1))
    assert zero(h100s(2), parallel__context=2)["overlap_comm"] is True


def test_the_users_deepspeed_keys_win() -> None:
    own = {"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 1000}}
    found = zero(**LARGE, engine__deepspeed=own)
    assert (found["overlap_comm"], found["reduce_bucket_size"]) == (False, 1000)


def test_deepspeed_defaults_on_cpus_are_its_own() -> None:
    for stage in (1, 2, 3):
        found = zero(CPU, zero__stage=stage)
        added = {"stage", "round_robin_gradients", "reduce_bucket_size", "allgather_bucket_size"}
        assert found.keys() == added


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_has_every_default(stage: int) -> None:
    schema = (installed.load_schema(installed.DEEPSPEED).fields or {})["zero_optimization"]
    used = {} if stage < 3 else {"zero__hpz_partition_size": 8, "zero__quantized_weights": True}
    assert wrong_keys(zero(h100s(16), zero__stage=stage, **used, **LARGE), schema) == []


def test_memory_counts_both_buckets_and_gathered_parameters() -> None:
    """Two buckets of 40 M elements; under ZeRO 3 one, and 1 050 M elements that are gathered."""
    memory = plan_of(**BF16, **LARGE, zero__stage=2).memory
    assert memory is not None
    assert memory.buffers == 2 * 40_000_000 * 2
    memory = plan_of(**BF16, **LARGE, zero__stage=3).memory
    assert memory is not None
    assert memory.buffers == (40_000_000 + 1_050_000_000) * 2


# -- ZeRO++


def test_zero_plus_plus_keys_reach_deepspeed() -> None:
    found = zero(h100s(16), zero__stage=3, zero__hpz_partition_size=8, zero__quantized_weights=True)
    assert found["zero_hpz_partition_size"] == 8
    assert found["zero_quantized_weights"] is True
    assert "zero_quantized_gradients" not in found
    fp16 = {"precision__name": Precision.fp16, "zero__quantized_gradients": True}
    assert zero(h100s(16), zero__stage=3, **fp16)["zero_quantized_gradients"] is True


def test_hpz_adds_a_second_partition_to_the_plans_memory() -> None:
    plain, copied = (
        plan_of(h100s(16), **BF16, **LARGE, zero__stage=3, zero__hpz_partition_size=size) for size in (1, 8)
    )
    assert plain.memory is not None
    assert copied.memory is not None
    elements = sum(spec.numel for spec in plain.parameters)
    assert copied.memory.parameters - plain.memory.parameters == elements // 8 * 2
