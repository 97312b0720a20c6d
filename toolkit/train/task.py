"""What a text model is trained for. Images, trees or boards would be another file like this one: engines know only ``Objective``,
the loop only ``Task``."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from toolkit.data.documents import position_ids
from toolkit.data.evaluation import IGNORED, inputs_and_labels
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
        return int((batch["labels"] != IGNORED).sum())


class NextToken(Text):
    """Cross-entropy of each next token, for models of ``families/``: forward gives logits [micro_batch, sequence, vocabulary].

    In training, ``auxiliary`` times the model's own ``aux_loss`` (the router's load balance) is added, once a token, so that
    dividing by the tokens leaves its weighted mean over the micro-batches. Evaluation is the cross-entropy alone.
    """

    def __init__(self, auxiliary: float = 0.0, end_of_text: int | None = None) -> None:
        super().__init__(end_of_text)
        self._auxiliary = auxiliary

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        balanced = self._auxiliary != 0 and model.training
        extra = {"output_router_logits": True} if balanced else {}
        output = model(input_ids=batch["input_ids"], use_cache=False, **_positions(batch), **extra)
        logits = output.logits.float().flatten(0, 1)
        loss = functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
        return loss + self._auxiliary * output.aux_loss.float() * self.units(batch) if balanced else loss


class OwnLoss(Text):
    """For ``model.target``: ``forward(input_ids, labels)`` returns the mean loss over the labels that are not -100, as a tensor
    or as ``loss`` of an object or mapping. The mean over no label (in the last batch of an evaluation) counts as nothing. Where
    documents are kept apart it takes ``position_ids`` too."""

    def __init__(self, target: str, end_of_text: int | None = None) -> None:
        super().__init__(end_of_text)
        self._target = target

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        output = model(input_ids=batch["input_ids"], labels=batch["labels"], **_positions(batch))
        loss = output["loss"] if isinstance(output, dict) and "loss" in output else getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise self._refusal(loss)
        units = self.units(batch)
        return loss.float().reshape(()) * units if units else torch.nan_to_num(loss.float().reshape(())) * 0

    def _refusal(self, output: Any) -> ConfigError:
        seen = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        return ConfigError(Problem(
            "model.target", f"model.target={self._target}, whose forward returned {seen}",
            "forward(input_ids, labels) returns one mean loss: a scalar tensor, or an object or dict with it as loss",
            "return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) from forward"))


def _positions(batch: MicroBatch) -> MicroBatch:
    """What a model is given beside tokens. From positions that begin anew transformers' models mask attention by document."""
    return {name: tensor for name, tensor in batch.items() if name == "position_ids"}


def text_task(plan: RunPlan, end_of_text: int | None = None) -> Task:
    """Of the plan's model. ``end_of_text``: of data whose documents are kept apart (``data/documents.py``)."""
    model = plan.config.model
    if plan.shape is None:
        assert model.target is not None, "a plan without a shape is of model.target"
        return OwnLoss(model.target, end_of_text)
    return NextToken(plan.shape.router_aux_loss_coef, end_of_text)
