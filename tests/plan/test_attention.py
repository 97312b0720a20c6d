"""Which attention kernel the plan chooses, what it refuses, and what masks cost.

pytest tests/plan/test_attention.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.config.data import DocumentMasking
from toolkit.config.identity import identity
from toolkit.config.kernels import AttentionKernel
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName, Precision
from toolkit.errors import PlanError, Problem
from toolkit.plan import make_plan
from toolkit.plan.attention import choose_attention
from toolkit.plan.types import RunPlan, World

LOCAL = {"engine__name": EngineName.local}
MEGATRON = {"engine__name": EngineName.megatron}
BF16 = {"precision__name": Precision.bf16}
SEPARATE = {"data__documents": DocumentMasking.separate}
CONTEXT = {"parallel__context": 2}
GPUS = replace(h100s(2), transformer_engine=None)
BARE = replace(GPUS, lacking_for_compile=("triton",))


def plan(world: World = GPUS, **changes: Any) -> RunPlan:
    return make_plan(run_config(**{"zero__stage": 1, **changes}), world)


def asked(kernel: str) -> dict[str, Any]:
    return {"model__attention": AttentionKernel[kernel]}


@pytest.mark.parametrize(
    ("world", "changes", "name", "reason"),
    [
        (CPU, SEPARATE, "sdpa", "CPUs"),
        (CPU, MEGATRON | CONTEXT, "sdpa", "CPUs"),
        (GPUS, BF16, "sdpa", "cuDNN"),
        (GPUS, {}, "sdpa", "16 bits"),
        (GPUS, BF16 | CONTEXT, "sdpa", "cuDNN"),  # Ulysses computes whole sequences
        (GPUS, BF16 | SEPARATE, "flex", "block mask"),
        (GPUS, BF16 | SEPARATE | {"model__dropout": 0.1}, "sdpa", "no dropout"),
        (BARE, BF16 | SEPARATE, "sdpa", "triton is not installed"),
        (GPUS, MEGATRON | BF16, "sdpa", "cuDNN"),
        (GPUS, MEGATRON | BF16 | CONTEXT, "flash", "prefixes"),
        (GPUS, MEGATRON | CONTEXT, "flex", "block mask"),
        (BARE, MEGATRON | CONTEXT, "sdpa", "triton is not installed"),
        (GPUS, MEGATRON | BF16 | CONTEXT | SEPARATE, "flex", "block mask"),
        (GPUS, BF16 | asked("eager"), "eager", "model.attention=eager"),
        (CPU, asked("flash"), "flash", "model.attention=flash"),
    ],
)
def test_auto_avoids_masks_of_all_pairs(
    world: World, changes: dict[str, Any], name: str, reason: str
) -> None:
    choice = plan(world, **changes).kernels.attention
    assert choice.name == name
    assert reason in choice.reason


def test_transformer_engine_computes_joined_documents_only() -> None:
    def chosen(**changes: Any) -> str:
        config = run_config(**MEGATRON, **BF16, **changes)
        return choose_attention(config, GPUS, None, transformer_engine=True).name

    assert chosen() == chosen(**CONTEXT) == "transformer-engine"
    assert chosen(**SEPARATE) == "flex"
    assert chosen(**asked("sdpa")) == "sdpa"


def refused(world: World, **changes: Any) -> Problem:
    with pytest.raises(PlanError) as error:
        plan(world, **changes)
    (problem,) = [problem for problem in error.value.problems if problem.key == "model.attention"]
    return problem


@pytest.mark.parametrize(
    ("world", "changes", "rule"),
    [
        (CPU, asked("flex"), "no backward pass on CPUs"),
        (CPU, asked("flash") | {"model__dropout": 0.1}, "no dropout"),
        (GPUS, asked("flash"), "16 bits"),
        (GPUS, asked("flash") | BF16 | SEPARATE, "take no mask"),
        (GPUS, asked("flash") | BF16 | {"model__head_dim": 512}, "up to 256"),
        (GPUS, asked("flex") | BF16 | {"model__dropout": 0.1}, "no dropout"),
        (BARE, asked("flex") | BF16, "triton is not installed"),
        (
            GPUS,
            {
                **LOCAL,
                "model": ModelConfig(target="tests.models.broken.Fine", attention=AttentionKernel.sdpa),
            },
            "own attention",
        ),
    ],
)
def test_kernels_that_cannot_run_are_refused(world: World, changes: dict[str, Any], rule: str) -> None:
    world = replace(world, ranks=1, ranks_per_node=1) if "engine__name" in changes else world
    problem = refused(world, **changes)
    assert rule in problem.rule
    assert "write" in problem.remedy or "leave out" in problem.remedy


def test_settings_of_transformer_engine_are_refused_with_torchs_attention() -> None:
    own = {**MEGATRON, **BF16, **CONTEXT, "engine__megatron": {"cp_comm_type": "a2a"}}
    with pytest.raises(PlanError, match="cp_comm_type"):
        plan(**own, **asked("sdpa"))


def test_masks_of_all_pairs_are_a_warning_with_their_size() -> None:
    long = {"train__sequence_length": 4096, "model__max_position_embeddings": 4096}
    for changes, remedy in (
        (BF16 | SEPARATE | asked("sdpa"), "write model.attention=flex"),
        (BF16 | SEPARATE | {"model__dropout": 0.1}, "write model.dropout=0, or model.attention=sdpa"),
        (MEGATRON | BF16 | CONTEXT | asked("sdpa"), "write model.attention=flash"),
    ):
        (problem,) = [each for each in plan(**changes, **long).warnings if each.key == "model.attention"]
        assert remedy in problem.remedy
        assert f"{8 if 'parallel__context' in changes else 32} MiB" in problem.rule
    assert not [each for each in plan(**BF16, **SEPARATE, **long).warnings if each.key == "model.attention"]


def test_kernel_does_not_change_the_identity() -> None:
    assert identity(run_config()) == identity(run_config(**asked("eager")))
    assert plan(CPU).identity == plan(CPU, **asked("eager")).identity


def activations(**changes: Any) -> int:
    memory = plan(**BF16, **changes, train__sequence_length=4096, model__max_position_embeddings=4096).memory
    assert memory is not None
    assert memory.activations is not None
    return memory.activations


def test_masks_of_all_pairs_are_part_of_the_memory() -> None:
    """A byte per pair, and in each of the two layers as many numbers in 16 bits."""
    masked, blocks = activations(**SEPARATE, **asked("sdpa")), activations(**SEPARATE)
    keys = 2 * 2 * (4 - 2) * 8  # keys and values of two more heads of width 8, in 16 bits
    assert masked - blocks == 2 * (4096 * 4096 * (1 + 2 * 2) + 2 * 4096 * keys)
    assert activations() == blocks
    weights = activations(**asked("eager")) - activations()
    assert weights == 2 * 2 * 4096 * (4096 * (4 * (4 + 2) + 1) + keys - 4 * 4)


def test_prefixes_of_context_ranks_need_no_mask() -> None:
    dense, prefixes = (
        activations(**MEGATRON, **CONTEXT, **changes) for changes in (asked("sdpa"), asked("flash"))
    )
    mask = 2 * 2 * 2048 * 4096  # two layers, 16 bits
    # keys and values of two more heads from both ranks, without the outputs of the two chunks
    heads = 2 * 2 * 2048 * 2 * (2 * 2 * 16 - 32)
    assert dense - prefixes == mask + heads
