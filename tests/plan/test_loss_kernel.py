"""Which kernel computes the loss, what it needs in memory, and which combinations are refused.

pytest tests/plan/test_loss_kernel.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.cases import CPU, SMALL, h100s, run_config
from toolkit.config.kernels import LossKernel
from toolkit.config.schema import EngineName, Precision
from toolkit.errors import PlanError
from toolkit.families import PUBLISHED
from toolkit.plan import make_plan
from toolkit.plan.activations import fused_loss_bytes
from toolkit.plan.types import RunPlan, World

BF16: dict[str, Any] = {"precision__name": Precision.bf16}
MEGATRON: dict[str, Any] = {"engine__name": EngineName.megatron, **BF16}
NATIVE: dict[str, Any] = {**MEGATRON, "engine__megatron": {"cross_entropy_loss_fusion": True}}
FUSED: dict[str, Any] = {"train__loss_kernel": LossKernel.fused}
PLAIN: dict[str, Any] = {"train__loss_kernel": LossKernel.plain}


@pytest.mark.parametrize(
    ("changes", "world", "kernel"),
    [
        ({}, CPU, "plain"),
        (FUSED, CPU, "fused"),
        ({}, h100s(4, 4), "fused"),
        (PLAIN, h100s(4, 4), "plain"),
        ({"precision__name": Precision.fp16, "zero__stage": 1}, h100s(4, 4), "plain"),
        (MEGATRON, h100s(4, 4), "fused"),
        (NATIVE, h100s(4, 4), "megatron-core native"),
    ],
)
def test_the_fused_loss_is_the_default_on_gpus_only(
    changes: dict[str, Any], world: World, kernel: str
) -> None:
    assert make_plan(run_config(**changes), world).kernels.loss.name == kernel


def llama(engine: EngineName, **changes: Any) -> RunPlan:
    """Llama 3 8B on four GPUs: 8,192 tokens a rank, vocabulary 128,256."""
    return make_plan(
        run_config(
            model=PUBLISHED["llama-3-8b"],
            data__vocab_size=128_256,
            engine__name=engine,
            zero__stage=1,
            train__sequence_length=8192,
            train__micro_batch=1,
            parallel__tensor=4,
            **BF16,
            **changes,
        ),
        h100s(4, 4),
    )


@pytest.mark.parametrize("engine", [EngineName.deepspeed, EngineName.megatron])
def test_memory_follows_the_kernel(engine: EngineName) -> None:
    """Without the logits of all tokens, 12 or 6 bytes for each token and row of the vocabulary."""
    plain, fused = (llama(engine, **kernel).memory for kernel in (PLAIN, FUSED))
    assert plain is not None
    assert fused is not None
    assert plain.activations is not None
    assert fused.activations is not None
    logits = {
        EngineName.deepspeed: 8192 * 128_256 * (4 + 4 + 4),
        EngineName.megatron: 8192 * 128_256 // 4 * (2 + 4),
    }[engine]
    chunk = 2**30 // (4 * 128_256)
    loss = fused_loss_bytes(8192, 4096, 128_256 // 4, 2, chunk)
    assert plain.activations - fused.activations == logits - loss
    assert logits > 1.2 * loss


def test_smaller_chunks_need_less_memory() -> None:
    sizes = [llama(EngineName.deepspeed, train__loss_chunk=size).memory for size in (8192, 2048, 512)]
    bytes_ = [memory.activations or 0 for memory in sizes if memory is not None]
    assert bytes_ == sorted(bytes_, reverse=True)
    assert len(set(bytes_)) == 3


@pytest.mark.parametrize(
    ("changes", "world", "key", "remedy"),
    [
        ({**FUSED, **NATIVE}, h100s(4, 4), "train.loss_kernel", "leave out engine.megatron"),
        (
            {**NATIVE, "precision__name": Precision.fp32},
            h100s(4, 4),
            "engine.megatron.cross_entropy_loss_fusion",
            "train.loss_kernel=fused",
        ),
        (
            {
                **MEGATRON,
                "engine__megatron": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
            },
            CPU,
            "engine.megatron.cross_entropy_fusion_impl",
            "train.loss_kernel=fused",
        ),
        (
            {**MEGATRON, "engine__megatron": {"cross_entropy_fusion_impl": "native"}},
            CPU,
            "engine.megatron.cross_entropy_fusion_impl",
            "leave it out",
        ),
        (
            {**FUSED, "model": type(SMALL)(target="my.Model")},
            CPU,
            "train.loss_kernel",
            "train.loss_kernel=auto",
        ),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    changes: dict[str, Any], world: World, key: str, remedy: str
) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(run_config(**changes), world)
    found = {problem.key: problem for problem in raised.value.problems}
    assert remedy in found[key].remedy
