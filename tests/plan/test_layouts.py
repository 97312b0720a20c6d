"""Invalid layouts, as typed by a user, are refused before anything starts, with the rule and a remedy.

pytest tests/plan/test_layouts.py
"""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plan.cases import CPU, h100s
from toolkit.config.compose import compose
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode, PlanError, Problem, Severity
from toolkit.plan import make_plan
from toolkit.plan.types import World

ROOT = Path(__file__).resolve().parents[2]
FOUR, SIX, EIGHT = (replace(CPU, ranks=ranks, ranks_per_node=ranks) for ranks in (4, 6, 8))
OWN = "+engine.megatron."
VPP = f"{OWN}virtual_pipeline_model_parallel_size=2"

# overrides (without engine=...), the world, the key of the problem, a part of the rule or the remedy
MEGATRON: tuple[tuple[str, World, str, str], ...] = (
    ("parallel.tensor=3", CPU, "parallel", "divisible by tensor x pipeline x context"),
    ("parallel.tensor=3", SIX, "parallel.tensor", "model.num_attention_heads must be divisible"),
    (
        "parallel.tensor=4 model.intermediate_size=190",
        FOUR,
        "parallel.tensor",
        "model.intermediate_size must be divisible",
    ),
    (
        "parallel.tensor=3 model.num_attention_heads=6 model.hidden_size=96",
        SIX,
        "model.num_key_value_heads",
        "parallel.tensor=2",
    ),
    ("parallel.tensor=4", h100s(8, 2), "parallel.tensor", "on one node"),
    ("parallel.pipeline=4", FOUR, "parallel.pipeline", "model.num_hidden_layers=4"),
    (
        "parallel.pipeline=2 model.num_hidden_layers=3",
        CPU,
        "parallel.pipeline",
        "num_layers_in_first_pipeline_stage",
    ),
    (
        f"parallel.pipeline=4 model.num_hidden_layers=6 {OWN}num_layers_in_first_pipeline_stage=2",
        FOUR,
        "engine.megatron.num_layers_in_first_pipeline_stage",
        "=3",
    ),
    (
        f"parallel.pipeline=2 {OWN}num_layers_in_first_pipeline_stage=2",
        CPU,
        "engine.megatron.num_layers_in_first_pipeline_stage",
        "=1",
    ),
    (
        f"{OWN}num_layers_in_last_pipeline_stage=1",
        CPU,
        "engine.megatron.num_layers_in_last_pipeline_stage",
        "parallel.pipeline=2",
    ),
    (VPP, CPU, "engine.megatron.virtual_pipeline_model_parallel_size", "parallel.pipeline=2"),
    (
        f"parallel.pipeline=2 {VPP}",
        CPU,
        "engine.megatron.virtual_pipeline_model_parallel_size",
        "model.num_hidden_layers=4",
    ),
    (
        f"parallel.pipeline=2 model.num_hidden_layers=4 train.micro_batch=8 {VPP}",
        CPU,
        "engine.megatron.virtual_pipeline_model_parallel_size",
        "train.global_batch=16",
    ),
    (
        f"parallel.pipeline=2 model.num_hidden_layers=4 train.micro_batch=2 {VPP} "
        "train.batch_ramp.start=6 train.batch_ramp.increment=2 train.batch_ramp.samples=100",
        CPU,
        "engine.megatron.virtual_pipeline_model_parallel_size",
        "a step has 3",
    ),
    (
        f"parallel.pipeline=2 model.num_hidden_layers=4 train.micro_batch=2 {VPP} "
        f"{OWN}microbatch_group_size_per_vp_stage=1",
        CPU,
        "engine.megatron.virtual_pipeline_model_parallel_size",
        "2 micro-batches at a time",
    ),
    (
        f"{OWN}microbatch_group_size_per_vp_stage=2",
        CPU,
        "engine.megatron.microbatch_group_size_per_vp_stage",
        "there are no virtual stages",
    ),
    ("parallel.context=2 train.sequence_length=30", CPU, "train.sequence_length", "train.sequence_length=32"),
    (f"{OWN}sequence_parallel=true", CPU, "engine.megatron.sequence_parallel", "parallel.tensor=2"),
    (
        f"parallel.tensor=2 train.sequence_length=31 {OWN}sequence_parallel=true",
        CPU,
        "engine.megatron.sequence_parallel",
        "train.sequence_length=32",
    ),
    (
        "model=mixtral parallel.tensor=2 train.sequence_length=31",
        CPU,
        "train.sequence_length",
        "sequence parallelism",
    ),
    (
        f"model=mixtral parallel.tensor=2 {OWN}sequence_parallel=false",
        CPU,
        "engine.megatron.sequence_parallel",
        "leave it out",
    ),
    ("parallel.expert=2", CPU, "parallel.expert", "model=mixtral"),
    (
        "model=mixtral parallel.expert=3",
        replace(CPU, ranks=3, ranks_per_node=3),
        "parallel.expert",
        "model.num_local_experts must be divisible",
    ),
    ("model=mixtral parallel.expert=4", CPU, "parallel.expert", "regroups data and context ranks"),
    (
        "model=mixtral parallel.pipeline=2 parallel.expert=2",
        CPU,
        "parallel.expert",
        "over 1 data and context ranks",
    ),
    ("zero=stage3", CPU, "zero.stage", "engine=deepspeed"),
    ("offload=cpu_optimizer zero=stage1", CPU, "offload.optimizer", "engine=deepspeed"),
    ("optim=muon", CPU, "optim.name", "engine=deepspeed"),
    ("model.family=null model.target=my.package.Model", CPU, "model.target", "engine=deepspeed"),
    (f"{OWN}overlap_param_gather=true", CPU, "engine.megatron.overlap_param_gather", "zero=stage1"),
    (f"{OWN}fp8=hybrid", CPU, "engine.megatron.fp8", "Transformer Engine"),
    (f"{OWN}nccl_ub=true", CPU, "engine.megatron.nccl_ub", "leave it out on CPUs"),
    (
        f"precision=bf16 {OWN}gradient_accumulation_fusion=true",
        CPU,
        "engine.megatron.gradient_accumulation_fusion",
        "leave it out on CPUs",
    ),
    (
        f"train.activation_checkpointing=full {OWN}recompute_granularity=selective",
        CPU,
        "engine.megatron.recompute_granularity",
        "decides what is recomputed",
    ),
    (
        "train.activation_checkpointing=selective",
        replace(h100s(2), transformer_engine="2.11.0"),
        "train.activation_checkpointing",
        "Transformer Engine computes them",
    ),
    (
        "train.activation_checkpointing=2 offload.activations=cpu",
        CPU,
        "offload.activations",
        "inputs of all blocks",
    ),
    (
        f"{OWN}recompute_granularity=full",
        CPU,
        "engine.megatron.recompute_granularity",
        "recompute_method=uniform",
    ),
    (
        f"model=gpt2 {OWN}recompute_granularity=selective {OWN}recompute_modules=[mlp]",
        CPU,
        "engine.megatron.recompute_modules",
        "train.activation_checkpointing=full",
    ),
)
DEEPSPEED: tuple[tuple[str, World, str, str], ...] = (
    ("parallel.tensor=2 parallel.pipeline=2 zero=stage1", FOUR, "parallel.tensor", "engine=megatron"),
    ("parallel.context=2 parallel.pipeline=2 zero=stage1", FOUR, "parallel.pipeline", "engine=megatron"),
    (
        "model=mixtral parallel.expert=2 parallel.context=2 zero=stage1",
        FOUR,
        "parallel.context",
        "engine=megatron",
    ),
    ("parallel.pipeline=2 zero=stage2", CPU, "zero.stage", "zero=stage1"),
    (
        "parallel.tensor=2 train.activation_checkpointing=selective",
        CPU,
        "train.activation_checkpointing",
        "sums results of matrix products in place",
    ),
    (
        "model=qwen2 zero=stage3 train.activation_checkpointing=selective",
        CPU,
        "train.activation_checkpointing",
        "zero=stage2",
    ),
    ("parallel.pipeline=4 zero=stage1", FOUR, "parallel.pipeline", "model.num_hidden_layers=4"),
    (
        "parallel.context=4 model.num_attention_heads=6 model.hidden_size=96 model.num_key_value_heads=2",
        FOUR,
        "parallel.context",
        "num_attention_heads",
    ),
    ("parallel.context=2 train.sequence_length=31", CPU, "train.sequence_length", "train.sequence_length=32"),
    ("model=mixtral parallel.expert=2 zero=stage3", CPU, "zero.stage", "zero=stage1"),
    ("model=mixtral parallel.expert=2 zero=stage0", CPU, "zero.stage", "engine=megatron"),
    ("parallel.tensor=2 model=gpt2", CPU, "parallel.tensor", "engine=megatron"),
    ("parallel.tensor=4", FOUR, "model.num_key_value_heads", "engine=megatron"),
    ("parallel.tensor=2 model.vocab_size=4097", CPU, "parallel.tensor", "model.vocab_size"),
    (
        "parallel.tensor=2 model.family=null model.target=my.package.Model",
        CPU,
        "parallel.tensor",
        "zero=stage3",
    ),
)
LOCAL: tuple[tuple[str, World, str, str], ...] = (
    ("parallel.tensor=2", replace(CPU, ranks=1), "parallel.tensor", "engine=megatron"),
    ("", CPU, "engine.name", "one process"),
)
ALL = [
    (engine, *case)
    for engine, cases in (("megatron", MEGATRON), ("deepspeed", DEEPSPEED), ("local", LOCAL))
    for case in cases
]


