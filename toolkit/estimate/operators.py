"""The operators of one decoder layer, of the output layer and of the optimizer, as one rank executes them.

An operator is a matrix product, fused attention, or work that is limited by memory bandwidth. Sizes are those
of one micro-batch on one rank, after tensor, context and expert parallelism have divided them. The layers are
those of the families (toolkit/families); which elementwise operations are fused follows the plan's kernels.

Elementwise bytes count each tensor that a kernel reads or writes once, as Ivanov et al., "Data movement is
all you need" (2007.00072), do: a fused kernel moves its inputs and outputs only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.config.kernels import AttentionKernel
from toolkit.config.schema import EngineName
from toolkit.families import get_family
from toolkit.families.base import FamilyTraits, ModelShape, NormKind
from toolkit.optimizers.base import FP32
from toolkit.plan.attention import has_dense_mask
from toolkit.plan.kernels import FUSED, TRANSFORMER_ENGINE
from toolkit.plan.trace import OperatorWork
from toolkit.plan.types import Device, RunPlan


@dataclass(frozen=True, slots=True)
class Matmul:
    """``count`` products of [rows, inner] with [inner, columns]; ``fp8`` inputs, otherwise the run's
    precision.
    """

    rows: float
    columns: float
    inner: float
    count: float = 1
    fp8: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.count


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention of ``heads`` heads over all sequences in one kernel that does not store the weights.

    Attributes:
        pairs: pairs of a query and a key that one head computes, without the masked half.
        length: of the keys of a sequence.
        width: of one head.
        moved_bytes: of queries, keys, values and output.
        backward: whether it computes gradients, which takes five products instead of two (Dao, 2307.08691,
            section 3.1).
    """

    heads: float
    pairs: float
    length: int
    width: int
    moved_bytes: float
    backward: bool = False

    @property
    def flops(self) -> float:
        return (10.0 if self.backward else 4.0) * self.heads * self.pairs * self.width


@dataclass(frozen=True, slots=True)
class Elementwise:
    """``kernels`` that read and write ``moved_bytes`` of device memory together."""

    moved_bytes: float
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """All calls of one operator of torch in one pass, from a trace of the module (plan/trace.py).

    Attributes:
        attention: whether it is a fused kernel of attention.
        backward: whether the pass is the backward pass.
    """

    work: OperatorWork
    attention: bool
    backward: bool

    @property
    def flops(self) -> float:
        return self.work.flops


Operator = Matmul | FusedAttention | Elementwise | TracedCalls


@dataclass(frozen=True, slots=True)
class Work:
    """Operators of a forward pass and of the backward pass that belongs to it."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return sum(operator.flops for operator in self.forward if not isinstance(operator, Elementwise))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The part of a micro-batch that one rank computes, and the kernels that it uses.

    Attributes:
        tokens: of the micro-batch on this rank.
        sequences: of the micro-batch.
        length: of a whole sequence.
        context: context-parallel ranks.
        ulysses: whether context ranks exchange tokens for heads in attention, as DeepSpeed's Ulysses does;
            otherwise they gather keys and values.
        tensor: tensor-parallel ranks.
        sequence_ranks: ranks that share the tensors between products: ``tensor`` with sequence parallelism,
            else 1.
        expert: expert-parallel ranks.
        element: bytes of an element.
        fp8: whether products of decoder layers are in fp8.
        fused: whether elementwise operations are fused by a compiler or the engine's kernels.
        fused_norms, fused_rotary: the same for norms and rotary embeddings.
        attention: name of the kernel.
        dense_mask: whether attention reads a mask of all pairs.
        dropout: whether the residual stream and, where they are stored, attention weights have dropout.
        fused_loss: whether logits are computed for one chunk of tokens at a time.
        head_ranks: those that share the output layer.
    """

    tokens: float
    sequences: int
    length: int
    context: int
    ulysses: bool
    tensor: int
    sequence_ranks: int
    expert: int
    element: int
    fp8: bool
    fused: bool
    fused_norms: bool
    fused_rotary: bool
    attention: str
    dense_mask: bool
    dropout: bool
    fused_loss: bool
    head_ranks: int


