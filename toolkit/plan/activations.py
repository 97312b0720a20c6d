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
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.recomputation import Recomputation, RecomputationMode
from toolkit.families import get_family
from toolkit.families.base import ModelShape, NormKind
from toolkit.optimizers.base import FP32

STORE_EVERYTHING = Recomputation(RecomputationMode.none)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The computation of decoder blocks on a rank, which decides what autograd saves.

    Attributes:
        element: bytes of an element, 2 or 4.
        tensor: tensor-parallel ranks, which share the matrices inside a block; the residual stream is
            replicated.
        mask_keys: keys in the document mask for each token of this rank; 0 if there is no mask.
        score_keys: keys whose attention weights are stored for each token (``eager``), else 0.
        repeats_keys: whether keys and values are repeated for each query head without a mask.
        compiled: whether torch.compile compiles the blocks.
    """

    element: int
    tensor: int = 1
    mask_keys: int = 0
    score_keys: int = 0
    repeats_keys: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """The activations on a rank of a pipeline stage; without a pipeline there is one stage.

    Attributes:
        tokens: of a micro-batch on this rank.
        blocks: indices of the blocks on the rank.
        recomputation: which activations the backward pass recomputes.
        offloaded: whether the inputs of recomputed blocks are stored on the host.
        in_flight: micro-batches whose activations the stage stores at a time.
        head: whether the rank has the output layer.
        chunk: tokens of a chunk of the fused loss; None: the plain loss.
    """

    shape: ModelShape
    layout: BlockLayout
    tokens: int
    blocks: range
    recomputation: Recomputation = STORE_EVERYTHING
    offloaded: bool = False
    in_flight: int = 1
    head: bool = True
    chunk: int | None = None

    @property
    def peak(self) -> int:
        """Bytes at the start of the backward pass, in the loss or in the last block."""
        return self.stored + max(self.output, self.recomputed)

    @property
    def stored(self) -> int:
        """Bytes that the blocks store."""
        boundary = self.layout.element * self.shape.hidden_size
        again = self.recomputation.count(self.blocks)
        if self.recomputation.selective:
            inside = self.in_flight * len(self.blocks) * selective_bytes(self.shape, self.layout)
        else:
            # A recomputed block stores its input. With the inputs on the host, the device has that of the
            # current block and the next one.
            inputs = min(2, self.in_flight * again) if self.offloaded else self.in_flight * again
            layers = self.in_flight * (len(self.blocks) - again)
            inside = layers * layer_bytes(self.shape, self.layout) + inputs * boundary
        return self.tokens * (inside + self.in_flight * self.layout.mask_keys)

    @property
    def output(self) -> int:
        """Bytes of the final norm, the output layer and the loss, if they are on this rank."""
        if not self.head:
            return 0
        shape, element, tokens = self.shape, self.layout.element, self.tokens
        ends = tokens * head_bytes(shape, element, fused=self.chunk is not None)
        if self.chunk is None:
            return ends
        # AutoTP splits only untied output layers.
        rows = -(-shape.vocab_size // (1 if shape.tie_word_embeddings else self.layout.tensor))
        return ends + fused_loss_bytes(tokens, shape.hidden_size, rows, element, self.chunk)

    @property
    def recomputed(self) -> int:
        """Bytes that the last block recomputes, beyond what it stores.

        They exist after those of the output layer and the loss are freed. When an earlier block is
        recomputed, those of the last one are freed, too.
        """
        layer = layer_bytes(self.shape, self.layout)
        if self.recomputation.selective:
            # It has everything again, and still what only the recomputation needed.
            boundary = self.layout.element * self.shape.hidden_size
            return self.tokens * (layer + 2 * boundary - selective_bytes(self.shape, self.layout))
        return self.tokens * layer if self.recomputation.count(self.blocks[-1:]) else 0


def offloaded_bytes(tensors: int, size: int, *, pinned: bool) -> int:
    """Return the bytes of ``tensors`` inputs of blocks on the host.

    torch's allocator of pinned memory rounds the ``size`` of each up to a power of two
    (ATen/core/CachingHostAllocator.h).
    """
    return tensors * (1 << (size - 1).bit_length() if pinned else size)


def selective_bytes(shape: ModelShape, layout: BlockLayout) -> int:
    """Return the bytes per token that one block stores under selective recomputation.

    These are its input and the results of matrix products and of fused attention, as models/recomputation.py
    lists them. Korthikanti et al., 2205.05198, section 5, recompute attention instead and keep 34 bytes per
    element of the residual stream; fused attention has nothing to gain there, whereas norms and activation
    functions have.
    """
    element, scores = layout.element, layout.score_keys
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
    return 2 * element * shape.hidden_size + down + -(-(inside + up) // layout.tensor)


def layer_bytes(shape: ModelShape, layout: BlockLayout) -> int:
    """Return the bytes per token of one block.

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
    element, scores = layout.element, layout.score_keys
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # queries, keys and values after rotation, the output, and its log-sum-exp
    kept = queries if layout.mask_keys or scores or layout.repeats_keys else keys
    attention = element * (2 * queries + 2 * kept) + FP32 * shape.num_attention_heads
    if scores:
        weights = FP32 + (element if element != FP32 else 0)
        attention += shape.num_attention_heads * (scores * weights - FP32)
    traits = get_family(shape.family).traits
    if traits.qk_norm:  # as rms_norm_bytes without the outputs: the rotation does not save its input
        normed = element if layout.compiled else FP32 + element
        attention += normed * (queries + keys) + FP32 * (
            shape.num_attention_heads + shape.num_key_value_heads
        )
    if traits.norm is NormKind.layer:
        # Two layer norms save input, output, mean and deviation; gelu as elementwise operations saves five
        # tensors.
        norms = 2 * (2 * element * shape.hidden_size + 2 * FP32)
        inside = attention + (2 if layout.compiled else 5) * element * shape.intermediate_size
    else:
        norms = 2 * rms_norm_bytes(shape, element, compiled=layout.compiled)
        inside = attention + feed_forward_bytes(shape, element, compiled=layout.compiled)
    mask = (layout.mask_keys or scores) if scores else element * layout.mask_keys
    return norms + -(-inside // layout.tensor) + mask


def rms_norm_bytes(shape: ModelShape, element: int, *, compiled: bool = False) -> int:
    """Return the fp32 input, the normalised input, the scaled output, and one number per token."""
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
    """Return the bytes of all ``tokens``, at the peak of a chunk, of the fused loss (models/fused_loss.py).

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
