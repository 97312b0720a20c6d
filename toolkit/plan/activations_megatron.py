"""Bytes of activations that backward needs, in Megatron-core's blocks (0.16, local layer spec with torch's attention).

As plan/activations.py, tensor by tensor after Korthikanti et al., 2205.05198, sections 4.2 and 5, with what differs here:

- the tensor axis divides what is inside attention and feed-forward; with sequence parallelism also what lies between them: norms, the
  residual stream, and the inputs of column-parallel layers, which are gathered again in backward
- values stay in the output of the fused query-key-value projection, which is kept whole
- a gated feed-forward keeps gate and up in one tensor, the activated gate, a copy of up (up + 0), and their product: five of width f
- the vocabulary is divided too, and the cross-entropy overwrites its fp32 logits
- a pipeline stage keeps several micro-batches: stage i of p has p - i of them in flight; with v virtual stages
  2 (p - i - 1) + (v - 1) p + 1 of its chunks

Norms: torch's fused kernels on GPUs keep input, output and a number a token; on CPUs RMSNorm is a formula of tensors.
A test compares blocks with what autograd saves, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.families import get
from toolkit.families.base import ModelShape, Norm

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What of a micro-batch one rank sees. ``spread``: tensor ranks that share what lies between blocks: with sequence parallelism all."""

    tokens: int  # of its part of the sequences of a micro-batch
    sequences: int
    tensor: int
    spread: int
    element: int
    fused_norms: bool

    @property
    def positions(self) -> int:
        return self.tokens // self.sequences


def block_bytes(shape: ModelShape, layout: Layout, recomputed: frozenset[str] = frozenset()) -> int:
    """Of one block for one micro-batch, without what the submodules ``recomputed`` would keep."""
    traits, element = get(shape.family).traits, layout.element
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    attention = element * (3 * queries + 3 * keys)  # rotated queries and keys, the fused projection, the output
    if not traits.rotary:
        attention = element * (2 * queries + 2 * keys)
    if "core_attn" not in recomputed:
        attention += FP32 * shape.num_attention_heads
    if traits.qk_norm:
        attention += _norm(queries + keys, layout, traits.norm) - element * (queries + keys)
    norms = 2 * _norm(shape.hidden_size, layout, traits.norm)
    if "layernorm" in recomputed:
        norms -= 2 * element * shape.hidden_size
    rotations = 4 * element * shape.head_dim * layout.positions if traits.rotary else 0
    inside = attention // layout.tensor
    if not {"mlp", "moe"} & recomputed:
        inside += _feed_forward(shape, layout, gated=traits.gated)
    return layout.tokens * (norms // layout.spread + inside) + rotations


def boundary_bytes(shape: ModelShape, layout: Layout) -> int:
    """The residual stream between two blocks."""
    return layout.tokens * layout.element * shape.hidden_size // layout.spread


def head_bytes(shape: ModelShape, layout: Layout, vocabulary: int) -> int:
    """Final norm, logits and cross-entropy of one micro-batch; ``vocabulary``: rows on this rank."""
    logits = FP32 + (layout.element if layout.element != FP32 else 0)
    return layout.tokens * (_norm(shape.hidden_size, layout, get(shape.family).traits.norm) // layout.spread + vocabulary * logits)


def in_flight(stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Forward passes of chunks whose activations stage ``stage`` keeps at its fullest."""
    if chunks == 1:
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


def _norm(width: int, layout: Layout, kind: Norm) -> int:
    """Bytes a token. On CPUs RMSNorm keeps its input and the normalised input in fp32."""
    if kind is Norm.layer or layout.fused_norms:
        return 2 * layout.element * width + 2 * FP32
    return (2 * FP32 + layout.element) * width + FP32


def _feed_forward(shape: ModelShape, layout: Layout, *, gated: bool) -> int:
    """Bytes a token. With experts their in- and outputs too, of all tokens that the tensor ranks of this rank gather for them."""
    inner = (5 if gated else 2) * layout.element * shape.intermediate_size // layout.tensor
    if not shape.num_local_experts:
        return inner
    router = 2 * FP32 * shape.num_local_experts // layout.spread
    return shape.num_experts_per_tok * (inner + 2 * layout.element * shape.hidden_size) + router
