"""Bytes of activations that the backward pass needs, under DeepSpeed and the local engine.

The count follows Korthikanti et al., 2205.05198, section 4.1 (``sbh (34 + 5as/h)`` per layer for GPT in 16
bits with dropout), tensor by tensor for the families' modules in transformers 5.23. There are two
differences: torch's fused ``scaled_dot_product_attention`` saves its inputs, its output and one number per
row instead of the ``s x s`` matrices (no ``5as/h`` term), and dropout masks are not counted
(``model.dropout`` is 0 by default). Norms compute in fp32.

Included: blocks, with each mode of activation checkpointing; the final norm; logits and the fp32
cross-entropy with its gradient, where the peak usually is for large vocabularies, or those of one chunk of
tokens if the loss is fused. Not included: fragmentation of the allocator, cuBLAS and NCCL workspaces,
attention without a fused kernel, and experts with more than an even share of the tokens. A test compares a
layer with what autograd saves: within 0.3% for dense families, within 2% for mixtral.

Functions count bytes per token first. ``element`` is the size of an element in bytes (2 or 4).
"""

from __future__ import annotations

from toolkit.config.recomputation import Recomputation, RecomputationMode
from toolkit.families import get_family
from toolkit.families.base import ModelShape, NormKind

FP32 = 4
STORE_EVERYTHING = Recomputation(RecomputationMode.none)


def activation_bytes(
    shape: ModelShape,
    *,
    micro_batch: int,
    sequence_length: int,
    element: int,
    recomputation: Recomputation = STORE_EVERYTHING,
    offloaded: bool = False,
    blocks: range | None = None,
    in_flight: int = 1,
    head: bool = True,
    tensor: int = 1,
    seen: int = 0,
    chunk: int | None = None,
    scores: int = 0,
    wide: bool = False,
    compiled: bool = False,
) -> int:
    """Bytes on a rank at the peak: at the start of the backward pass, in the loss or in the last block.

    Args:
        sequence_length: tokens of a sequence on this rank.
        recomputation: which activations the backward pass recomputes.
        offloaded: whether the inputs of recomputed blocks are stored on the host.
        blocks: indices of the blocks on the rank; None: all.
        in_flight: micro-batches whose activations a pipeline stage stores at a time.
        head: whether the rank has the output layer.
        tensor: tensor-parallel ranks, which share the matrices inside a block; the residual stream is
            replicated.
        seen: number of keys in the document mask for each token of this rank; 0 if there is no mask.
        chunk: tokens of a chunk of the fused loss; None: the plain loss.
        scores: number of keys whose attention weights are stored for each token (``eager``), else 0.
        wide: whether keys and values are repeated for each query head without a mask.
        compiled: whether torch.compile compiles the blocks.
    """
    blocks = range(shape.num_hidden_layers) if blocks is None else blocks
    layer = layer_bytes(shape, element, tensor, seen, scores, wide, compiled)
    boundary = element * shape.hidden_size
    again = recomputation.count(blocks)
    if recomputation.selective:
        inside = in_flight * len(blocks) * selective_bytes(shape, element, tensor, scores)
    else:
        # A recomputed block stores its input. With the inputs on the host, the device has that of the
        # current block and the next one.
        inputs = min(2, in_flight * again) if offloaded else in_flight * again
        inside = in_flight * (len(blocks) - again) * layer + inputs * boundary
    tokens = micro_batch * sequence_length
    output = output_bytes(shape, tokens, element, chunk=chunk, tensor=tensor) if head else 0
    block = recomputed_bytes(
        shape,
        element,
        recomputation,
        blocks,
        tensor=tensor,
        seen=seen,
        scores=scores,
        wide=wide,
        compiled=compiled,
    )
    return tokens * (inside + in_flight * seen) + max(output, tokens * block)


def recomputed_bytes(
    shape: ModelShape,
    element: int,
    recomputation: Recomputation,
    blocks: range,
    *,
    tensor: int = 1,
    seen: int = 0,
    scores: int = 0,
    wide: bool = False,
    compiled: bool = False,
) -> int:
    """Bytes per token that the last block recomputes, beyond what it stores.

    They exist after those of the output layer and the loss are freed. When an earlier block is recomputed,
    those of the last one are freed, too. Arguments as of :func:`activation_bytes`.
    """
    layer = layer_bytes(shape, element, tensor, seen, scores, wide, compiled)
    if not recomputation.selective:
        return layer if recomputation.count(blocks[-1:]) else 0
    # It has everything again, and still what only the recomputation needed.
    return layer + 2 * element * shape.hidden_size - selective_bytes(shape, element, tensor, scores)


