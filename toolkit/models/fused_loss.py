"""The cross-entropy of an output layer without the logits of the whole micro-batch
(``train.loss_kernel=fused``).

Logits, softmax and gradients are computed for a chunk of tokens at a time, as in Liger Kernel (Hsu et al.,
2410.10989, section 3.2): gradients in forward, because the loss is a sum, whose upstream gradient is one
number. Peak memory is that of one chunk, and of the weight's gradient in fp32.

``torch.nn.functional.linear_cross_entropy`` of torch 2.13 does the same, but in bf16 it returns the sum with
three digits, rounds the upstream gradient to bf16, and adds the chunks' gradients of the weight in bf16.
``tests/models/test_fused_loss.py`` measures both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from toolkit.data.evaluation import IGNORE_INDEX


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor | None = None,
    *,
    chunk: int,
    backend: str | None = None,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of the logits ``hidden @ weight.T``, an fp32 scalar.

    Its backward runs once and has no second derivative.

    Args:
        hidden: [..., hidden_size]. With ``group`` its gradient is this rank's part of a sum over the group.
        weight: [vocabulary, hidden_size]. With ``group`` this rank's rows; all ranks have equally many.
        labels: int64 with the leading dims of ``hidden``; -100 if masked.
        loss_weights: as ``labels``; they multiply the loss of each token.
        chunk: the largest number of tokens whose logits exist at a time.
        backend: of torch.compile, which fuses the elementwise operations; None, or with ``group``: eager.
        group: the ranks that share the vocabulary.
        vocabulary: rows of the whole weight that are tokens; those after them are padding.
    """
    scale = (labels != IGNORE_INDEX).float()
    if loss_weights is not None:
        scale = scale * loss_weights
    loss: torch.Tensor = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.flatten(),
        scale.flatten(),
        chunk,
        _Vocabulary(backend, group, vocabulary),
        torch.is_grad_enabled(),
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scale: torch.Tensor,
        chunk: int,
        vocabulary: _Vocabulary,
        with_gradients: bool,
    ) -> torch.Tensor:
        chunks = max(1, -(-len(hidden) // chunk))
        rows = max(1, -(-len(hidden) // chunks))
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = of_weight = None
        if with_gradients and ctx.needs_input_grad[0]:
            of_hidden = torch.empty_like(hidden)
        if with_gradients and ctx.needs_input_grad[1]:
            # Sums over chunks in 16 bits would be rounded once for each chunk.
            dtype = weight.dtype if chunks == 1 else torch.float32
            of_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        for start in range(0, len(hidden), rows):
            part, factor = hidden[start : start + rows], scale[start : start + rows]
            losses, gradient = vocabulary.cross_entropy(part @ weight.t(), labels[start : start + rows])
            total += (losses * factor).sum()
            factor = factor.unsqueeze(1)
            if of_hidden is not None:
                torch.mul(gradient @ weight, factor, out=of_hidden[start : start + rows])
            if of_weight is not None:
                of_weight += gradient.t() @ (part * factor).to(part.dtype)
            del gradient  # before the next chunk has logits
        ctx.gradients, ctx.dtype = (of_hidden, of_weight), weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the fused loss was differentiated twice; write train.loss_kernel=plain")
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        # Of two dims, because a factor without dims is rounded to the precision of the other one.
        factor = upstream.float().reshape(1, 1)
        return (
            None if of_hidden is None else of_hidden.mul_(factor),
            None if of_weight is None else of_weight.mul_(factor).to(ctx.dtype),
            *[None] * 5,
        )


class _Vocabulary:
    """The columns of this rank's logits. Arguments as of :func:`linear_cross_entropy`."""

    def __init__(self, backend: str | None, group: dist.ProcessGroup | None, size: int | None) -> None:
        self._group, self._size = group, size
        self._softmax = _softmax if backend is None else _compiled(backend)

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fp32 losses [tokens] of logits [tokens, columns], and their gradients, which overwrite them.

        Those of masked tokens have no meaning.
        """
        columns, group = logits.shape[1], self._group
        first = 0 if group is None else dist.get_rank(group) * columns
        if self._size is not None and first + columns > self._size:
            logits[:, max(self._size - first, 0) :] = torch.finfo(logits.dtype).min
        targets = (labels.where(labels != IGNORE_INDEX, 0) - first).unsqueeze(1)
        if group is None:
            chosen = self._softmax(logits, targets)
            logits.scatter_(1, targets, torch.expm1(chosen).to(logits.dtype))
            return -chosen.squeeze(1), logits
        mine = (targets >= 0) & (targets < columns)
        return _cross_entropy_of_group(logits, targets.where(mine, 0), mine, group)


def _softmax(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Overwrite logits by probabilities; return the fp32 logarithms of the targets' ones, [tokens, 1]."""
    result = logits.log_softmax(dim=1, dtype=torch.float32)
    chosen = result.gather(1, targets)
    logits.copy_(result.exp_())
    return chosen


@cache
def _compiled(backend: str) -> Any:
    return torch.compile(_softmax, fullgraph=True, backend=backend)


def _cross_entropy_of_group(
    logits: torch.Tensor, targets: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``cross_entropy`` over a group; ``mine`` [tokens, 1]: whether the label is on this rank."""
    result = logits.log_softmax(dim=1, dtype=torch.float32)
    own = logits[:, :1].float() - result[:, :1]  # the logarithm of this rank's sum of exponentials
    peak = own.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    sums = torch.cat([(own - peak).exp(), (result.gather(1, targets) + own).where(mine, 0.0)], dim=1)
    dist.all_reduce(sums, group=group)
    whole = sums[:, :1].log() + peak
    result.add_(own - whole)
    at_target = result.gather(1, targets).exp() - mine.float()
    logits.copy_(result.exp_()).scatter_(1, targets, at_target.to(logits.dtype))
    return (whole - sums[:, 1:]).squeeze(1), logits
