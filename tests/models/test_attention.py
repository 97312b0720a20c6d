"""Every attention kernel computes what ``scaled_dot_product_attention`` computes with a mask of all pairs.

    pytest tests/models/test_attention.py

Forward and gradients, in fp32. FlexAttention runs as plain operations here, which evaluate the mask of every
pair; its lists of blocks are checked on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.attention_kernels import flex_attention_with_gradients, with_attention
from tests.models.test_document_masks import filled
from toolkit.config.kernels import AttentionKernel
from toolkit.models.attention import BLOCK, attend, document_block_mask, document_causal_mask, make_mask
from toolkit.testing.tiny import micro_batches, tiny_plan

TOLERANCE = 1e-6
LENGTH = 3 * BLOCK + 40  # several blocks, the last one incomplete


def positions(*lengths: int) -> torch.Tensor:
    """Position ids of a window of documents, [1, LENGTH]; the last one is cut."""
    return torch.cat([torch.arange(length) for length in (*lengths, LENGTH)])[:LENGTH].unsqueeze(0)


DOCUMENTS = torch.cat([positions(5, 1, 200, 60), positions(128, 128), positions()])


def zigzag(ranks: int, rank: int) -> torch.Tensor:
    """Positions of a context rank of Megatron-core, in a sequence that the chunks divide."""
    chunks = torch.arange(LENGTH // (2 * ranks) * 2 * ranks).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def inputs(heads: int = 2) -> list[torch.Tensor]:
    """Query with 4 heads, key, value and the weights of a loss."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(len(DOCUMENTS), number, LENGTH, 16, generator=generator)
        for number in (4, heads, heads, 4)
    ]


