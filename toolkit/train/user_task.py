"""The user's own task and metrics (``task.target``, ``+metrics``): build them, and check what they return."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.config.data import DocumentMasking
from toolkit.config.schema import EngineName, RunConfig
from toolkit.data.custom.samples import Samples
from toolkit.engine.protocol import LOSS, CountedBatch, MicroBatch, count_units
from toolkit.errors import ConfigError
from toolkit.plan.types import RunPlan
from toolkit.train.metrics import EvaluationMetrics, Metric
from toolkit.train.task import ModelLossTask, NextTokenTask, Task, TextTask
from toolkit.user_code import (
    UserObject,
    build_user_object,
    check_arguments,
    check_kind,
    describe_source,
    load_target,
    user_code,
    user_objects,
)

SIGNATURES = {
    "collate": ("samples",),
    "loss_sum": ("model", "batch"),
    "units": ("batch",),
    "evaluate": ("model", "batch"),
}


class MaskedBatch(CountedBatch):
    """A micro-batch that does not count: all ranks must run the model equally often."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], units: int = 0) -> None:
        super().__init__(tensors, units)


class CheckedTask(Task):
    """A user's task as the loop and the engines call it.

    It checks what the task returns, adds the key and the line of the user's code to its errors, and updates
    the metrics.

    Args:
        given: what the configuration names; None: a task of the toolkit, with the user's metrics or data.
        metrics: None if there are none.
    """

    def __init__(
        self, task: Task, given: UserObject | None, metrics: EvaluationMetrics | None = None
    ) -> None:
        self.task, self._metrics = task, metrics
        self._given = given or UserObject("task", type(task).__name__)
        self.unit, self.flops_per_unit = task.unit, task.flops_per_unit

    def collate(self, samples: Any) -> Mapping[str, torch.Tensor]:
        """Collate the samples that count; a stand-in if there are none."""
        real = samples.real if isinstance(samples, Samples) else len(samples)
        masked = real == 0
        if not len(samples):
            samples = np.zeros(1, dtype=samples.dtype)
        elif not masked:
            samples = samples[:real]
        numbers = self.sample_numbers
        self.task.sample_numbers = None if numbers is None else numbers[: len(samples)]
        with user_code("task.target", self.task.collate):
            batch: Any = self.task.collate(samples)
        wrong = _describe_wrong_batch(batch)
        if wrong is not None:
            raise self._problem(
                "collate",
                wrong,
                "collate returns a dict of tensors by name",
                "return {'x': tensor, ...}; the default collate needs samples that are dicts",
            )
        return MaskedBatch(batch) if masked else dict(batch)

    def units(self, batch: MicroBatch) -> int:
        if isinstance(batch, MaskedBatch):
            return 0
        with user_code("task.target", self.task.units):
            units: Any = self.task.units(batch)
        if isinstance(units, torch.Tensor) and units.numel() == 1:
            units = units.item()
        if isinstance(units, bool) or not isinstance(units, int) or units < 0:
            raise self._problem(
                "units",
                f"returned {units!r}" if isinstance(units, int | float) else f"returned {_shown(units)}",
                "units is a whole number, 0 or more: the loss is divided by its sum over the global batch",
                "return the number of samples, or of labels that are not masked: int(mask.sum())",
            )
        return units

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        with user_code("task.target", self.task.loss_sum):
            loss: Any = self.task.loss_sum(model, batch)
        return self._checked_loss("loss_sum", loss)

    def evaluate(self, model: nn.Module, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        with user_code("task.target", self.task.evaluate):
            found: Any = self.task.evaluate(model, batch)
        if _describe_wrong_batch(found) is not None or LOSS not in found:
            raise self._problem(
                "evaluate",
                _describe_wrong_batch(found) or f"returned {', '.join(found)}, without loss",
                "evaluate returns a dict of tensors with the key loss, the sum that loss_sum returns",
                "return {'loss': self.loss_sum(model, batch), ...}",
            )
        found = {**found, LOSS: self._checked_loss("evaluate", found[LOSS])}
        if isinstance(batch, MaskedBatch):
            return {name: torch.zeros_like(value) for name, value in found.items() if value.dim() == 0}
        if self._metrics is not None and count_units(self, batch):
            self._metrics.update({name: value for name, value in found.items() if value.dim()})
        return found

    def _checked_loss(self, method: str, loss: Any) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise self._problem(
                method,
                f"returned {_shown(loss)} as the loss",
                "the loss is one number: a tensor with one element",
                "sum the losses of the micro-batch's units: losses.sum()",
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._problem(
                method,
                "returned a loss without a gradient",
                "the loss depends on the parameters of the model",
                "compute it from the output of the model, without detach(), item() or torch.no_grad()",
            )
        return loss.float().reshape(())

    def _problem(self, method: str, seen: str, rule: str, remedy: str) -> ConfigError:
        source = describe_source(getattr(self.task, method))
        return self._given.problem(f"its {method} ({source}) {seen}", rule, remedy)


def _describe_wrong_batch(batch: Any) -> str | None:
    """Describe what is wrong with a mapping of tensors by name; None if nothing is."""
    if not isinstance(batch, Mapping):
        return f"returned {_shown(batch)}"
    if not batch:
        return "returned no tensor"
    for name, value in batch.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            return f"returned {_shown(value)} as {name}"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if value is None:
        return "None"
    article = "an" if type(value).__name__[0] in "aeiou" else "a"
    return f"{article} {type(value).__name__}"


def build_user_task(config: RunConfig) -> Task | None:
    """Build ``task.target``, or the task of a module that computes its loss from the samples of the user's
    dataset; None for other runs.

    Raises:
        ConfigError: as :func:`check_user_task`.
    """
    given = _task_object(config)
    if given is None and config.data.is_custom:
        own_loss = ModelLossTask(str(config.model.target))
        own_loss.unit = "unit"  # labels or samples
        return own_loss
    if given is None:
        return None
    task: Task = build_user_object(given, Task)
    _check_task_class(given, type(task), config)
    return task


def checked_task(task: Task, config: RunConfig, metrics: EvaluationMetrics | None) -> Task:
    """Wrap a task in checks if it, its dataset or a metric is the user's own."""
    given = _task_object(config)
    users = given is not None or metrics is not None or config.data.is_custom
    return CheckedTask(task, given, metrics) if users else task


def describe_task(plan: RunPlan, task: Task | None) -> RunPlan:
    """Return the plan with the unit and the FLOPs of the user's task, which only its code knows."""
    if task is None:
        return plan
    return replace(plan, task_unit=f"{task.unit}s", flops_per_unit=task.flops_per_unit)


def build_metrics(
    config: RunConfig, device: torch.device, gather: Callable[[Any], Any] | None
) -> EvaluationMetrics | None:
    """Build the run's metrics; None if it has none.

    Args:
        gather: see ``DataRankGather``; None with a single data rank.
    """
    built = {}
    for given in _metric_objects(config):
        load_target(given)  # may import torchmetrics
        built[given.key.partition(".")[2]] = given, build_user_object(given, _metric_kinds())
    return EvaluationMetrics(built, device, gather) if built else None


def check_user_task(config: RunConfig) -> None:
    """Import the user's task and metrics, and check them without building them.

    Raises:
        ConfigError: a class is not derived from ``toolkit.Task`` or ``toolkit.Metric``, does not accept its
            arguments, has a method with another signature, or is not supported by the engine.
    """
    for given in _metric_objects(config):
        metric = load_target(given)
        check_kind(given, metric, _metric_kinds())
        check_arguments(given, metric)
    if (given_task := _task_object(config)) is not None:
        task: Any = load_target(given_task)
        check_kind(given_task, task, (Task,))
        check_arguments(given_task, task)
        if inspect.isclass(task):
            _check_task_class(given_task, task, config)


def _check_task_class(given: UserObject, task: Any, config: RunConfig) -> None:
    _check_signatures(given, task)
    _check_engine(given, task, config)


def _check_signatures(given: UserObject, task: type[Task]) -> None:
    for name, arguments in SIGNATURES.items():
        method = getattr(task, name)
        try:
            inspect.signature(method).bind(None, *arguments)
        except TypeError as error:
            raise given.problem(
                f"its {name}{inspect.signature(method)} ({describe_source(method)}) does not fit: {error}",
                f"the toolkit calls {name}({', '.join(arguments)})",
                f"write def {name}(self, {', '.join(arguments)})",
            ) from error
    if inspect.isabstract(task):
        missing = ", ".join(sorted(task.__abstractmethods__))
        raise given.problem(
            f"the class {task.__name__} ({describe_source(task)}) has no {missing}",
            "a task computes the loss of a micro-batch",
            f"define {missing}",
        )


def _check_engine(given: UserObject, task: type[Task], config: RunConfig) -> None:
    """Refuse what would train another loss than the task's."""
    parallel, megatron = config.parallel, config.engine.name is EngineName.megatron
    used = [axis for axis in ("pipeline", "context") if getattr(parallel, axis) > 1]
    if (megatron or used) and not (issubclass(task, NextTokenTask) and task.has_engine_loss()):
        seen = "engine.name=megatron" if megatron else f"parallel.{used[0]}={getattr(parallel, used[0])}"
        raise given.problem(
            f"{seen} with the loss_sum of {task.__name__} ({describe_source(task.loss_sum)})",
            "Megatron-core, pipelines and context parallelism compute the cross-entropy of the labels "
            "themselves, so there a task changes collate, units and loss_weights only",
            "write engine=deepspeed zero=stage3" if megatron else f"write parallel.{used[0]}=1 zero=stage3",
        )
    if config.data.documents is DocumentMasking.separate and not issubclass(task, TextTask):
        raise given.problem(
            f"data.documents=separate, and {task.__name__} is not derived from TextTask",
            "separate documents need the position_ids that TextTask collates",
            f"derive {task.__name__} from toolkit.TextTask, or write data.documents=joined",
        )
    if config.model.router_aux_loss_coef and not (issubclass(task, NextTokenTask) and task.has_engine_loss()):
        raise given.problem(
            f"model.router_aux_loss_coef={config.model.router_aux_loss_coef} with the loss_sum of "
            f"{task.__name__}",
            "the router's balancing loss is added by NextTokenTask",
            "write model.router_aux_loss_coef=0, and add the loss in your task",
        )


def _task_object(config: RunConfig) -> UserObject | None:
    return next((given for given in user_objects(config) if given.key == "task"), None)


def _metric_objects(config: RunConfig) -> list[UserObject]:
    return [given for given in user_objects(config) if given.key.startswith("metrics.")]


def _metric_kinds() -> tuple[type, ...]:
    """Return the classes of metrics; those of torchmetrics if the user's code imported it."""
    torchmetrics = sys.modules.get("torchmetrics")
    return (Metric,) if torchmetrics is None else (Metric, torchmetrics.Metric, torchmetrics.MetricCollection)
