"""Bytes of activations that the backward pass needs, under DeepSpeed and the local engine.

The count follows Korthikanti et al., 2205.05198, section 4.1 (``sbh (34 + 5as/h)`` per layer for GPT in 16
bits with dropout), tensor by tensor for the families' modules in transformers 5.23. There are two
differences: torch's fused ``scaled_dot_product_attention`` saves its inputs, its output and one number per
row instead of the ``s x s`` matrices (no ``5as/h`` term), and dropout masks are not counted
(``model.dropout`` is 0 by default). Norms compute in fp32.

Included: blocks, with or without activation checkpointing; the final norm; logits and the fp32 cross-entropy
with its gradient, where the peak usually is for large vocabularies. Not included: fragmentation of the
allocator, cuBLAS and NCCL workspaces, attention without a fused kernel, and experts with more than an even
share of the tokens. A test compares a layer with what autograd saves: within 0.3% for dense families, within
2% for mixtral.

Functions count bytes per token first. ``element`` is the size of an element in bytes (2 or 4).
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
    """Bytes on a rank at the peak, which is the start of the backward pass.

    Args:
        sequence_length: tokens of a sequence on this rank.
        layers: number of blocks on the rank; None: all.
        in_flight: micro-batches whose activations a pipeline stage stores at a time.
        head: whether the rank has the output layer.
        tensor: tensor-parallel ranks, which share the matrices inside a block; the residual stream is
            replicated.
        seen: number of keys in the document mask for each token of this rank; 0 if there is no mask.
    """
    layers = shape.num_hidden_layers if layers is None else layers
    layer = layer_bytes(shape, element, tensor, seen)
    boundary = element * shape.hidden_size
    # Checkpointing stores the input of each block, and all of the block that is being recomputed.
    blocks = in_flight * layers * boundary + layer if checkpointing else in_flight * layers * layer
    ends = in_flight * seen + (head_bytes(shape, element) if head else 0)
    return micro_batch * sequence_length * (blocks + ends)


def layer_bytes(shape: ModelShape, element: int, tensor: int = 1, seen: int = 0) -> int:
    """Bytes per token of one block.

    With a document mask, each block stores the mask in its own precision, and keys and values as wide as the
    queries, because fused kernels then do not support grouped-query attention. The mask itself, one byte per
    key, is shared by all blocks.
    """
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # queries, keys and values after rotation, the output, and its log-sum-exp
    attention = element * (2 * queries + 2 * (queries if seen else keys)) + FP32 * shape.num_attention_heads
    traits = get_family(shape.family).traits
    if traits.qk_norm:  # as rms_norm_bytes without the outputs: the rotation does not save its input
        attention += (FP32 + element) * (queries + keys) + FP32 * (
            shape.num_attention_heads + shape.num_key_value_heads
        )
    if traits.norm is NormKind.layer:
        # Two layer norms save input, output, mean and deviation; gelu as elementwise operations saves five
        # tensors.
        norms, inside = (
            2 * (2 * element * shape.hidden_size + 2 * FP32),
            attention + 5 * element * shape.intermediate_size,
        )
    else:
        norms, inside = 2 * rms_norm_bytes(shape, element), attention + feed_forward_bytes(shape, element)
    return norms + -(-inside // tensor) + element * seen


def rms_norm_bytes(shape: ModelShape, element: int) -> int:
    """The fp32 input, the normalised input, the scaled output, and one number per token."""
    return (FP32 + 2 * element) * shape.hidden_size + FP32


def feed_forward_bytes(shape: ModelShape, element: int) -> int:
    """gate, silu(gate), up and their product; with experts, also each expert's input and output."""
    dense = 4 * element * shape.intermediate_size
    if not shape.num_local_experts:
        return dense
    router = FP32 * 2 * shape.num_local_experts
    return shape.num_experts_per_tok * (dense + 2 * element * shape.hidden_size) + router


def head_bytes(shape: ModelShape, element: int) -> int:
    """Embedding output, final norm, logits, the fp32 log-softmax of the cross-entropy and its gradient."""
    norm = (
        2 * element * shape.hidden_size
        if get_family(shape.family).traits.norm is NormKind.layer
        else rms_norm_bytes(shape, element)
    )
    logits = element if element != FP32 else 0  # in fp32 the logits are freed after the log-softmax
    return element * shape.hidden_size + norm + shape.vocab_size * (logits + 2 * FP32)