def share_of_rank(plan: RunPlan, shape: ModelShape) -> RankShare:
    """Return the part of one micro-batch that a rank of ``plan`` computes."""
    config, axes, kernels = plan.config, plan.axes, plan.kernels
    megatron = config.engine.name is EngineName.megatron
    settings = plan.megatron["transformer"] if plan.megatron is not None else {}
    engine_kernels = kernels.layers.name == TRANSFORMER_ENGINE
    compiled = kernels.compile.name != "none"
    on_gpu = plan.world.device is Device.CUDA
    return RankShare(
        tokens=plan.batch.micro_batch * config.train.sequence_length / axes.context,
        sequences=plan.batch.micro_batch,
        length=config.train.sequence_length,
        context=axes.context,
        ulysses=not megatron,
        tensor=axes.tensor,
        sequence_ranks=axes.tensor if settings.get("sequence_parallel") else 1,
        expert=axes.expert,
        element=config.precision.element_bytes,
        fp8=config.precision.fp8,
        fused=compiled or bool(settings.get("bias_activation_fusion") or settings.get("bias_dropout_fusion")),
        fused_norms=compiled or (on_gpu and (megatron or get_norm(shape) is NormKind.layer)),
        fused_rotary=compiled or engine_kernels,
        attention=kernels.attention.name,
        dense_mask=has_dense_mask(config, kernels.attention.name),
        dropout=shape.dropout > 0,
        fused_loss=kernels.loss.name == FUSED,
        head_ranks=axes.tensor if megatron or not shape.tie_word_embeddings else 1,
    )


def get_norm(shape: ModelShape) -> NormKind:
    return get_family(shape.family).traits.norm


def layer_work(shape: ModelShape, share: RankShare, weights: float = 0.0) -> Work:
    """Return the work of one decoder layer.

    Args:
        weights: bytes that its gradients of weights move, apart from the products that compute them.
    """
    traits = get_family(shape.family).traits
    hidden, tokens, element = shape.hidden_size, share.tokens, share.element
    queries = shape.num_attention_heads * shape.head_dim / share.tensor
    keys = shape.num_key_value_heads * shape.head_dim / share.tensor
    between = tokens * hidden / share.sequence_ranks * element  # bytes of the residual stream on this rank
    rotated = tokens * (queries + keys) * element
    norm = _norm(between, fused=share.fused_norms)
    # The sum of the stream and a layer's output with its bias. The gradient passes through.
    residual = _elementwise(3 * between if share.fused else 5 * between, 0 if share.fused else between)
    if share.dropout:  # a mask of one byte per element, and the masked gradient
        residual = _elementwise(3.5 * between if share.fused else 7.5 * between, 2.5 * between)
    inside = [_norm(rotated, fused=share.fused_norms)] if traits.qk_norm else []
    if traits.rotary:
        # Two products, a rotated copy and a sum if it is not fused.
        inside.append(
            _elementwise(2 * rotated, 2 * rotated)
            if share.fused_rotary
            else _elementwise(9 * rotated, 9 * rotated, 5)
        )
    return _join(
        norm,
        _linear(tokens, queries + 2 * keys, hidden, share),
        *inside,
        attention_work(shape, share),
        _linear(tokens, hidden, queries, share),
        residual,
        norm,
        _feed_forward(shape, share, traits),
        residual,
        Work((), (Elementwise(weights, 1),)),
    )


def head_work(shape: ModelShape, share: RankShare) -> Work:
    """Return the work of the final norm, the output layer and the cross-entropy.

    The plain loss writes logits, converts them to fp32, and reads them for the maximum, the sum and the
    target; backward writes their gradient. The fused loss does the same in chunks, with fewer passes.
    """
    rows = shape.vocab_size / share.head_ranks
    logits = share.tokens * rows
    forward, backward = (3 * share.element, 2 * share.element) if share.fused_loss else (4 * FP32, 3 * FP32)
    return _join(
        _norm(
            share.tokens * shape.hidden_size / share.sequence_ranks * share.element, fused=share.fused_norms
        ),
        _linear(share.tokens, rows, shape.hidden_size, replace(share, fp8=False)),
        _elementwise(logits * forward, logits * backward, 4),
    )


def embedding_work(shape: ModelShape, share: RankShare) -> Work:
    """Return the work of looking up rows, and of adding their gradients to the table."""
    rows = share.tokens * shape.hidden_size * share.element
    return _elementwise(2 * rows, 3 * rows, 2)


def optimizer_work(elements: float, element: int, *, fused: bool) -> Elementwise:
    """Return the work of updating ``elements`` parameters with weights of ``element`` bytes and two moments.

    Gradients are read for the norm and for the update, master weights and moments are read and written, and
    16-bit weights are written. Without a fused kernel, each elementwise step of Adam reads and writes its
    tensors, which is about three times as much.
    """
    once = 2 * FP32 + 2 * FP32 * 3 + (element if element != FP32 else 0)
    return Elementwise(elements * (once if fused else 3 * once), 4)


