"""Norm and attention for runs without Transformer Engine, with sequence and context parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from toolkit.config.kernels import AttentionKernel
from toolkit.models.attention import attend, make_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class TorchNorm:
    """torch's norm for Megatron-core's local layer spec.

    Under sequence parallelism each rank normalizes its own tokens, and ``finalize_model_grads`` sums the
    gradients of the weights that have the attribute ``sequence_parallel``.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


@dataclass
class BlockMaskParams(PackedSeqParams):
    """A block mask on its way to attention, which Megatron-core passes on with the rest of these parameters.

    It cannot be the attention mask, because recomputed layers save their arguments, and these are tensors.
    """

    block_mask: BlockMask | None = None


class TorchAttention(MegatronModule):
    """Attention with torch's kernels.

    Under context parallelism keys and values are gathered, and each rank computes its own queries: the
    all-gather form of Llama 3 (2407.21783, section 3.3.2). With ``flash`` each of the rank's two chunks of
    queries sees the prefix of the keys that ends with it; other kernels take a mask.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        kernel: AttentionKernel = AttentionKernel.sdpa,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._group = groups.cp if config.context_parallel_size > 1 else None
        self._scale = softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._kernel = kernel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Causal attention over this rank's part of the sequence.

        Args:
            query: [sequence, batch, heads, head_dim]; ``key`` and ``value`` have the key-value heads.
            attention_mask: None, or bool from ``attention_mask``, True if a query sees a key. (In
                Megatron-core's own attention True masks out; all layers of a model with a mask use this
                attention.)
            packed_seq_params: None, or the block mask of ``flex``.

        Returns:
            [sequence, batch, heads * head_dim]
        """
        assert attention_bias is None, "this attention does not support a bias"
        assert packed_seq_params is None or isinstance(packed_seq_params, BlockMaskParams), (
            "this attention does not support packed sequences"
        )
        length, batch, _, _ = query.shape
        mask: Any = attention_mask if packed_seq_params is None else packed_seq_params.block_mask
        by_prefix = self._group is not None and self._kernel is AttentionKernel.flash
        if self._group is not None:
            if mask is None and not by_prefix:
                mask = _causal_mask(length, self._group, query.device)
            key, value = (_GatherSequence.apply(part, self._group, by_prefix) for part in (key, value))
        dropout = self._dropout if self.training else 0.0
        # Tensor ranks have different heads and need different masks; with sequence parallelism the caller has
        # forked.
        rng = (
            nullcontext() if dropout == 0 or self.config.sequence_parallel else get_cuda_rng_tracker().fork()
        )
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        settings: dict[str, Any] = {"kernel": self._kernel, "dropout": dropout, "scale": self._scale}
        with rng:
            if by_prefix:
                output = torch.cat(
                    [
                        attend(chunk, key[:, :, :end], value[:, :, :end], **settings)
                        for chunk, end in zip(
                            query.chunk(2, dim=2), _prefix_ends(length, self._group), strict=True
                        )
                    ],
                    dim=2,
                )
            else:
                output = attend(query, key, value, mask=mask, **settings)
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)


def mask_arguments(
    kernel: AttentionKernel | None, position_ids: torch.Tensor, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Return arguments of a model's forward that separate the documents of a micro-batch.

    Args:
        position_ids: int64 [batch, whole sequence], 0 at the first token of each document.
        group: the context ranks; keys are in the order in which ``TorchAttention`` gathers them.
    """
    assert kernel is not None, "Transformer Engine's attention takes no masks"
    length = position_ids.shape[1]
    places = (
        _query_and_key_positions(length // group.size(), group, position_ids.device)
        if group
        else (None, None)
    )
    mask = make_mask(kernel, position_ids, *places)
    if isinstance(mask, torch.Tensor):
        return {"attention_mask": mask}
    # Rotary embeddings read the length of the whole sequence here.
    return {
        "packed_seq_params": BlockMaskParams(
            qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length, block_mask=mask
        )
    }


def _causal_mask(length: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """bool [length, whole sequence]: True if a query sees a key."""
    queries, keys = _query_and_key_positions(length, group, device)
    return keys[None, :] <= queries[:, None]


def _prefix_ends(length: int, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the number of keys that the last query of each of this rank's two chunks sees."""
    assert group is not None
    return tuple((number + 1) * (length // 2) for number in _rank_chunks(group.rank(), group.size()))  # type: ignore[return-value]


def _query_and_key_positions(
    length: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions in the whole sequence of this rank's ``length`` tokens, and of the gathered
    tokens.
    """
    size = group.size()
    every = [_rank_positions(length, peer, size, device) for peer in range(size)]
    return every[group.rank()], torch.cat(every)


def _rank_positions(length: int, rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the positions in the whole sequence of a context rank's tokens."""
    chunk = torch.arange(length // 2, device=device)
    return torch.cat([number * (length // 2) + chunk for number in _rank_chunks(rank, size)])


def _rank_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return a rank's two chunks out of ``2 * size``: one and its mirror image, which balances causal
    attention.
    """
    return rank, 2 * size - 1 - rank


class _GatherSequence(torch.autograd.Function):
    """All-gather along dim 0; backward reduce-scatters the gradient.

    With ``in_order`` the chunks are in the order of the sequence, otherwise in that of the ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, in_order: bool) -> torch.Tensor:
        ctx.group, ctx.chunks = group, None
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        if not in_order:
            return whole
        ctx.chunks = [number for rank in range(group.size()) for number in _rank_chunks(rank, group.size())]
        return _reorder(whole, sorted(range(len(ctx.chunks)), key=ctx.chunks.__getitem__))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        whole = gradient.contiguous() if ctx.chunks is None else _reorder(gradient, ctx.chunks)
        part = whole.new_empty(whole.shape[0] // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=ctx.group)
        return part, None, None


def _reorder(whole: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return the equal chunks of ``whole`` along dim 0 in another order, as a copy."""
    chunks = whole.chunk(len(order))
    return torch.cat([chunks[number] for number in order])
