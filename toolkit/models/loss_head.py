"""Let a causal language model compute its loss in its output layer (``train.loss_kernel=fused``).

The loss runs inside the output layer's own ``forward``, so that the hooks of ZeRO 3, which gather a module's
weights while it runs, apply to it as to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import ConfigError, Problem
from toolkit.models.fused_loss import linear_cross_entropy
from toolkit.plan.kernels import FUSED, loss_backend, loss_chunk
from toolkit.plan.types import RunPlan

LABELS, WEIGHTS = "loss_labels", "loss_weights"


@dataclass(frozen=True, slots=True)
class ShardedOutputLayer:
    """An output layer whose vocabulary is divided among the ranks of ``group``.

    ``enter`` returns the hidden states unchanged, and sums their gradients over the group.
    """

    group: dist.ProcessGroup
    enter: Callable[[torch.Tensor], torch.Tensor]


def fuse_loss(model: nn.Module, plan: RunPlan, sharded: ShardedOutputLayer | None = None) -> nn.Module:
    """Let ``model`` accept the arguments of :func:`loss_arguments` if the plan has chosen a fused loss.

    With them it returns ``loss``, the fp32 sum of the cross-entropies, and no logits. Without them nothing
    changes. Returns ``model``.

    Raises:
        ConfigError: it has no output layer, or one with a bias.
    """
    if plan.kernels.loss.name != FUSED:
        return model
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if head is None or getattr(head, "bias", None) is not None:
        raise _problem(plan, "has no output layer" if head is None else "has an output layer with a bias")
    assert plan.vocab_size is not None, "models with an output layer have a vocabulary"
    compute: Any = partial(
        linear_cross_entropy,
        chunk=loss_chunk(plan.config, plan.vocab_size),
        group=None if sharded is None else sharded.group,
    )
    if (backend := loss_backend(plan.config, plan.world)) is not None:
        # Traced, the loop over chunks would be unrolled; its body is compiled.
        compute = torch.compiler.disable(partial(compute, backend=backend))
    loss = _OutputLayerLoss(plan, head, compute, sharded)
    head.forward = loss.forward
    model.register_forward_pre_hook(loss.take_labels, with_kwargs=True)
    model.register_forward_hook(loss.rename_output)
    model.has_fused_loss = True  # type: ignore[assignment]
    return model


def has_fused_loss(model: nn.Module) -> bool:
    return bool(getattr(model, "has_fused_loss", False))


def loss_arguments(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the arguments with which a model with a fused loss computes it; none for other models."""
    if not has_fused_loss(model):
        return {}
    return {LABELS: batch["labels"], **({WEIGHTS: batch[WEIGHTS]} if WEIGHTS in batch else {})}


class _OutputLayerLoss:
    def __init__(
        self,
        plan: RunPlan,
        head: Any,
        compute: Callable[..., torch.Tensor],
        sharded: ShardedOutputLayer | None,
    ) -> None:
        self._plan, self._head, self._compute = plan, head, compute
        self._logits, self._enter = head.forward, sharded.enter if sharded else lambda hidden: hidden
        self._labels: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None

    def take_labels(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._labels, self._weights, self._loss = named.pop(LABELS, None), named.pop(WEIGHTS, None), None
        return arguments, named

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._labels is None:
            logits: torch.Tensor = self._logits(hidden)
            return logits
        self._loss = self._compute(self._enter(hidden), self._head.weight, self._labels, self._weights)
        return self._loss

    def rename_output(self, _: nn.Module, __: object, output: Any) -> Any:
        if self._labels is None:
            return output
        loss, mine = output["logits"], self._loss
        self._labels = self._weights = self._loss = None
        comparable = type(loss) is torch.Tensor and not torch.compiler.is_compiling()
        if mine is None or (comparable and loss.data_ptr() != mine.data_ptr()):
            raise _problem(self._plan, "computes with the logits of its output layer, as in soft-capping")
        return type(output)(**{**output, "loss": loss, "logits": None})


def _problem(plan: RunPlan, seen: str) -> ConfigError:
    model = plan.config.model
    name = model.hf.architecture or model.family
    return ConfigError(
        Problem(
            "train.loss_kernel",
            f"train.loss_kernel={plan.config.train.loss_kernel.value}: {name} {seen}",
            "the fused loss is that of the product of hidden states and the weight of an output layer",
            "write train.loss_kernel=plain",
        )
    )
