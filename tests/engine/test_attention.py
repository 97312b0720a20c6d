"""Attention kernels in the engines: context ranks, documents, recomputation.

    pytest tests/engine/test_attention.py

tests/models/test_attention.py compares the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.attention_kernels import flex_attention_with_gradients, with_attention
from tests.engine.cases import quick
from tests.engine.matrix_checks import changed, named
from toolkit.config.kernels import AttentionKernel
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import TOLERANCE, OptimizerCase
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

LENGTH, BATCH, HEADS, KEY_HEADS, WIDTH = 96, 2, 4, 2, 8
POSITIONS = torch.cat([torch.arange(size) for size in (7, 1, 40, 48)]).expand(BATCH, -1)
DIFFERENCE = 1e-6  # relative to the largest value, in fp32


# -- Megatron-core's context ranks


def context_difference(
    rank: int, ranks: int, kernel: AttentionKernel, separate: bool, wrong: Callable[[], Any]
) -> float:
    """The difference of a context rank's output and gradients from plain attention of the whole sequence."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from toolkit.engine.megatron import attention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=KEY_HEADS,
        context_parallel_size=ranks,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    group = dist.group.WORLD
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = group
    module = attention.TorchAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=groups, kernel=kernel
    )
    generator = torch.Generator().manual_seed(2)
    whole = [
        torch.randn(LENGTH, BATCH, heads, WIDTH, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    weights = torch.randn(LENGTH, BATCH, HEADS * WIDTH, generator=generator)
    right = plain(whole, weights, separate)
    context = group if ranks > 1 else None
    mine = torch.arange(LENGTH)
    if context is not None:
        mine = attention._query_and_key_positions(LENGTH // ranks, context, mine.device)[0]
    masked = separate or kernel is AttentionKernel.flex
    positions = POSITIONS if separate else torch.arange(LENGTH).expand(BATCH, -1)
    masks = attention.mask_arguments(kernel, positions, context) if masked else {}
    leaves = [part[mine].requires_grad_() for part in whole]
    with flex_attention_with_gradients(), wrong():
        output = module(
            *leaves, masks.get("attention_mask"), packed_seq_params=masks.get("packed_seq_params")
        )
        found = [output.detach(), *torch.autograd.grad((output * weights[mine]).sum(), leaves)]
    return max(float((a - b[mine]).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


def plain(whole: list[torch.Tensor], weights: torch.Tensor, separate: bool) -> list[torch.Tensor]:
    """Output and gradients of attention over the whole sequence in fp64."""
    leaves = [part.double().requires_grad_() for part in whole]
    document = (POSITIONS[0] == 0).cumsum(0) if separate else torch.zeros(LENGTH)
    mask = (document[:, None] == document) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    query, key, value = (part.permute(1, 2, 0, 3) for part in leaves)
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output = output.permute(2, 0, 1, 3).flatten(2)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


@contextmanager
def prefixes_of_one_key_less() -> Iterator[None]:
    from toolkit.engine.megatron import attention

    ends = attention._prefix_ends
    with changed(
        attention, "_prefix_ends", lambda length, group: tuple(end - 1 for end in ends(length, group))
    ):
        yield


@contextmanager
def keys_in_the_order_of_the_ranks() -> Iterator[None]:
    from toolkit.engine.megatron import attention

    with changed(attention, "_reorder", lambda whole, order: whole.contiguous()):
        yield


@pytest.mark.parametrize("ranks", quick([1, 2, 4], 1))
def test_context_ranks_match_attention_of_the_whole_sequence(ranks: int, pool: RankPool) -> None:
    for kernel, separate in (
        (AttentionKernel.sdpa, False),
        (AttentionKernel.flash, False),
        (AttentionKernel.flex, False),
        (AttentionKernel.eager, False),
        (AttentionKernel.sdpa, True),
        (AttentionKernel.flex, True),
        (AttentionKernel.eager, True),
    ):
        found = pool.run(context_difference, kernel, separate, nullcontext, ranks=ranks)
        assert max(found) < DIFFERENCE, (kernel, separate, found)


@pytest.mark.parametrize("wrong", [prefixes_of_one_key_less, keys_in_the_order_of_the_ranks])
def test_wrong_prefixes_differ(wrong: Callable[[], Any], pool: RankPool) -> None:
    found = pool.run(context_difference, AttentionKernel.flash, False, wrong, ranks=2)
    assert max(found) > 1e4 * DIFFERENCE


# -- whole runs

CASES = [
    ("megatron/llama/cp2", AttentionKernel.flash, {}),
    ("megatron/llama/cp2-documents", AttentionKernel.flex, {}),
    ("deepspeed/llama/cp2-zero1-documents", AttentionKernel.flex, {}),
    # Megatron-core recomputes a layer from saved tensors, and a block mask is none.
    ("megatron/gpt2/one-documents", AttentionKernel.flex, {"train__activation_checkpointing": True}),
    ("deepspeed/llama/cp2-zero1", AttentionKernel.flash, {}),
    ("deepspeed/llama/cp2-zero1", AttentionKernel.flex, {}),
    ("deepspeed/llama/dp2-zero2-documents", AttentionKernel.flex, {"train__activation_checkpointing": True}),
    ("deepspeed/llama/pp2-zero1-documents", AttentionKernel.flex, {}),
    ("megatron/llama/cp2", AttentionKernel.flex, {}),
    ("megatron/llama/tp2-sp-documents", AttentionKernel.flex, {}),
    ("megatron/llama/pp2-documents", AttentionKernel.flex, {}),
    ("megatron/llama/pp2", AttentionKernel.eager, {}),
]


STEPS = 2


def losses(rank: int, ranks: int, plan: RunPlan, wrong: Callable[[], Any] = nullcontext) -> list[float]:
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    with flex_attention_with_gradients(), wrong():
        found = [result.loss for result in train_steps(engine, plan, range(STEPS), rank=rank)]
    engine.close()
    return found


def difference(
    case: tuple[str, AttentionKernel, dict[str, Any]], pool: RankPool, wrong: Callable[[], Any] = nullcontext
) -> float:
    """The largest difference from the local engine's losses after updates with a large learning rate."""
    name, kernel, changes = case
    cell = named(name)
    plan = with_attention(cell.plan(OptimizerCase.SGD, **changes), kernel)
    found = pool.run(losses, plan, wrong, ranks=cell.ranks)[0]
    right = pool.run(losses, cell.reference().plan(OptimizerCase.SGD), ranks=1)[0]
    return max(abs(a - b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("case", quick(CASES, 1))
def test_losses_match_local(case: tuple[str, AttentionKernel, dict[str, Any]], pool: RankPool) -> None:
    assert difference(case, pool) < TOLERANCE.loss


def test_block_masks_that_do_not_arrive_change_the_loss(pool: RankPool) -> None:
    assert difference(CASES[1], pool, without_documents) > 10 * TOLERANCE.loss


@contextmanager
def without_documents() -> Iterator[None]:
    from toolkit.engine.megatron import build

    make = build.mask_arguments

    def joined(kernel: AttentionKernel, positions: torch.Tensor, group: Any) -> dict[str, Any]:
        return make(kernel, torch.arange(positions.shape[1]).expand_as(positions), group)

    with changed(build, "mask_arguments", joined):
        yield
