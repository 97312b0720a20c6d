"""Training tasks for text models. Other kinds of data have their own module: engines depend only on
``Objective``, the loop only on ``Task``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.evaluation import IGNORED, inputs_and_labels
from toolkit.data.tokens.documents import position_ids
from toolkit.engine.protocol import MicroBatch, Objective
from toolkit.errors import ConfigError, Problem
from toolkit.plan.types import RunPlan


class Task(Objective, Protocol):
    """An objective, and how it collates samples of the stream into micro-batches."""

    def collate(self, samples: np.ndarray, device: torch.device) -> MicroBatch:
        """Turn the samples of one micro-batch into tensors on ``device``."""


class TextTask(Task):
    """Collate int64 samples [micro_batch, sequence + 1] into inputs and shifted labels, [micro_batch,
    sequence] each.

    Args:
        end_of_text: the token that ends every document. If given, ``position_ids`` restart at 0 in each
            document, which masks attention between documents.
    """

    def __init__(self, end_of_text: int | None = None) -> None:
        self._end_of_text = end_of_text

    def collate(self, samples: np.ndarray, device: torch.device) -> MicroBatch:
        inputs, labels = inputs_and_labels(samples)
        found = {"input_ids": inputs, "labels": labels}
        if self._end_of_text is not None:
            found["position_ids"] = position_ids(samples, self._end_of_text)
        return {name: torch.from_numpy(array).to(device) for name, array in found.items()}

    def units(self, batch: MicroBatch) -> int:
        return int((batch["labels"] != IGNORED).sum())


class NextToken(TextTask):
    """Cross-entropy of the next token, for models of ``families/`` that return logits [micro_batch,
    sequence, vocabulary].

    In training, ``router_coefficient`` times :func:`load_balance` is added per token, so that dividing by
    the number of tokens gives its weighted mean over the micro-batches. Evaluation uses the cross-entropy
    alone.

    Args:
        experts_per_token: number of experts that each token is routed to; 0 for a dense model.
    """

    def __init__(
        self, router_coefficient: float = 0.0, end_of_text: int | None = None, *, experts_per_token: int = 0
    ) -> None:
        super().__init__(end_of_text)
        self._router_coefficient, self._experts_per_token = router_coefficient, experts_per_token

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        balanced = self._router_coefficient != 0 and model.training
        extra = {"output_router_logits": True} if balanced else {}
        output = model(input_ids=batch["input_ids"], use_cache=False, **_positions(batch), **extra)
        logits = output.logits.float().flatten(0, 1)
        loss = functional.cross_entropy(
            logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        if not balanced:
            return loss
        return loss + self._router_coefficient * load_balance(
            output.router_logits, self._experts_per_token
        ) * self.units(batch)


def load_balance(router_logits: Sequence[torch.Tensor], experts_per_token: int) -> torch.Tensor:
    """Return the load-balancing loss of Switch Transformers (Fedus et al., 2101.03961, equations 4 to 6),
    averaged over layers.

    It equals ``experts_per_token`` if all experts are equally busy, and is larger otherwise. Megatron-core
    sums the same loss over layers and divides it by ``experts_per_token``; the plan converts the
    coefficient. transformers' ``aux_loss`` is not used, because it adds the counts of all layers first, so
    that layers with different preferences cancel out.

    Args:
        router_logits: [tokens, experts] for each layer.
    """
    losses = []
    for logits in router_logits:
        experts = logits.shape[-1]
        probabilities = logits.float().softmax(dim=-1)
        chosen = probabilities.topk(experts_per_token, dim=-1).indices
        visits = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(dim=0)
        losses.append(experts * (visits * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


class CustomLoss(TextTask):
    """The loss of a ``model.target`` module.

    ``forward(input_ids, labels)`` returns the mean loss over the labels that are not -100, as a tensor or as
    ``loss`` of an object or mapping. If documents are separate it receives ``position_ids`` too. A mean over
    no labels, as in the last batch of an evaluation, counts as zero.
    """

    def __init__(self, target: str, end_of_text: int | None = None) -> None:
        super().__init__(end_of_text)
        self._target = target

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        output = model(input_ids=batch["input_ids"], labels=batch["labels"], **_positions(batch))
        loss = (
            output["loss"]
            if isinstance(output, dict) and "loss" in output
            else getattr(output, "loss", output)
        )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise self._error(loss)
        units = self.units(batch)
        return loss.float().reshape(()) * units if units else torch.nan_to_num(loss.float().reshape(())) * 0

    def _error(self, output: Any) -> ConfigError:
        seen = (
            f"a tensor of shape {tuple(output.shape)}"
            if isinstance(output, torch.Tensor)
            else type(output).__name__
        )
        return ConfigError(
            Problem(
                "model.target",
                f"model.target={self._target}, whose forward returned {seen}",
                "forward(input_ids, labels) returns one mean loss: a scalar tensor, or an object or dict "
                "with the key loss",
                "return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) from "
                "forward",
            )
        )


def _positions(batch: MicroBatch) -> MicroBatch:
    """Return the model's further inputs. transformers' models mask attention by document if positions
    restart.
    """
    return {name: tensor for name, tensor in batch.items() if name == "position_ids"}


def text_task(plan: RunPlan, end_of_text: int | None = None) -> Task:
    """Return the task of the plan's model.

    Args:
        end_of_text: of data with separate documents (``data/tokens/documents.py``).
    """
    model = plan.config.model
    if plan.shape is None:
        assert model.target is not None, "a plan without a shape has a model.target"
        return CustomLoss(model.target, end_of_text)
    return NextToken(
        plan.shape.router_aux_loss_coef, end_of_text, experts_per_token=plan.shape.num_experts_per_tok
    )