def _linear(rows: float, columns: float, inner: float, share: RankShare, count: float = 1) -> Work:
    """Return the work of a linear layer. Its backward pass computes the gradients of its input and its
    weight.
    """
    products = Work(
        (Matmul(rows, columns, inner, count, share.fp8),),
        (Matmul(rows, inner, columns, count, share.fp8), Matmul(inner, columns, rows, count, share.fp8)),
    )
    if not share.fp8:
        return products
    # Inputs are converted: read in 16 bits, written in 8 bits, once plain and once transposed.
    return _join(products, _elementwise(4 * rows * inner * count, 4 * rows * columns * count))


def _elementwise(forward: float, backward: float, kernels: int = 1) -> Work:
    """Return the work of kernels that move ``forward`` bytes, and of as many that move ``backward`` bytes."""
    return Work((Elementwise(forward, kernels),), (Elementwise(backward, kernels),))


def _norm(size: float, *, fused: bool) -> Work:
    """Norm of ``size`` bytes. Without a fused kernel it converts to fp32, squares, averages and scales."""
    return _elementwise(2 * size, 3 * size) if fused else _elementwise(12 * size, 20 * size, 7)


def attention_work(shape: ModelShape, share: RankShare) -> Work:
    """Return the work of the attention of all heads of the rank, over whole sequences.

    Causal kernels skip the masked half; ``eager`` and kernels with a mask of all pairs do not. Eager stores
    and reads the weights of all pairs: a product, a masked softmax in fp32 and a copy in 16 bits, and a
    product, with the gradients of each in the backward pass.
    """
    heads = shape.num_attention_heads / share.tensor
    keys = shape.num_key_value_heads / share.tensor
    # With either kind of context parallelism, a rank computes an equal part of the pairs.
    everything = share.sequences * share.length * share.length / share.context
    width, element = shape.head_dim, share.element
    if share.attention != AttentionKernel.eager.value:
        moved_bytes = share.tokens * (2 * heads + 2 * keys) * width * element
        pairs = everything if share.dense_mask else everything / 2
        forward = FusedAttention(heads, pairs, share.length, width, moved_bytes)
        return Work((forward,), (replace(forward, backward=True),))
    count = share.sequences * heads / (share.context if share.ulysses else 1)
    rows = share.length if share.ulysses else share.length / share.context
    scores = Matmul(rows, share.length, width, count)
    values = Matmul(rows, width, share.length, count)
    weights = heads * everything
    dropped = 2 * element + 1 if share.dropout else 0
    return Work(
        (scores, Elementwise(weights * (3 * element + FP32 + dropped), 2), values),
        (
            scores,
            values,
            Matmul(share.length, width, rows, 2 * count),
            Elementwise(weights * (4 * element + FP32 + dropped), 3),
        ),
    )


def _feed_forward(shape: ModelShape, share: RankShare, traits: FamilyTraits) -> Work:
    """Up, activation, down; with experts the router, and each expert's equal share of the tokens.

    Expert-parallel ranks exchange tokens, so a rank has as many as before, for fewer experts.
    """
    inner, hidden = shape.intermediate_size / share.tensor, shape.hidden_size
    tokens, count = share.tokens, 1.0
    around: list[Work] = []
    if traits.experts:
        visits = share.tokens * shape.num_experts_per_tok
        count = shape.num_local_experts / share.expert
        tokens = visits / count
        permuted = 5 * visits * hidden * share.element  # to experts, back, and the weighted sum
        around = [
            _linear(share.tokens, shape.num_local_experts, hidden, replace(share, fp8=False)),
            _elementwise(permuted, permuted, 4),
        ]
    width = tokens * count * inner * share.element
    if traits.gated:
        activation = (
            _elementwise(3 * width, 5 * width) if share.fused else _elementwise(5 * width, 8 * width, 2)
        )
    else:  # transformers' gelu_new is eight elementwise operations
        activation = (
            _elementwise(2 * width, 3 * width) if share.fused else _elementwise(18 * width, 24 * width, 8)
        )
    up = (2 if traits.gated else 1) * inner
    return _join(
        *around,
        _linear(tokens, up, hidden, share, count),
        activation,
        _linear(tokens, hidden, inner, share, count),
    )


def _join(*parts: Work) -> Work:
    return Work(
        tuple(operator for part in parts for operator in part.forward),
        tuple(operator for part in parts for operator in part.backward),
    )
