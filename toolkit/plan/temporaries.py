"""Bytes of tensors that live for a moment: within one block's backward pass, or within the optimizer's step.

The saved activations (plan/activations.py) are all alive when the backward pass begins. On top of them are
the gradients inside the block that the backward pass is in; the optimizer's step comes when all activations
are freed, so its copies count only where they need more than activations did.

Sources: torch's derivatives of linear layers, silu and gelu, whose gradients are as large as their inputs;
DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``step``: a flat copy of a group's gradients, and its fp32
copy) and stage3.py (``_prepare_fp32_grad_for_sub_group``); torch/optim/adam.py (``_multi_tensor_adam``: one
fp32 temporary for all parameters of a group); megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.families.base import ModelShape
from toolkit.plan.memory_zero import FP32, OptimizerGroup

SUB_GROUP = 1_000_000_000  # elements: DeepSpeed's default sub_group_size
MESSAGES = 3  # the next input, the gradient that arrives and the one that leaves


def block_gradient_bytes(
    shape: ModelShape, *, element: int, tensor: int = 1, sequence_ranks: int = 1, scores: int = 0
) -> int:
    """Return the bytes per token of gradients inside a block, at their peak in the feed-forward or in
    attention.

    Args:
        element: bytes of an element.
        tensor: tensor-parallel ranks, which share the tensors inside attention and feed-forward.
        sequence_ranks: those that share the residual stream: ``tensor`` with sequence parallelism, which
            gathers a block's gradient and a product's input whole, else 1.
        scores: keys whose attention weights exist for each token (``eager``), else 0.
    """
    # of the block's output; with experts also of their inputs
    residual = (2 if shape.num_local_experts else 1) * element * shape.hidden_size // sequence_ranks
    gathered = element * shape.hidden_size if sequence_ranks > 1 else 0
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # of the output, queries, keys and values; of the softmax in fp32 and its input
    attention = element * (2 * queries + 2 * keys)
    attention += shape.num_attention_heads * scores * (FP32 + element)
    # Two more than were saved: the gradients of a product's operands come while the operands and the gradient
    # of the product exist, but its result is freed.
    forward = 2 * element * shape.intermediate_size * max(1, shape.num_experts_per_tok)
    return residual + gathered + max(attention, forward) // tensor


def weight_gradient_bytes(
    shape: ModelShape, tokens: int, weight: int, *, element: int, tensor: int = 1
) -> int:
    """Return the bytes of the gradient of a block's largest ``weight`` beyond :func:`block_gradient_bytes`.

    It exists before it is added to a buffer. By then the four tensors of the feed-forward that the first
    product of its backward pass needed are freed.
    """
    freed = 4 * element * shape.intermediate_size * max(1, shape.num_experts_per_tok) // tensor
    return max(0, weight - tokens * freed)


def message_bytes(boundary: int, pipeline: int, chunks: int = 1) -> int:
    """Return the bytes of activations and gradients on their way between pipeline stages.

    Args:
        boundary: bytes of the residual stream of a micro-batch.
        chunks: virtual stages of a rank, which overlap their messages with computation, so that one more
            is on its way.
    """
    return (MESSAGES + (chunks > 1)) * boundary if pipeline > 1 else 0


def deepspeed_step_bytes(
    groups: Sequence[OptimizerGroup], *, stage: int, element: int, fp32_gradients: bool, foreach: bool
) -> int:
    """Return the bytes of copies in the step of a DeepSpeed optimizer on the device, of the largest group.

    Args:
        element: bytes of an element of parameters.
        fp32_gradients: whether gradients are accumulated in fp32, and so are not converted.
        foreach: whether torch's optimizer computes all parameters of a group at once.
    """
    if stage == 0:
        return sum(group.numel for group in groups) * FP32 if foreach else 0
    sizes = [min(group.partition, SUB_GROUP) if stage == 3 else group.partition for group in groups]
    # a flat copy of the gradients, and the fp32 copy of that one if they are in 16 bits
    copies = FP32 if fp32_gradients or element == FP32 else element + FP32
    return max(sizes, default=0) * (copies + (FP32 if foreach else 0))


def peak_temporary_bytes(*, backward: int, step: int, loss: int, activations: int) -> int:
    """Return the bytes on top of states and activations at the peak of a step.

    Args:
        backward: gradients inside one block, in all tokens of a micro-batch.
        step: copies of the optimizer's step, when no activations exist.
        loss: activations of the output layer and the loss, which are freed when the last block's backward
            pass begins, less those of the block that are recomputed then.
        activations: of the whole peak, with ``loss``.
    """
    return max(0, backward - loss, step - activations)


def largest_weight_bytes(sizes: Iterable[int], element: int) -> int:
    """Return the bytes of the gradient of the largest parameter, which exists before it is added to a
    buffer.
    """
    return max(sizes, default=0) * element