def output_bytes(shape: ModelShape, tokens: int, element: int, *, chunk: int | None, tensor: int = 1) -> int:
    """Bytes of the final norm, the output layer and the loss of ``tokens``.

    Args:
        chunk: tokens of a chunk of the fused loss; None: the plain loss.
        tensor: tensor-parallel ranks.
    """
    ends = tokens * head_bytes(shape, element, fused=chunk is not None)
    if chunk is None:
        return ends
    split = 1 if shape.tie_word_embeddings else tensor  # AutoTP splits only untied output layers
    vocabulary = -(-shape.vocab_size // split)
    return ends + fused_loss_bytes(tokens, shape.hidden_size, vocabulary, element, chunk)


def offloaded_bytes(tensors: int, size: int, *, pinned: bool) -> int:
    """Bytes of ``tensors`` inputs of blocks on the host.

    torch's allocator of pinned memory rounds the ``size`` of each up to a power of two
    (ATen/core/CachingHostAllocator.h).
    """
    return tensors * (1 << (size - 1).bit_length() if pinned else size)


def selective_bytes(shape: ModelShape, element: int, tensor: int = 1, scores: int = 0) -> int:
    """Bytes per token that one block stores under selective recomputation.

    These are its input and the results of matrix products and of fused attention, as models/recomputation.py
    lists them. Korthikanti et al., 2205.05198, section 5, recompute attention instead and keep 34 bytes per
    element of the residual stream; fused attention has nothing to gain there, whereas norms and activation
    functions have.
    """
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    traits = get_family(shape.family).traits
    # queries, keys and values before rotation; the output of attention and its log-sum-exp
    inside = element * (2 * queries + 2 * keys) + FP32 * shape.num_attention_heads
    if scores:  # a product of queries and keys, and no log-sum-exp
        inside += shape.num_attention_heads * (scores * element - FP32)
    up = (2 if traits.gated else 1) * element * shape.intermediate_size
    if shape.num_local_experts:
        up = (
            shape.num_experts_per_tok * (up + element * shape.hidden_size) + element * shape.num_local_experts
        )
        down = 0
    else:
        down = element * shape.hidden_size
    # the input, and the outputs of the two last products, which tensor parallelism does not cut
    return 2 * element * shape.hidden_size + down + -(-(inside + up) // tensor)


def layer_bytes(
    shape: ModelShape,
    element: int,
    tensor: int = 1,
    seen: int = 0,
    scores: int = 0,
    wide: bool = False,
    compiled: bool = False,
) -> int:
    """Bytes per token of one block.

    With a document mask, each block stores the mask in its own precision, and keys and values as wide as the
    queries, because fused kernels then do not support grouped-query attention. The mask itself, one byte per
    key, is shared by all blocks. FlexAttention stores what attention without a mask does; its block mask, a
    few integers per 128 x 128 pairs, is not counted. ``eager`` stores the weights, the ``5as/h`` term of the
    paper: the softmax in fp32, a copy in 16 bits, and the mask in one byte per key.

    In ``compiled`` blocks the partitioner of torch.compile computes elementwise operations again in the
    backward pass (torch/_functorch/partitioners.py, min_cut_rematerialization_partition). Norms then save
    their input and their output in the run's precision, and a feed-forward the inputs of its activation
    function and of its last product. A test counts what the partitioner saves.
    """
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # queries, keys and values after rotation, the output, and its log-sum-exp
    kept = queries if seen or scores or wide else keys
    attention = element * (2 * queries + 2 * kept) + FP32 * shape.num_attention_heads
    if scores:
        weights = FP32 + (element if element != FP32 else 0)
        attention += shape.num_attention_heads * (scores * weights - FP32)
    traits = get_family(shape.family).traits
    if traits.qk_norm:  # as rms_norm_bytes without the outputs: the rotation does not save its input
        normed = element if compiled else FP32 + element
        attention += normed * (queries + keys) + FP32 * (
            shape.num_attention_heads + shape.num_key_value_heads
        )
    if traits.norm is NormKind.layer:
        # Two layer norms save input, output, mean and deviation; gelu as elementwise operations saves five
        # tensors.
        norms = 2 * (2 * element * shape.hidden_size + 2 * FP32)
        inside = attention + (2 if compiled else 5) * element * shape.intermediate_size
    else:
        norms = 2 * rms_norm_bytes(shape, element, compiled=compiled)
        inside = attention + feed_forward_bytes(shape, element, compiled=compiled)
    return norms + -(-inside // tensor) + ((seen or scores) if scores else element * seen)


def rms_norm_bytes(shape: ModelShape, element: int, *, compiled: bool = False) -> int:
    """The fp32 input, the normalised input, the scaled output, and one number per token."""
    return ((0 if compiled else FP32) + 2 * element) * shape.hidden_size + FP32


def feed_forward_bytes(shape: ModelShape, element: int, *, compiled: bool = False) -> int:
    """gate, silu(gate), up and their product; with experts, also each expert's input and output."""
    dense = 4 * element * shape.intermediate_size
    if not shape.num_local_experts:
        return 3 * element * shape.intermediate_size if compiled else dense
    router = FP32 * 2 * shape.num_local_experts
    return shape.num_experts_per_tok * (dense + 2 * element * shape.hidden_size) + router


def head_bytes(shape: ModelShape, element: int, *, fused: bool = False) -> int:
    """Embedding output, final norm, and without a fused loss three fp32 tensors as large as the logits: the
    log-softmax of the cross-entropy, its gradient, and the gradient of its input. The logits are freed by
    then.
    """
    norm = (
        2 * element * shape.hidden_size
        if get_family(shape.family).traits.norm is NormKind.layer
        else rms_norm_bytes(shape, element)
    )
    loss = 0 if fused else shape.vocab_size * 3 * FP32
    return element * shape.hidden_size + norm + loss


def fused_loss_bytes(tokens: int, hidden: int, vocabulary: int, element: int, chunk: int) -> int:
    """Bytes of all ``tokens``, at the peak of a chunk, of the fused loss (models/fused_loss.py).

    It stores the gradient of the hidden states, and that of the weight, in fp32 if there are several chunks.
    A chunk has logits, their copy in fp32 (torch fuses the conversion of fp16 only, and the compiler that of
    all) and the log-softmax, then the logits' gradient and its product with the hidden states, which is as
    large as the weight.
    """
    chunks = -(-tokens // chunk)
    rows, weight = -(-tokens // chunks), vocabulary * hidden
    gradients = tokens * hidden * element + weight * (element if chunks == 1 else FP32)
    logits = element + FP32 + (FP32 if element != FP32 else 0)
    return gradients + max(rows * vocabulary * logits, (rows * vocabulary + weight) * element)