def results(kernel: AttentionKernel, mask: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of query, key and value."""
    *parts, weights = given
    leaves = [part.clone().requires_grad_() for part in parts]
    with flex_attention_with_gradients():
        output = attend(*leaves, kernel=kernel, mask=mask)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def plain(mask: torch.Tensor, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As ``results``, in fp64 and without ``attend``."""
    query, key, value, weights = (part.double() for part in given)
    leaves = [part.requires_grad_() for part in (query, key, value)]
    shared = query.shape[1] // key.shape[1]
    output = functional.scaled_dot_product_attention(
        leaves[0], *(part.repeat_interleave(shared, 1) for part in leaves[1:]), attn_mask=mask
    )
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def distance(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("kernel", [AttentionKernel.sdpa, AttentionKernel.eager, AttentionKernel.flex])
def test_separate_documents_match_plain_attention(kernel: AttentionKernel, heads: int) -> None:
    given = inputs(heads)
    right = plain(document_causal_mask(DOCUMENTS), given)
    assert distance(results(kernel, make_mask(kernel, DOCUMENTS), given), right) < TOLERANCE
    joined = torch.arange(LENGTH).expand_as(DOCUMENTS)
    assert distance(results(kernel, make_mask(kernel, joined), given), right) > 1e4 * TOLERANCE


@pytest.mark.parametrize("kernel", [AttentionKernel.sdpa, AttentionKernel.flash, AttentionKernel.eager])
def test_no_mask_is_causal(kernel: AttentionKernel) -> None:
    given = inputs()
    whole = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    found = results(kernel, None, given)
    assert distance(found, plain(whole.tril(), given)) < TOLERANCE
    assert distance(found, plain(whole, given)) > 1e4 * TOLERANCE


@pytest.mark.parametrize("kernel", [AttentionKernel.sdpa, AttentionKernel.flash, AttentionKernel.eager])
def test_fewer_queries_are_the_last_of_the_keys(kernel: AttentionKernel) -> None:
    """A chunk of a context rank, and one token of a text that is continued."""
    query, key, value, _ = inputs()
    whole = attend(query, key, value, kernel=AttentionKernel.sdpa)
    for first in (100, LENGTH - 1):
        last = attend(query[:, :, first:], key, value, kernel=kernel)
        assert distance([last], [whole[:, :, first:]]) < TOLERANCE
        shifted = attend(query[:, :, first:], key[:, :, :-1], value[:, :, :-1], kernel=kernel)
        assert distance([shifted], [whole[:, :, first:]]) > 1e4 * TOLERANCE


def test_flash_is_an_error_if_no_flash_kernel_supports_the_tensors() -> None:
    query, key, value, _ = inputs()
    with pytest.raises(RuntimeError):  # the kernel for CPUs has no dropout
        attend(query, key, value, kernel=AttentionKernel.flash, dropout=0.5)
    attend(query, key, value, kernel=AttentionKernel.sdpa, dropout=0.5)


def test_block_mask_equals_that_of_torch() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    found = document_block_mask(DOCUMENTS)
    assert found.mask_mod is not None
    right = create_block_mask(found.mask_mod, len(DOCUMENTS), None, LENGTH, LENGTH, device="cpu")
    assert found.shape == right.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        number, indices = getattr(right, f"{name}_num_blocks"), getattr(right, f"{name}_indices")
        assert torch.equal(getattr(found, f"{name}_num_blocks"), number)
        listed = torch.arange(indices.shape[-1]) < number.unsqueeze(-1)
        assert torch.equal(getattr(found, f"{name}_indices")[listed], indices[listed])


@pytest.mark.parametrize("ranks", [2, 4])
def test_block_mask_of_a_context_rank_lists_every_visible_pair(ranks: int) -> None:
    keys = torch.cat([zigzag(ranks, rank) for rank in range(ranks)])
    for rank in range(ranks):
        queries = zigzag(ranks, rank)
        blocks = document_block_mask(DOCUMENTS[:, : len(keys)], queries, keys)
        dense = document_causal_mask(DOCUMENTS[:, : len(keys)], queries, keys)
        assert blocks.shape == dense.shape
        rows, columns = (-(-size // BLOCK) * BLOCK for size in dense.shape[2:])
        padded = functional.pad(dense, (0, columns - dense.shape[3], 0, rows - dense.shape[2]))
        tiles = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(3, 4).flatten(4)
        full = listed_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        some = listed_blocks(blocks.kv_num_blocks, blocks.kv_indices)
        assert not (full & some).any()
        assert tiles.all(-1)[full].all()
        assert not tiles.any(-1)[~full & ~some].any()


def listed_blocks(number: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
    """bool [batch, 1, query blocks, key blocks]"""
    assert number is not None
    assert indices is not None
    listed = torch.arange(indices.shape[-1]) < number.unsqueeze(-1)
    return torch.zeros_like(indices).scatter_(-1, indices.long(), listed.int()).bool()


def test_masks_are_not_all_pairs() -> None:
    """Blocks that hold no visible pair are skipped."""
    found = document_block_mask(positions(*[32] * 20))
    assert int(found.kv_num_blocks.sum()) == -(-LENGTH // BLOCK)  # the diagonal


def logits(kernel: AttentionKernel, family: str = "llama", **batch: torch.Tensor) -> torch.Tensor:
    model = filled(with_attention(tiny_plan(family), kernel))
    with torch.no_grad():
        found: torch.Tensor = model(**batch, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_is_not_seen(family: str) -> None:
    ids = micro_batches(tiny_plan(family), 0)[0]["input_ids"]
    padding = torch.ones_like(ids)
    padding[:, :4] = 0
    places = (torch.arange(ids.shape[1]) - 4).clamp(min=0).expand_as(ids)
    alone = logits(AttentionKernel.sdpa, family, input_ids=ids[:, 4:])
    for kernel in (AttentionKernel.sdpa, AttentionKernel.eager):
        found = logits(kernel, family, input_ids=ids, attention_mask=padding, position_ids=places)
        assert float((found[:, 4:] - alone).abs().max()) < 1e-5
        seen = logits(kernel, family, input_ids=ids, position_ids=places)
        assert float((seen[:, 4:] - alone).abs().max()) > 1e-3
        none = logits(kernel, family, input_ids=ids, attention_mask=torch.ones_like(ids))
        assert torch.equal(none, logits(kernel, family, input_ids=ids))
    with pytest.raises(TypeError, match=r"model\.attention=sdpa"):
        logits(AttentionKernel.flash, family, input_ids=ids, attention_mask=padding)
