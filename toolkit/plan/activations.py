"""Bytes of activations that backward needs.

The count follows Korthikanti et al., 2205.05198, section 4.1 (there ``sbh (34 + 5as/h)`` a layer for GPT in 16 bits with
dropout), tensor by tensor for the families' modules in transformers 5.23, with two differences: attention is torch's fused
``scaled_dot_product_attention``, which keeps its inputs, its output and one number a row instead of the ``s x s`` matrices
(the ``5as/h`` term is gone); and dropout masks are left out (``model.dropout`` is 0 by default). Norms compute in fp32.

Covered: blocks, with or without checkpointing of each block; final norm; logits and the cross-entropy in fp32 with its
gradient, where the peak usually lies for large vocabularies. Not covered: the allocator's fragmentation, cuBLAS and NCCL
workspaces, attention on a device without a fused kernel, and experts that receive more than their even share of tokens. A test
compares a layer with what autograd saves: families without experts within 0.3%, mixtral within 2%.

Letters: s tokens of a sequence, b sequences, h hidden, f feed-forward, a*d width of the queries, k*d of the keys, V vocabulary,
e bytes an element (2 or 4). Everything is counted a token first.
"""

from __future__ import annotations

from toolkit.families import get_family
from toolkit.families.base import ModelShape, NormKind

FP32 = 4


def activation_bytes(
    shape: ModelShape,
    *,
    micro_batch: int,
    sequence_length: int,
    element: int,
    checkpointing: bool,
    layers: int | None = None,
    in_flight: int = 1,
    head: bool = True,
    tensor: int = 1,
    seen: int = 0,
) -> int:
    """Bytes on a rank at the peak: the beginning of backward.

    Args:
        sequence_length: this rank's part of a sequence.
        layers: blocks on the rank; None: all.
        in_flight: micro-batches whose activations a pipeline stage keeps at a time.
        head: the rank has the output layer.
        tensor: ranks that share the matrices inside a block; what stands between blocks is whole on each.
        seen: where a mask keeps documents apart, the keys that this rank's mask has for each of its tokens; 0: there is no mask.
    """
    layers = shape.num_hidden_layers if layers is None else layers
    layer = layer_bytes(shape, element, tensor, seen)
    boundary = element * shape.hidden_size
    # Checkpointing keeps each block's input, and one block while it is recomputed.
    kept = in_flight * layers * boundary + layer if checkpointing else in_flight * layers * layer
    return (
        micro_batch
        * sequence_length
        * (kept + in_flight * seen + (head_bytes(shape, element) if head else 0))
    )


def layer_bytes(shape: ModelShape, element: int, tensor: int = 1, seen: int = 0) -> int:
    """Bytes a token of one block. With a mask each block keeps it in its own precision, and keys and values as wide as queries: fused
    kernels take no grouped ones then. The mask itself, a byte a key, is one for all blocks."""
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # queries, keys and values after rotation, the output, and its log-sum-exp
    attention = element * (2 * queries + 2 * (queries if seen else keys)) + FP32 * shape.num_attention_heads
    traits = get_family(shape.family).traits
    if traits.qk_norm:  # as rms_norm_bytes, less the outputs: rotating keeps none of what it rotates
        attention += (FP32 + element) * (queries + keys) + FP32 * (
            shape.num_attention_heads + shape.num_key_value_heads
        )
    if traits.norm is NormKind.layer:
        # Two layer norms keep input, output, mean and deviation; gelu as a formula of tensors keeps five of width f.
        norms, inside = (
            2 * (2 * element * shape.hidden_size + 2 * FP32),
            attention + 5 * element * shape.intermediate_size,
        )
    else:
        norms, inside = 2 * rms_norm_bytes(shape, element), attention + feed_forward_bytes(shape, element)
    return norms + -(-inside // tensor) + element * seen


def rms_norm_bytes(shape: ModelShape, element: int) -> int:
    """The input in fp32, the normalised input, the scaled output (the next layer's input), and one number a token."""
    return (FP32 + 2 * element) * shape.hidden_size + FP32


def feed_forward_bytes(shape: ModelShape, element: int) -> int:
    """gate, silu(gate), up and their product, f each; with experts, for each expert that a token visits, and its in- and output."""
    dense = 4 * element * shape.intermediate_size
    if not shape.num_local_experts:
        return dense
    router = FP32 * 2 * shape.num_local_experts
    return shape.num_experts_per_tok * (dense + 2 * element * shape.hidden_size) + router


def head_bytes(shape: ModelShape, element: int) -> int:
    """Embedding output, final norm, logits; the cross-entropy's fp32 log-softmax and the gradient that backward makes of it."""
    norm = (
        2 * element * shape.hidden_size
        if get_family(shape.family).traits.norm is NormKind.layer
        else rms_norm_bytes(shape, element)
    )
    logits = element if element != FP32 else 0  # in fp32 the logits are freed once their log-softmax is there
    return element * shape.hidden_size + norm + shape.vocab_size * (logits + 2 * FP32)
