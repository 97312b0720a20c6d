"""Bytes of activations that backward needs, in Megatron-core's blocks (0.16, local layer spec with torch's attention).

As plan/activations.py, tensor by tensor after Korthikanti et al., 2205.05198, sections 4.2 and 5, with what differs here:

- the tensor axis divides what is inside attention and feed-forward; with sequence parallelism also what lies between them: norms, the
  residual stream, and the inputs of column-parallel layers, which are gathered again in backward
- values stay in the output of the fused query-key-value projection, which is kept whole
- a gated feed-forward keeps gate and up in one tensor, the activated gate, a copy of up (up + 0), and their product: five of width f
- the vocabulary is divided too, and the cross-entropy overwrites its fp32 logits
- context ranks gather keys and values and keep them with a mask, a row of the whole sequence for each of their positions; where a mask
  keeps documents apart every rank does, for each sequence; with a mask keys and values are kept as wide as queries
- a pipeline stage keeps several micro-batches: stage i of p has p - i of them in flight; with v virtual stages
  2 (p - i - 1) + (v - 1) p + 1 of its chunks

Norms: torch's fused kernels on GPUs keep input, output and a number a token; on CPUs RMSNorm is a formula of tensors.
A test compares blocks with what autograd saves, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.families import get_family
from toolkit.families.base import ModelShape, NormKind

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What of a micro-batch one rank sees. ``spread``: tensor ranks that share what lies between blocks: with sequence parallelism all."""

    tokens: int  # of its part of the sequences of a micro-batch
    sequences: int
    context: int
    tensor: int
    spread: int
    element: int
    fused_norms: bool
    documents: bool = False  # kept apart by a mask

    @property
    def positions(self) -> int:
        return self.tokens // self.sequences


def block_bytes(shape: ModelShape, layout: Layout, recomputed: frozenset[str] = frozenset()) -> int:
    """Of one block for one micro-batch, without what the submodules ``recomputed`` would keep."""
    traits, element = get_family(shape.family).traits, layout.element
    norms = 2 * _norm(shape.hidden_size, layout, traits.norm)
    if "layernorm" in recomputed:
        norms -= 2 * element * shape.hidden_size
    inside = _attention(shape, layout, recomputed) // layout.tensor
    if not {"mlp", "moe"} & recomputed:
        inside += _feed_forward(shape, layout, gated=traits.gated)
    rotations = 4 * element * shape.head_dim if traits.rotary else 0
    masks = layout.sequences if layout.documents else int(layout.context > 1)
    mask = element * layout.positions * layout.context * masks  # a row of each
    return layout.tokens * (norms // layout.spread + inside) + layout.positions * (rotations + mask)


def boundary_bytes(shape: ModelShape, layout: Layout) -> int:
    """The residual stream between two blocks."""
    return layout.tokens * layout.element * shape.hidden_size // layout.spread


def head_bytes(shape: ModelShape, layout: Layout, vocabulary: int) -> int:
    """Final norm, logits and cross-entropy of one micro-batch; ``vocabulary``: rows on this rank."""
    logits = FP32 + (layout.element if layout.element != FP32 else 0)
    return layout.tokens * (
        _norm(shape.hidden_size, layout, get_family(shape.family).traits.norm) // layout.spread
        + vocabulary * logits
    )


def in_flight(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Forward passes of chunks whose activations stage ``stage`` keeps at its fullest."""
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def _norm(width: int, layout: Layout, kind: NormKind) -> int:
    """Bytes a token. On CPUs RMSNorm keeps its input and the normalised input in fp32."""
    if kind is NormKind.layer or layout.fused_norms:
        return 2 * layout.element * width + 2 * FP32
    return (2 * FP32 + layout.element) * width + FP32


def _attention(shape: ModelShape, layout: Layout, recomputed: frozenset[str]) -> int:
    """Bytes a token, before the tensor axis divides them."""
    traits, element = get_family(shape.family).traits, layout.element
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    if layout.context > 1:
        kept = element * (
            2 * queries + 2 * queries * layout.context
        )  # queries and output; all ranks' keys and values
    elif (
        layout.documents and keys < queries
    ):  # copies of keys and values; norms of keys in their own precision keep the fused projection
        projection = queries + 2 * keys if traits.qk_norm and (element == FP32 or layout.fused_norms) else 0
        kept = element * (4 * queries + projection)
    elif traits.rotary:
        kept = element * (
            3 * queries + 3 * keys
        )  # rotated queries and keys, the fused projection, the output
    else:
        kept = element * (2 * queries + 2 * keys)
    if "core_attn" not in recomputed:
        kept += FP32 * shape.num_attention_heads
    if traits.qk_norm:
        kept += FP32 * (shape.num_attention_heads + shape.num_key_value_heads)
        if layout.fused_norms:
            kept += element * (queries + keys)
        else:  # in fp32 the keys that are normalised lie in the fused projection
            kept += 2 * FP32 * (queries + keys) - (FP32 * keys if element == FP32 else 0)
    return kept


def _feed_forward(shape: ModelShape, layout: Layout, *, gated: bool) -> int:
    """Bytes a token. With experts, of all tokens that the tensor ranks gather for them: their input, and one more of width f, before
    the router's weight; the router keeps probabilities and places."""
    width = layout.element * shape.intermediate_size
    if not shape.num_local_experts:
        return (5 if gated else 2) * width // layout.tensor
    router = (
        shape.num_local_experts * (1 + layout.element) + shape.num_experts_per_tok * 24
    ) // layout.spread
    return (
        shape.num_experts_per_tok * (6 * width // layout.tensor + layout.element * shape.hidden_size) + router
    )
