"""Tasks: how samples become a micro-batch, and the loss that a run minimizes.

``Task`` is the base class of the toolkit's tasks and of users' tasks (``task.target``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from toolkit.data.evaluation import IGNORE_INDEX, inputs_and_labels
from toolkit.data.tokens.documents import position_ids
from toolkit.engine.protocol import LOSS, MicroBatch, count_units
from toolkit.errors import ConfigError, Problem
from toolkit.models.loss_head import has_fused_loss, loss_arguments
from toolkit.plan.types import RunPlan


class Task(ABC):
    """Collates samples into micro-batches and computes their loss.

    A user's task, named by ``task.target``, implements ``loss_sum`` and overrides what else it
    needs. The toolkit divides the sum of ``loss_sum`` over the global batch by the sum of ``units``, so that
    the gradient depends neither on the number of ranks nor on gradient accumulation.

    Attributes:
        unit: what ``units`` counts, in the singular. Metrics and throughput are reported in it.
        flops_per_unit: FLOPs of the forward and backward pass of one unit, for the MFU; None if unknown.
        sample_numbers: int64 [micro_batch], the places of the samples in the order of the run, which the run
            sets before it calls ``collate``; None in evaluations. Random masks or augmentations that follow
            from them depend neither on the layout nor on restarts.
    """

    unit: str = "sample"
    flops_per_unit: float | None = None
    sample_numbers: npt.NDArray[np.int64] | None = None

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        """Combine the samples of one micro-batch into tensors on the CPU; the toolkit moves them to the
        device.

        By default samples are dicts or structs, and the values of each name are stacked by torch's
        ``default_collate``.

        Args:
            samples: what the data yield: a list of the dataset's samples (``data.target``), structs
                [micro_batch] (``data=arrays``), or int64 [micro_batch, sequence + 1] (text).
        """
        if isinstance(samples, np.ndarray) and samples.dtype.names is not None:
            return {
                name: torch.from_numpy(np.ascontiguousarray(samples[name])) for name in samples.dtype.names
            }
        collated: Mapping[str, torch.Tensor] = default_collate(list(samples))
        return collated

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Return the loss summed over the units of the micro-batch: a scalar with a gradient."""

    def units(self, batch: MicroBatch) -> int:
        """Return the number of units that ``loss_sum`` sums over; by default the number of samples.

        The toolkit calls it once, while the batch is on the CPU.
        """
        return len(next(iter(batch.values())))

    def evaluate(self, model: nn.Module, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        """Return what an evaluation reports about a micro-batch, by name.

        Scalars are sums over its units: ``loss``, and others of which the mean per unit is reported. Other
        tensors are arguments of the metrics' ``update`` (``+metrics.NAME.target``), for example ``preds`` and
        ``target`` with samples in the first dim.
        """
        return {LOSS: self.loss_sum(model, batch)}

    def eval_sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return the scalars of ``evaluate``. Engines call it."""
        return {name: value for name, value in self.evaluate(model, batch).items() if value.dim() == 0}


class TextTask(Task):
    """Collate int64 samples [micro_batch, sequence + 1] into inputs and shifted labels, [micro_batch,
    sequence] each.

    Attributes:
        end_of_text: the token that ends every document. If given, ``position_ids`` restart at 0 in each
            document, which masks attention between documents. The run sets it (``data.documents=separate``).
    """

    unit = "token"
    end_of_text: int | None = None

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        inputs, labels = inputs_and_labels(samples)
        found = {"input_ids": inputs, "labels": labels}
        if self.end_of_text is not None:
            found["position_ids"] = position_ids(samples, self.end_of_text)
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def units(self, batch: MicroBatch) -> int:
        """Return the number of labels that are not -100."""
        return int((batch["labels"] != IGNORE_INDEX).sum())


class NextTokenTask(TextTask):
    """Cross-entropy of the next token, for models that return logits [micro_batch, sequence, vocabulary].

    In training, ``router_coefficient`` times :func:`load_balance` is added per token, so that dividing by
    the number of tokens gives its weighted mean over the micro-batches. Evaluation uses the cross-entropy
    alone.

    A subclass may override ``collate`` and ``units`` to mask other labels (-100), or to add the tensor
    ``loss_weights`` [micro_batch, sequence], which multiplies the loss of each token. Then every engine and
    layout trains it, because ``loss_sum`` stays the one that Megatron-core and pipelines compute themselves.

    Attributes:
        router_coefficient, experts_per_token: of a model with experts. The run sets them.
        predicts: whether ``evaluate`` returns logits. The run unsets it if there are no metrics and
            ``evaluate`` is not overridden.
    """

    router_coefficient: float = 0.0
    experts_per_token: int = 0
    predicts: bool = True

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        balanced = self.router_coefficient != 0 and model.training
        extra = {"output_router_logits": True} if balanced else {}
        output = _run_model(model, batch, **extra, **loss_arguments(model, batch))
        loss = output.loss if has_fused_loss(model) else _cross_entropy(output.logits, batch)
        if not balanced:
            return loss
        return loss + self.router_coefficient * load_balance(
            output.router_logits, self.experts_per_token
        ) * count_units(self, batch)

    def evaluate(self, model: nn.Module, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        """Return the loss, and for metrics the logits as ``preds`` and the labels as ``target``.

        A subclass that overrides ``loss_sum`` returns its loss alone unless it overrides this method, too. A
        model with a fused loss computes logits only if ``predicts``.
        """
        if not self.has_engine_loss() or (has_fused_loss(model) and not self.predicts):
            return super().evaluate(model, batch)
        logits = _run_model(model, batch).logits
        return {LOSS: _cross_entropy(logits, batch), "preds": logits, "target": batch["labels"]}

    @classmethod
    def has_engine_loss(cls) -> bool:
        """Return whether Megatron-core and pipelines, which never call ``loss_sum`` with a model, compute the
        same loss.
        """
        return cls.loss_sum is NextTokenTask.loss_sum


def _run_model(model: nn.Module, batch: MicroBatch, **extra: Any) -> Any:
    # transformers' models mask attention by document if positions restart.
    positions = {name: batch[name] for name in ("position_ids",) if name in batch}
    return model(input_ids=batch["input_ids"], use_cache=False, **positions, **extra)


def _cross_entropy(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy summed over the micro-batch, in fp32."""
    logits, labels = logits.float().flatten(0, 1), batch["labels"].flatten()
    weights = batch.get("loss_weights")
    if weights is None:
        return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights.flatten().float()).sum()


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


