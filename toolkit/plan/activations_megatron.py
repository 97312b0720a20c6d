"""Bytes of activations that the backward pass needs in Megatron-core's blocks.

They are those of version 0.16 with the local layer spec and torch's attention.

They are counted like those of plan/activations.py, after Korthikanti et al., 2205.05198, sections 4.2 and 5,
with these differences:

- Tensor parallelism divides the tensors inside attention and feed-forward. Sequence parallelism also divides
  the tensors between them: norms, the residual stream, and the inputs of column-parallel layers, which the
  backward pass gathers again.
- Values stay in the output of the fused query-key-value projection, which is saved whole.
- A gated feed-forward saves gate and up in one tensor, the activated gate, a copy of up (up + 0), and their
  product.
- The vocabulary is divided too, and the cross-entropy overwrites its fp32 logits.
- Context ranks gather keys and values and save them with a mask: one row of the full sequence per local
  position. With separate documents every rank has such a mask for each sequence. With a mask, keys and values
  are as wide as queries.
- A pipeline stage stores several micro-batches: stage i of p has p - i in flight; with v virtual stages it
  has 2 (p - i - 1) + (v - 1) p + 1 of its chunks in flight.

Norms: torch's fused GPU kernels save input, output and one number per token; on CPUs RMSNorm is elementwise
operations. A test compares blocks with what autograd saves, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.kernels import AttentionKernel
from toolkit.families.base import FamilyTraits, ModelShape, NormKind
from toolkit.plan.activations import FP32, fused_loss_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationLayout:
    """The layout of a micro-batch on one rank.

    Attributes:
        traits: of the model's family.
        tokens: number of tokens on this rank, over all sequences.
        sequences: sequences of the micro-batch.
        context: context-parallel ranks.
        tensor: tensor-parallel ranks.
        sequence_ranks: those that share the tensors between blocks: ``tensor`` with sequence parallelism,
            else 1.
        element: bytes of an element.
        fused_norms: whether norms run as fused kernels.
        fused_activation: whether a gated activation is one function, which saves only its input
            (megatron/core/fusions/fused_bias_swiglu.py).
        attention: the name of the attention kernel.
        has_mask: whether attention takes a mask of all pairs of tokens.
        repeats_keys: whether keys and values are repeated for each query head.
        documents: whether documents are separate.
    """

    traits: FamilyTraits
    tokens: int
    sequences: int
    context: int
    tensor: int
    sequence_ranks: int
    element: int
    fused_norms: bool
    fused_activation: bool = False
    attention: str = AttentionKernel.sdpa.value
    has_mask: bool = False
    repeats_keys: bool = False
    documents: bool = False

    @property
    def positions(self) -> int:
        return self.tokens // self.sequences


def block_bytes(shape: ModelShape, layout: ActivationLayout, recomputed: frozenset[str] = frozenset()) -> int:
    """Return the bytes of one block for one micro-batch, without the tensors of the submodules in
    ``recomputed``.
    """
    traits, element = layout.traits, layout.element
    norms = 2 * _norm(shape.hidden_size, layout, traits.norm)
    if "layernorm" in recomputed:
        norms -= 2 * element * shape.hidden_size
    if traits.hidden_dropout and shape.dropout:
        norms += 2 * shape.hidden_size  # the masks of both sums of the residual stream, of one byte each
    inside = _attention(shape, layout, recomputed) // layout.tensor
    if not {"mlp", "moe"} & recomputed:
        inside += _feed_forward(shape, layout, gated=traits.gated)
    rotations = 4 * element * shape.head_dim if traits.rotary else 0
    masks = (layout.sequences if layout.documents else 1) if layout.has_mask else 0
    eager = layout.attention == AttentionKernel.eager.value
    mask = (1 if eager else element) * layout.positions * layout.context * masks  # a row of each
    return layout.tokens * (norms // layout.sequence_ranks + inside) + layout.positions * (rotations + mask)


def boundary_bytes(shape: ModelShape, layout: ActivationLayout) -> int:
    """Return the bytes of the residual stream between two blocks."""
    return layout.tokens * layout.element * shape.hidden_size // layout.sequence_ranks


def head_bytes(shape: ModelShape, layout: ActivationLayout, vocabulary: int, chunk: int | None = None) -> int:
    """Return the bytes of final norm, logits and cross-entropy of a micro-batch.

    Args:
        vocabulary: rows of the output layer on this rank.
        chunk: tokens of a chunk of the fused loss; None: losses are computed from logits.
    """
    logits = FP32 + (layout.element if layout.element != FP32 else 0)
    loss = (
        layout.tokens * vocabulary * logits
        if chunk is None
        else fused_loss_bytes(layout.tokens, shape.hidden_size, vocabulary, layout.element, chunk)
    )
    return (
        layout.tokens * (_norm(shape.hidden_size, layout, layout.traits.norm) // layout.sequence_ranks) + loss
    )


def in_flight(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Return the maximum number of chunks' forward passes whose activations stage ``stage`` stores at a
    time.
    """
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def _norm(width: int, layout: ActivationLayout, kind: NormKind) -> int:
    """Return the bytes per token. On CPUs RMSNorm saves its input and the normalised input in fp32."""
    if kind is NormKind.layer or layout.fused_norms:
        return 2 * layout.element * width + 2 * FP32
    return (2 * FP32 + layout.element) * width + FP32