@cache
def chosen(groups: tuple[str, ...]) -> RunConfig:
    return compose(groups)


def config_of(words: list[str]) -> RunConfig:
    """As ``compose(words)``, but faster: groups are composed once, and keys are set in a copy."""
    config = copy.deepcopy(chosen(tuple(sorted(word for word in words if "." not in word.partition("=")[0]))))
    for word in words:
        path, _, value = word.lstrip("+").partition("=")
        *sections, name = path.split(".")
        if not sections:
            continue
        owner: Any = config
        for section in sections:
            owner = getattr(owner, section)
        if isinstance(owner, dict):
            owner[name] = yaml.safe_load(value)
        else:
            assert hasattr(owner, name), word
            setattr(owner, name, yaml.safe_load(value))
    return config


def refused(words: list[str], world: World) -> list[Problem]:
    with pytest.raises(PlanError) as caught:
        make_plan(config_of(words), world)
    return [problem for problem in caught.value.problems if problem.severity is Severity.ERROR]


@pytest.mark.parametrize(
    ("engine", "typed", "world", "key", "word"),
    ALL,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_layouts_are_refused(engine: str, typed: str, world: World, key: str, word: str) -> None:
    found = refused([f"engine={engine}", *typed.split()], world)
    matches = [
        problem
        for problem in found
        if problem.key == key and word in f"{problem.seen} {problem.rule} {problem.remedy}"
    ]
    assert matches, "\n".join(map(str, found))
    for problem in found:
        assert problem.seen
        assert problem.rule
        assert problem.remedy


@pytest.mark.parametrize(
    "typed",
    [
        "parallel.tensor=2 parallel.pipeline=2",
        f"parallel.pipeline=2 model.num_hidden_layers=4 train.micro_batch=2 {VPP}",
        f"parallel.pipeline=4 model.num_hidden_layers=7 {OWN}num_layers_in_first_pipeline_stage=1",
        "parallel.context=2 parallel.tensor=2",
        "model=mixtral parallel.expert=2 parallel.pipeline=2",
        "parallel.tensor=2 model.vocab_size=4097",
        "parallel.tensor=4",
        f"parallel.tensor=2 {OWN}recompute_granularity=selective "
        f"+engine.megatron.recompute_modules=[core_attn]",
        "zero=stage2 precision=bf16",
        "model=gpt2 parallel.tensor=2 parallel.pipeline=2 model.dropout=0.1",
    ],
)
def test_valid_layouts_are_planned(typed: str) -> None:
    plan = make_plan(config_of(["engine=megatron", *typed.split()]), FOUR)
    assert plan.megatron is not None
    assert plan.memory is not None


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        (
            "engine=megatron parallel.tensor=2 parallel.pipeline=2 cluster.cpu_ranks=3",
            "divisible by tensor x pipeline x context",
        ),
        (
            "engine=deepspeed parallel.tensor=2 parallel.pipeline=2 zero=stage1 cluster.cpu_ranks=4",
            "write engine=megatron",
        ),
    ],
)
def test_train_refuses_invalid_layouts_before_it_starts(typed: str, word: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "launch/train.py", "+exp=quickstart", *typed.split()],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == ExitCode.USER, done.stderr
    assert word in done.stderr
    assert not list(tmp_path.iterdir()), "a refused run leaves no files"