class ModelLossTask(TextTask):
    """The loss that a module computes itself: ``forward(**batch)`` returns its mean over the micro-batch.

    The mean is over the labels that are not -100, or over the samples of a micro-batch without integer
    ``labels``. It is a tensor, or ``loss`` of an object or mapping. A mean over no labels, as in the last
    batch of an evaluation, counts as zero. Text gives ``input_ids`` and ``labels``, and ``position_ids`` if
    documents are separate; other samples are dicts, which are stacked by name.

    Args:
        target: ``model.target``, for errors.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        text = isinstance(samples, np.ndarray) and samples.dtype.names is None
        return super().collate(samples) if text else Task.collate(self, samples)

    def units(self, batch: MicroBatch) -> int:
        labels = batch.get("labels")
        counted = labels is not None and not labels.is_floating_point()
        return super().units(batch) if counted else Task.units(self, batch)

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        return self.evaluate(model, batch)[LOSS]

    def evaluate(self, model: nn.Module, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        """Return the loss, and for metrics ``logits`` of the module's output as ``preds`` and the labels as
        ``target``.
        """
        output = model(**batch)
        mean = _output_field(output, LOSS, default=output)
        if not isinstance(mean, torch.Tensor) or mean.numel() != 1:
            raise self._error(mean)
        mean, units = mean.float().reshape(()), count_units(self, batch)
        found = {LOSS: mean * units if units else torch.nan_to_num(mean) * 0}
        logits = _output_field(output, "logits", default=None)
        if isinstance(logits, torch.Tensor) and "labels" in batch:
            found |= {"preds": logits, "target": batch["labels"]}
        return found

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
                "without a task.target, forward(**batch) returns one mean loss: a scalar tensor, or an "
                "object or dict with the key loss",
                "return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) from "
                "forward, or write task.target=my.package.Task with another loss",
            )
        )


def _output_field(output: Any, name: str, *, default: Any) -> Any:
    """Return an entry of a mapping or an attribute of an object."""
    if isinstance(output, Mapping):
        return output.get(name, default)
    return getattr(output, name, default)


def text_task(plan: RunPlan, end_of_text: int | None = None) -> TextTask:
    """Return the task of the plan's model.

    Args:
        end_of_text: of data with separate documents (``data/tokens/documents.py``).
    """
    model = plan.config.model
    task: TextTask = NextTokenTask() if model.target is None else ModelLossTask(model.target)
    configure_text_task(task, plan, end_of_text)
    return task


def configure_text_task(task: TextTask, plan: RunPlan, end_of_text: int | None) -> None:
    """Set what a task needs to know about documents and experts."""
    task.end_of_text = end_of_text
    if isinstance(task, NextTokenTask) and plan.shape is not None:
        task.router_coefficient = plan.shape.router_aux_loss_coef
        task.experts_per_token = plan.shape.num_experts_per_tok
