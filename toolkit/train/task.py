"""What a text model is trained for. Images, trees or boards would be another file like this one: engines know only ``Objective``,
the loop only ``Task``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.evaluation import IGNORE_INDEX, inputs_and_labels
from toolkit.data.tokens.documents import position_ids
from toolkit.engine.protocol import MicroBatch, Objective
from toolkit.errors import ConfigError, Problem
from toolkit.plan.types import RunPlan


class Task(Objective, Protocol):
    """An objective, and how samples of the stream become its micro-batches."""

    def collate(self, samples: np.ndarray, device: torch.device) -> MicroBatch:
        """One micro-batch's samples, as the stream gives them, on the engine's device."""


class Text(Task):
    """Samples are int64 [micro_batch, sequence + 1]: the inputs, and shifted by one the labels, int64 [micro_batch, sequence] each.

    With ``end_of_text``, the token that ends every document, documents are kept apart: ``position_ids`` begin anew in each.
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
        return int((batch["labels"] != IGNORE_INDEX).sum())


class NextToken(Text):
    """Cross-entropy of each next token, for models of ``families/``: forward gives logits [micro_batch, sequence, vocabulary].

    In training, ``router_coefficient`` times :func:`load_balance` is added, once a token, so that dividing by the tokens leaves its
    weighted mean over the micro-batches. Evaluation is the cross-entropy alone.

    Args:
        experts_per_token: experts that each token visits; 0 in a model without experts.
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
            logits, batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        if not balanced:
            return loss
        return loss + self._router_coefficient * load_balance(
            output.router_logits, self._experts_per_token
        ) * self.units(batch)


def load_balance(router_logits: Sequence[torch.Tensor], experts_per_token: int) -> torch.Tensor:
    """The load-balancing loss of Switch Transformers (Fedus et al., 2101.03961, equations 4 to 6), of each layer, averaged over layers.

    It is ``experts_per_token`` where all experts are equally busy, and more elsewhere. Megatron-core has the same loss, summed over layers
    and divided by ``experts_per_token``: the plan converts the coefficient. transformers' ``aux_loss`` adds the layers' counts up before it
    compares them, so that two layers that prefer different experts balance each other; it is not used.

    Args:
        router_logits: of each layer, [tokens, experts].
    """
    losses = []
    for logits in router_logits:
        experts = logits.shape[-1]
        probabilities = logits.float().softmax(dim=-1)
        chosen = probabilities.topk(experts_per_token, dim=-1).indices
        visits = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(dim=0)
        losses.append(experts * (visits * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


class OwnLoss(Text):
    """For ``model.target``: ``forward(input_ids, labels)`` returns the mean loss over the labels that are not -100, as a tensor
    or as ``loss`` of an object or mapping. The mean over no label (in the last batch of an evaluation) counts as nothing. Where
    documents are kept apart it takes ``position_ids`` too."""

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
            raise self._refusal(loss)
        units = self.units(batch)
        return loss.float().reshape(()) * units if units else torch.nan_to_num(loss.float().reshape(())) * 0

    def _refusal(self, output: Any) -> ConfigError:
        seen = (
            f"a tensor of shape {tuple(output.shape)}"
            if isinstance(output, torch.Tensor)
            else type(output).__name__
        )
        return ConfigError(
            Problem(
                "model.target",
                f"model.target={self._target}, whose forward returned {seen}",
                "forward(input_ids, labels) returns one mean loss: a scalar tensor, or an object or dict with it as loss",
                "return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) from forward",
            )
        )


def _positions(batch: MicroBatch) -> MicroBatch:
    """What a model is given beside tokens. From positions that begin anew transformers' models mask attention by document."""
    return {name: tensor for name, tensor in batch.items() if name == "position_ids"}


def text_task(plan: RunPlan, end_of_text: int | None = None) -> Task:
    """Of the plan's model. ``end_of_text``: of data whose documents are kept apart (``data/tokens/documents.py``)."""
    model = plan.config.model
    if plan.shape is None:
        assert model.target is not None, "a plan without a shape is of model.target"
        return OwnLoss(model.target, end_of_text)
    return NextToken(
        plan.shape.router_aux_loss_coef, end_of_text, experts_per_token=plan.shape.num_experts_per_tok
    )
