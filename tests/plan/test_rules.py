"""Every rule reports its problem with the value, the rule and a remedy.

pytest tests/plan/test_rules.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, SMALL, h100s, run_config
from toolkit.config.checkpoint import CheckpointConfig
from toolkit.config.cluster import ClusterBackend, ClusterConfig
from toolkit.config.data import DocumentMasking
from toolkit.config.monitor import OnWrongComputation
from toolkit.config.optim import LrScaling, OptimizerKernel, ScheduleConfig, ScheduleName
from toolkit.config.schema import (
    BatchRampConfig,
    EngineName,
    EvalConfig,
    OffloadDevice,
    OnNonfinite,
    OnSpike,
    Precision,
)
from toolkit.errors import PlanError, Problem, Severity
from toolkit.families import PUBLISHED
from toolkit.plan import make_plan
from toolkit.plan.batch import plan_batch
from toolkit.plan.deepspeed import derived_settings
from toolkit.plan.rules_engine import SILENT
from toolkit.plan.types import Device, World

MIXTRAL = replace(SMALL, family="mixtral", num_local_experts=4, num_experts_per_tok=2)
GPT2 = replace(SMALL, family="gpt2", intermediate_size=None, num_key_value_heads=None)
V100 = World(ranks=8, ranks_per_node=8, device=Device.CUDA, gpu="v100-32gb")
WSD = ScheduleName.wsd


def problems_of(changes: Mapping[str, Any], world: World = CPU) -> list[Problem]:
    try:
        return list(make_plan(run_config(**changes), world).warnings)
    except PlanError as error:
        return list(error.problems)


def test_the_base_configuration_has_no_problem() -> None:
    assert problems_of({}) == []


# changes, world, key of the problem, a part of the rule or remedy
LEAVE = {
    "monitor__computation_every": 10,
    "monitor__on_wrong_computation": OnWrongComputation.leave,
    "checkpoint": CheckpointConfig(every="100"),
}
MISTAKES: list[tuple[dict[str, Any], World, str, str]] = [
    (
        {"monitor__price_per_gpu_hour": 2.0},
        CPU,
        "monitor.price_per_gpu_hour",
        "write monitor.price_per_gpu_hour=null",
    ),
    ({"budget__usd": 5.0}, CPU, "budget.usd", "write budget.usd=null budget.gpu_hours=10"),
    ({"budget__usd": 5.0}, h100s(4), "budget.usd", "write monitor.price_per_gpu_hour=2.5"),
    ({"cluster__spare_nodes": 2}, CPU, "cluster.spare_nodes", "write cluster.repair_hours=24"),
    ({"train__global_batch": 9}, CPU, "train.global_batch", "train.global_batch=8 or train.global_batch=12"),
    (
        {"train__global_batch": 9, "train__micro_batch": None},
        CPU,
        "train.global_batch",
        "train.global_batch=8",
    ),
    (
        {"train__batch_ramp": BatchRampConfig(start=2)},
        CPU,
        "train.batch_ramp",
        "increment, samples is missing",
    ),
    (
        {"train__batch_ramp": BatchRampConfig(start=2, increment=2, samples=9)},
        CPU,
        "train.batch_ramp",
        "multiples of 4",
    ),
    (
        {"model": replace(SMALL, num_attention_heads=5)},
        CPU,
        "model.num_attention_heads",
        "model.hidden_size=35",
    ),
    ({"model": replace(SMALL, num_key_value_heads=3)}, CPU, "model.num_key_value_heads", "1, 2, 4"),
    ({"model": replace(SMALL, family=None)}, CPU, "model.family", "model.target"),
    ({"model": replace(SMALL, family="bert")}, CPU, "model.family", "gpt2"),
    ({"model__vocab_size": None}, CPU, "model.vocab_size", "needs model.vocab_size"),
    ({"data__vocab_size": 600}, CPU, "model.vocab_size", "model.vocab_size=600"),
    ({"train__sequence_length": 65}, CPU, "train.sequence_length", "train.sequence_length=64"),
    ({"model__num_local_experts": 4}, CPU, "model.num_local_experts", "mixtral"),
    ({"model__router_aux_loss_coef": 0.1}, CPU, "model.router_aux_loss_coef", "no router"),
    ({"parallel__tensor": 3}, CPU, "parallel", "divisible by tensor x pipeline x context"),
    (
        {"parallel__tensor": 8, "model__vocab_size": 513},
        h100s(8),
        "parallel.tensor",
        "model.vocab_size must be divisible",
    ),
    (
        {"parallel__tensor": 3, "model": replace(SMALL, hidden_size=48, num_attention_heads=6)},
        h100s(6, 6),
        "model.num_key_value_heads",
        "parallel.tensor=2",
    ),
    ({"parallel__tensor": 8}, h100s(16, 4), "parallel.tensor", "on one node"),
    ({"parallel__pipeline": 4}, h100s(8), "parallel.pipeline", "model.num_hidden_layers"),
    ({"parallel__pipeline": 2, "zero__stage": 2}, h100s(8), "zero.stage", "stages 0 and 1"),
    (
        {"parallel__pipeline": 2, "zero__stage": 1, "offload__optimizer": OffloadDevice.cpu},
        h100s(8),
        "offload.optimizer",
        "zero=stage3",
    ),
    (
        {"parallel__context": 2, "model": replace(MIXTRAL, router_aux_loss_coef=0.01)},
        h100s(8),
        "model.router_aux_loss_coef",
        "routes a part of each",
    ),
    (
        {"parallel__pipeline": 2, "model": replace(MIXTRAL, router_aux_loss_coef=0.01)},
        h100s(8),
        "model.router_aux_loss_coef",
        "other stages' routers",
    ),
    (
        {"parallel__pipeline": 2, "optim__name": "muon", "optim__momentum": 0.9, "optim__clip": 0.0},
        h100s(8),
        "optim.name",
        "by parameter group",
    ),
    (
        {
            "parallel__pipeline": 2,
            "precision__name": Precision.bf16,
            "zero__stage": 1,
            "train__micro_batch": 1,
        },
        h100s(8),
        "zero.stage",
        "grad_accum_dtype=fp32",
    ),
    (
        {
            "parallel__pipeline": 2,
            "zero__stage": 1,
            "engine__deepspeed": {"zero_optimization": {"overlap_comm": True}},
        },
        h100s(8),
        "engine.deepspeed.zero_optimization.overlap_comm",
        "after the last backward",
    ),
    (
        {"parallel__context": 2, "train__sequence_length": 31},
        CPU,
        "train.sequence_length",
        "train.sequence_length=32",
    ),
    ({"parallel__tensor": 2, "model": GPT2}, CPU, "parallel.tensor", "c_attn.weight is not in one"),
    ({"parallel__tensor": 2, "model": MIXTRAL}, CPU, "parallel.tensor", "mlp.gate.weight is not in one"),
    (
        {"parallel__tensor": 2, "optim__name": "muon", "optim__momentum": 0.9, "optim__clip": 0.0},
        CPU,
        "optim.name",
        "parts",
    ),
    (
        {
            "parallel__tensor": 2,
            "zero__stage": 3,
            "offload__optimizer": OffloadDevice.nvme,
            "offload__nvme_path": "/n",
        },
        CPU,
        "offload.optimizer",
        "offload=cpu",
    ),
    (
        {"parallel__tensor": 2, "zero__stage": 3, "zero__hpz_partition_size": 2},
        CPU,
        "zero.hpz_partition_size",
        "adjacent",
    ),
    (
        {"zero__stage": 3, "train__global_batch": 12, "zero__hpz_partition_size": 4},
        replace(CPU, ranks=6, ranks_per_node=6),
        "zero.hpz_partition_size",
        "partition_size=3",
    ),
    ({"zero__stage": 3, "zero__hpz_partition_size": 8}, CPU, "zero.hpz_partition_size", "partition_size=2"),
    ({"zero__stage": 2, "zero__hpz_partition_size": 2}, CPU, "zero.hpz_partition_size", "zero=stage3"),
    (
        {"zero__stage": 3, "train__global_batch": 24, "zero__hpz_partition_size": 6},
        h100s(12, 4),
        "zero.hpz_partition_size",
        "hpz_partition_size=4",
    ),
    (
        {"engine__name": EngineName.megatron, "zero__hpz_partition_size": 2},
        CPU,
        "zero.hpz_partition_size",
        "engine=deepspeed",
    ),
    ({"zero__stage": 3, "zero__quantized_weights": True}, CPU, "zero.quantized_weights", "GPUs only"),
    ({"zero__stage": 3, "zero__quantized_weights": True}, h100s(2), "zero.quantized_weights", "bf16"),
    ({"zero__stage": 3, "zero__quantized_gradients": True}, CPU, "zero.quantized_gradients", "GPUs only"),
    (
        {"zero__stage": 3, "zero__quantized_gradients": True, "precision__name": Precision.bf16},
        h100s(2),
        "zero.quantized_gradients",
        "silently corrupted",
    ),
    (
        {"zero__stage": 3, "zero__quantized_gradients": True, "precision__name": Precision.fp16},
        h100s(2),
        "zero.quantized_gradients",
        "no effect",
    ),
    (
        {"parallel__tensor": 4, "train__global_batch": 2},
        replace(CPU, ranks=4, ranks_per_node=4),
        "model.num_key_value_heads",
        "engine=megatron",
    ),
    (
        {"parallel__context": 3, "train__sequence_length": 33, "train__global_batch": 2},
        replace(CPU, ranks=3, ranks_per_node=3),
        "parallel.context",
        "num_attention_heads",
    ),
    ({"parallel__expert": 2, "model": MIXTRAL, "zero__stage": 3}, CPU, "zero.stage", "zero=stage1"),
    (
        {
            "parallel__expert": 2,
            "model": MIXTRAL,
            "zero__stage": 2,
            "engine__deepspeed": {"zero_optimization": {"reduce_scatter": False}},
        },
        CPU,
        "engine.deepspeed.zero_optimization.reduce_scatter",
        "leave",
    ),
    (
        {"parallel__tensor": 2, "parallel__context": 2, "zero__stage": 1},
        h100s(4),
        "parallel.tensor",
        "engine=megatron",
    ),
    ({"parallel__expert": 2}, CPU, "parallel.expert", "model with experts"),
    *(
        (
            {"engine__name": engine, "model": replace(MIXTRAL, num_experts_per_tok=1)},
            replace(CPU, ranks=1, ranks_per_node=1),
            "model.num_experts_per_tok",
            "write model.num_experts_per_tok=2",
        )
        for engine in EngineName
    ),
    (
        {"model": replace(MIXTRAL, num_local_experts=1, num_experts_per_tok=1)},
        CPU,
        "model.num_experts_per_tok",
        "model.num_local_experts=8 model.num_experts_per_tok=2",
    ),
    ({"parallel__expert": 3, "model": MIXTRAL}, CPU, "parallel.expert", "model.num_local_experts"),
    ({"parallel__expert": 4, "model": MIXTRAL}, CPU, "parallel.expert", "regroups"),
    (
        {"model": replace(MIXTRAL, intermediate_size=130)},
        CPU,
        "model.intermediate_size",
        "model.intermediate_size=132",
    ),
    (
        {"parallel__tensor": 2, "train__micro_batch": 1},
        h100s(8),
        "parallel.tensor",
        "without model parallelism",
    ),
    ({"engine__name": EngineName.megatron, "zero__stage": 3}, CPU, "zero.stage", "engine=deepspeed"),
    ({"engine__name": EngineName.local}, CPU, "engine.name", "one process"),
    ({"precision__name": Precision.bf16}, CPU, "zero.stage", "zero=stage1"),
    ({"precision__name": Precision.fp16}, h100s(2), "zero.stage", "zero=stage1"),
    ({"precision__name": Precision.bf16, "zero__stage": 1}, V100, "precision.name", "precision=fp16"),
    ({"precision__name": Precision.fp16, "zero__stage": 1}, CPU, "precision.name", "slow on CPUs"),
    ({"model": PUBLISHED["gpt2"], "zero__stage": 1}, h100s(2), "precision.name", "precision=bf16"),
    ({"precision__name": Precision.bf16, "zero__stage": 1}, CPU, "zero.stage", "zero=stage2"),
    ({"offload__parameters": OffloadDevice.cpu, "zero__stage": 2}, CPU, "offload.parameters", "zero=stage3"),
    ({"offload__optimizer": OffloadDevice.cpu}, CPU, "offload.optimizer", "zero=stage1"),
    (
        {"offload__optimizer": OffloadDevice.nvme, "offload__nvme_path": "/n", "zero__stage": 2},
        CPU,
        "offload.optimizer",
        "silently",
    ),
    ({"offload__optimizer": OffloadDevice.nvme, "zero__stage": 3}, CPU, "offload.nvme_path", "/local_nvme"),
    (
        {"offload__optimizer": OffloadDevice.nvme, "offload__nvme_path": "/n", "zero__stage": 3},
        replace(CPU, has_libaio=False),
        "offload.optimizer",
        "libaio-dev",
    ),
    (
        {"offload__parameters": OffloadDevice.nvme, "offload__nvme_path": "/n", "zero__stage": 3},
        replace(CPU, has_compiler=False),
        "offload.nvme_path",
        "g++",
    ),
    ({"offload__nvme_path": "/n"}, CPU, "offload.nvme_path", "offload=nvme"),
    (
        {"offload__optimizer": OffloadDevice.cpu, "engine__name": EngineName.local},
        replace(CPU, ranks=1),
        "offload.optimizer",
        "engine=deepspeed",
    ),
    ({"optim__kernel": OptimizerKernel.cpu}, CPU, "optim.kernel", "offload=cpu_optimizer"),
    (
        {"optim__kernel": OptimizerKernel.cpu, "offload__optimizer": OffloadDevice.cpu, "zero__stage": 2},
        replace(CPU, has_compiler=False),
        "optim.kernel",
        "g++",
    ),
    ({"optim__kernel": OptimizerKernel.fused}, CPU, "optim.kernel", "on a GPU"),
    (
        {"optim__kernel": OptimizerKernel.fused, "optim__name": "sgd"},
        CPU,
        "optim.kernel",
        "sgd has no kernel fused",
    ),
    ({"optim__name": "muon"}, CPU, "optim.momentum", "0.95"),
    ({"optim__name": "muon", "optim__momentum": 0.9}, CPU, "optim.clip", "optim.clip=0"),
    ({"optim__name": "muon", "optim__momentum": 0.9, "model": GPT2}, CPU, "optim.name", "wte and wpe"),
    (
        {"optim__name": "muon", "optim__momentum": 0.9, "model": MIXTRAL},
        CPU,
        "optim.name",
        "three-dimensional",
    ),
    (
        {
            "optim__name": "muon",
            "optim__momentum": 0.9,
            "zero__stage": 3,
            "offload__optimizer": OffloadDevice.nvme,
            "offload__nvme_path": "/n",
        },
        CPU,
        "optim.name",
        "NVMe",
    ),
    ({"optim__momentum": 0.9}, CPU, "optim.momentum", "optim.betas=[0.9,0.95]"),
    ({"optim__lr_scaling": LrScaling.sqrt}, CPU, "optim.lr_reference_batch", "optim.lr_reference_batch=8"),
    (
        {"optim__lr_scaling": LrScaling.sqrt, "optim__lr_reference_batch": 0},
        CPU,
        "optim.lr_reference_batch",
        "at least one",
    ),
    ({"optim__lr_reference_batch": 8}, CPU, "optim.lr_reference_batch", "lr_scaling only"),
    ({"schedule": ScheduleConfig(name=WSD)}, CPU, "schedule.decay", "schedule.decay=10"),
    ({"schedule": ScheduleConfig(name=WSD, warmup=60, decay=60)}, CPU, "schedule.decay", "schedule.decay=40"),
    ({"schedule__warmup": 100}, CPU, "train.steps", "never reaches the peak"),
    (
        {"schedule": ScheduleConfig(name=ScheduleName.constant, decay=5)},
        CPU,
        "schedule.decay",
        "does not decay",
    ),
    ({"schedule__min_lr": 1.0}, CPU, "schedule.min_lr", "schedule.min_lr=3e-05"),
    ({"eval": EvalConfig(every=10, sets=[])}, CPU, "eval.sets", "eval.every=0"),
    ({"eval": EvalConfig(every=10, sets=["validation", "validation"])}, CPU, "eval.sets", "once"),
    (
        {"checkpoint": CheckpointConfig(every="never", at_end=False)},
        CPU,
        "checkpoint.every",
        "checkpoint.at_end=true",
    ),
    (
        {"checkpoint": CheckpointConfig(every="40", keep_every=100)},
        CPU,
        "checkpoint.keep_every",
        "checkpoint.keep_every=120",
    ),
    (
        {"train__on_nonfinite": OnNonfinite.rollback, "checkpoint": CheckpointConfig(every="never")},
        CPU,
        "checkpoint.every",
        "train.on_nonfinite=stop",
    ),
    (
        {"train__on_spike": OnSpike.rollback, "data__name": "dataset"},
        CPU,
        "train.on_spike",
        "train.on_spike=ignore",
    ),
    (
        {"model": MIXTRAL, "monitor__computation_every": 10, "parallel__expert": 2},
        CPU,
        "monitor.computation_every",
        "write monitor.computation_every=0",
    ),
    (
        {
            "engine__name": EngineName.megatron,
            "monitor__computation_every": 10,
            "precision__name": Precision.bf16,
            "precision__fp8": True,
        },
        h100s(2),
        "monitor.computation_every",
        "Transformer Engine",
    ),
    (
        {"monitor__on_wrong_computation": OnWrongComputation.leave},
        CPU,
        "monitor.on_wrong_computation",
        "write monitor.computation_every=1000",
    ),
    *(
        ({**LEAVE, **changes}, CPU, "monitor.on_wrong_computation", word)
        for changes, word in (
            ({"checkpoint": CheckpointConfig(every="never")}, "write checkpoint.every=500"),
            ({"checkpoint": CheckpointConfig(url="s3://bucket/run")}, "leave out checkpoint.url"),
            ({"cluster": ClusterConfig(where=ClusterBackend.kubernetes)}, "on the faulty node"),
            ({"cluster": ClusterConfig(where=ClusterBackend.slurm, nodes=4)}, "write cluster.min_nodes=3"),
        )
    ),
    ({"run__fork": "other", "resume": "mine"}, CPU, "run.fork", "another run's state"),
    ({"model__target": "mine.Model"}, CPU, "model.target", "one source"),
    ({"model__target": "Model", "model__family": None}, CPU, "model.target", "dotted path"),
    (
        {"model__target": "mine.Model", "model__family": None, "train__activation_checkpointing": "full"},
        CPU,
        "train.activation_checkpointing",
        "torch.utils.checkpoint",
    ),
    (
        {"model__target": "mine.Model", "model__family": None, "offload__activations": OffloadDevice.cpu},
        CPU,
        "offload.activations",
        "save_on_cpu",
    ),
    (
        {"offload__activations": OffloadDevice.cpu},
        CPU,
        "offload.activations",
        "activation_checkpointing=full",
    ),
    ({"offload__activations": OffloadDevice.nvme}, CPU, "offload.activations", "offload.activations=cpu"),
    ({"train__activation_checkpointing": "3"}, CPU, "train.activation_checkpointing", "every N-th"),
    (
        {"model__target": "mine.Model", "model__family": None, "monitor__prompt": "def "},
        CPU,
        "monitor.prompt",
        "null",
    ),
    ({"model__arguments": {"width": 3}}, CPU, "model.arguments", "model.target"),
    (
        {"model": replace(MIXTRAL, router_aux_loss_coef=0.01)},
        CPU,
        "model.router_aux_loss_coef",
        "micro-batch",
    ),
    ({"cluster__gpu": "quantum"}, replace(h100s(2), gpu="quantum"), "cluster.gpu", "h100"),
    (
        {"cluster__gpu": "a100"},
        replace(h100s(2), gpu="a100"),
        "cluster.gpu",
        "write cluster.gpu=a100-40gb or cluster.gpu=a100-80gb",
    ),
    (
        {"model": PUBLISHED["mixtral-8x7b"], "data__name": "prepared", "train__micro_batch": 1},
        h100s(8),
        "zero.stage",
        "offload=cpu_optimizer zero=stage3 train.activation_checkpointing=full",
    ),
    (
        {
            "model": PUBLISHED["llama-3-8b"],
            "data__name": "prepared",
            "zero__stage": 3,
            "precision__name": Precision.bf16,
            "train__global_batch": 64,
            "train__micro_batch": 8,
            "train__sequence_length": 4096,
        },
        h100s(8),
        "train.micro_batch",
        "write train.micro_batch=2",
    ),
    (
        {
            "model": PUBLISHED["llama-3-8b"],
            "data__name": "prepared",
            "zero__stage": 3,
            "precision__name": Precision.bf16,
            "train__global_batch": 64,
            "train__micro_batch": 8,
            "train__sequence_length": 4096,
        },
        replace(h100s(8), device_memory_bytes=185 * 10**9),
        "train.micro_batch",
        "nearly all that its device has",
    ),
    (
        {
            "model": PUBLISHED["llama-3-8b"],
            "data__name": "prepared",
            "zero__stage": 2,
            "precision__name": Precision.bf16,
            "offload__optimizer": OffloadDevice.cpu,
        },
        replace(h100s(2), host_memory_bytes=64 * 10**9),
        "offload.optimizer",
        "more nodes",
    ),
    (
        {"model": PUBLISHED["llama-3-8b"], "data__name": "prepared"},
        replace(CPU, host_memory_bytes=8 * 10**9),
        "cluster.cpu_ranks",
        "has 8.0 GB",
    ),
]


@pytest.mark.parametrize(
    ("changes", "world", "key", "word"), MISTAKES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_mistakes_are_reported(changes: dict[str, Any], world: World, key: str, word: str) -> None:
    found = problems_of(changes, world)
    matches = [
        problem
        for problem in found
        if problem.key == key and word in f"{problem.rule} {problem.remedy} {problem.seen}"
    ]
    assert len(matches) == 1, "\n".join(map(str, found)) or "no problem at all"
    for problem in found:
        assert problem.seen
        assert problem.rule
        assert problem.remedy


# All silently wrong DeepSpeed keys: refused by a rule if that depends on the run, else as derived or removed.
SILENT_VALUES: dict[str, Any] = {
    **{key: True for key, *_ in SILENT},
    "zero_optimization.zero_hpz_partition_size": 2,
    **dict.fromkeys(
        ("communication_data_type", "seq_parallel_communication_data_type", "data_types.grad_accum_dtype"),
        "bf16",
    ),
    "zero_optimization.stage3_module_granularity_threshold": 10**9,
    "zero_optimization.module_granularity_threshold": 10**9,
    "bf16.check_grad_overflow": False,
    "zero_optimization.compute_grad_norm": False,
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "zero_optimization.round_robin_gradients": True,
    "tensor_parallel.autotp_size": 2,
    "sequence_parallel_size": 2,
    "pipeline.stages": 2,
    "torch_autocast.enabled": True,
    "data_efficiency.enabled": True,
    "wandb.enabled": True,
    "gradient_predivide_factor": 2.0,
    "prescale_gradients": True,
    "scheduler.type": "WarmupLR",
    "elasticity.enabled": True,
    "no_such_key": 1,
    "zero_optimization.no_such_key": 1,
}


@pytest.mark.parametrize("key", SILENT_VALUES)
def test_silently_wrong_keys_are_refused(key: str) -> None:
    keys: Any = SILENT_VALUES[key]
    for part in reversed(key.split(".")):
        keys = {part: keys}
    found = problems_of(
        {"engine__deepspeed": keys, "zero__stage": 2, "offload__optimizer": OffloadDevice.cpu}
    )
    keyed = [problem for problem in found if f"engine.deepspeed.{key}".startswith(problem.key)]
    assert len(keyed) == len(found) == 1, "\n".join(map(str, found))
    assert found[0].severity is Severity.ERROR


@pytest.mark.parametrize("key", ["communication_data_type", "data_types.grad_accum_dtype"])
@pytest.mark.parametrize(
    ("precision", "allowed"),
    [(Precision.fp32, {"fp32"}), (Precision.bf16, {"fp32", "bf16"}), (Precision.fp16, {"fp32", "fp16"})],
)
def test_gradients_are_not_rounded_to_another_precision(
    key: str, precision: Precision, allowed: set[str]
) -> None:
    def refused(dtype: str) -> bool:
        section, _, leaf = key.rpartition(".")
        own = {section: {leaf: dtype}} if section else {leaf: dtype}
        found = problems_of(
            {"zero__stage": 2, "precision__name": precision, "engine__deepspeed": own}, h100s(2)
        )
        return any(
            problem.key == f"engine.deepspeed.{key}" and problem.severity is Severity.ERROR
            for problem in found
        )

    assert {dtype for dtype in ("fp32", "bf16", "fp16") if not refused(dtype)} == allowed


@pytest.mark.parametrize("name", ["cp_comm_type", "fp8_multi_head_attention"])
def test_transformer_engine_attention_is_refused_with_separate_documents(name: str) -> None:
    own = {name: {"cp_comm_type": "p2p"}.get(name, True)}
    changes = {"engine__name": EngineName.megatron, "engine__megatron": own}
    found = problems_of({**changes, "data__documents": DocumentMasking.separate}, h100s(2, 2))
    assert [problem.key for problem in found if "documents" in problem.rule] == [f"engine.megatron.{name}"]
    assert not [problem for problem in problems_of(changes, h100s(2, 2)) if "documents" in problem.rule]


def test_images_with_separate_documents_are_refused() -> None:
    found = problems_of({"data__name": "arrays", "data__documents": DocumentMasking.separate})
    assert "data.documents" in [problem.key for problem in found]


def test_tuning_keys_are_accepted() -> None:
    keys = {
        "zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": True},
        "wall_clock_breakdown": True,
    }
    assert problems_of({"engine__deepspeed": keys, "zero__stage": 2}) == []


def leaves(tree: Mapping[str, Any], path: str = "") -> list[str]:
    return [
        leaf
        for key, value in tree.items()
        for leaf in (leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else [f"{path}{key}"])
    ]


def test_keys_that_the_plan_derives_are_refused() -> None:
    """Otherwise the plan would override the value of the user."""
    config = run_config(
        zero__stage=3,
        offload__optimizer=OffloadDevice.cpu,
        offload__parameters=OffloadDevice.cpu,
        precision__name=Precision.fp16,
    )
    batch = plan_batch(config, 2)
    derived = leaves(derived_settings(config, CPU, batch))
    assert len(derived) > 15
    for path in derived:
        keys: Any = "other"
        for part in reversed(path.split(".")):
            keys = {part: keys}
        problems = problems_of({"engine__deepspeed": keys})
        parents = {
            f"engine.deepspeed.{'.'.join(path.split('.')[:depth])}" for depth in range(1, path.count(".") + 2)
        }
        assert parents & {problem.key for problem in problems}, path


def test_all_problems_are_reported_with_errors_first() -> None:
    found = problems_of(
        {
            "train__global_batch": 9,
            "train__sequence_length": 100,
            "schedule__warmup": 200,
            "optim__momentum": 0.5,
        }
    )
    assert [problem.key for problem in found] == [
        "train.global_batch",
        "optim.momentum",
        "train.sequence_length",
        "train.steps",
    ]
    assert [problem.severity for problem in found] == [Severity.ERROR] * 3 + [Severity.WARNING]


def test_planning_does_not_change_the_configuration() -> None:
    config, same = (
        run_config(train__micro_batch=None, schedule__warmup=200),
        run_config(train__micro_batch=None, schedule__warmup=200),
    )
    plan = make_plan(config, CPU)
    assert config == same
    assert plan.config is config
    assert plan.warnings