def _attention(shape: ModelShape, layout: ActivationLayout, recomputed: frozenset[str]) -> int:
    """Return the bytes per token, before tensor parallelism divides them."""
    traits, element = layout.traits, layout.element
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    if layout.context > 1:
        # queries and output, the keys and values of all context ranks, and on prefixes the outputs of chunks
        chunks = queries if layout.attention == AttentionKernel.flash.value else 0
        saved = element * (
            2 * queries + chunks + 2 * (queries if layout.repeats_keys else keys) * layout.context
        )
    elif layout.repeats_keys and keys < queries:
        # expanded copies of keys and values; norms of keys in the run's precision also save the fused
        # projection
        projection = queries + 2 * keys if traits.qk_norm and (element == FP32 or layout.fused_norms) else 0
        saved = element * (4 * queries + projection)
    elif traits.rotary:
        # rotated queries and keys, the fused projection, the output
        saved = element * (3 * queries + 3 * keys)
    else:
        saved = element * (2 * queries + 2 * keys)
    if "core_attn" not in recomputed and layout.attention == AttentionKernel.eager.value:
        weights = FP32 + (element if element != FP32 else 0)  # softmax in fp32, and a copy in 16 bits
        saved += shape.num_attention_heads * layout.positions * layout.context * weights
    elif "core_attn" not in recomputed:
        saved += FP32 * shape.num_attention_heads
    if traits.qk_norm:
        saved += FP32 * (shape.num_attention_heads + shape.num_key_value_heads)
        if layout.fused_norms:
            saved += element * (queries + keys)
        else:  # in fp32 the norm's input is part of the fused projection
            saved += 2 * FP32 * (queries + keys) - (FP32 * keys if element == FP32 else 0)
    return saved


def _feed_forward(shape: ModelShape, layout: ActivationLayout, *, gated: bool) -> int:
    """Return the bytes per token.

    Experts process the tokens that all tensor ranks gather. They also save their input and their output
    before the router's weight; the router saves probabilities and indices.
    """
    width = layout.element * shape.intermediate_size
    # Fused: the input of the activation (gate and up) and the input of the last product.
    fused = 3 if gated and layout.fused_activation else None
    if not shape.num_local_experts:
        return (fused or (5 if gated else 2)) * width // layout.tensor
    router = (
        shape.num_local_experts * (1 + layout.element) + shape.num_experts_per_tok * 24
    ) // layout.sequence_ranks
    return (
        shape.num_experts_per_tok
        * ((fused or 6) * width // layout.tensor + layout.element * shape.hidden_size)
        + router
    )
