"""Metrics of evaluations: accumulated over an evaluation set, reduced exactly over ranks.

    class LargestError(toolkit.Metric):
        def __init__(self) -> None:
            self.add_state("largest", 0.0, reduce="max")

        def update(self, preds, target):
            self.largest = torch.maximum(self.largest, (preds - target).abs().max())

        def compute(self):
            return self.largest

``+metrics.NAME.target`` names such a class, or one of torchmetrics.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from toolkit.errors import ConfigError
from toolkit.user_code import UserObject, describe_source, user_code

Reduction = Literal["sum", "min", "max"]
REDUCTIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
# One value of every data rank, in the order of the data ranks. Collective.
DataRankGather = Callable[[Any], Sequence[Any]]


class Metric(ABC):
    """Base class of users' metrics.

    Its states are tensors, named in ``__init__`` by ``add_state`` and attributes from then on. ``update``
    adds a micro-batch to them, and ``compute`` turns the states of all ranks into the result.
    """

    def add_state(
        self, name: str, default: float | torch.Tensor, reduce: Literal["sum", "min", "max"] = "sum"
    ) -> None:
        """Add the attribute ``name``, a tensor that every evaluation set resets to ``default``.

        A Python number becomes fp64 or int64, in which sums of fp32 values do not depend on the number of
        ranks.

        Args:
            reduce: how the states of two ranks are combined.

        Raises:
            ValueError: ``reduce`` is none of sum, min and max.
        """
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r} of the state {name}; it is sum, min or max")
        dtype = (
            default.dtype
            if isinstance(default, torch.Tensor)
            else torch.int64
            if isinstance(default, int)
            else torch.float64
        )
        self.__dict__.setdefault("_states", {})[name] = (torch.as_tensor(default, dtype=dtype), reduce)
        setattr(self, name, torch.as_tensor(default, dtype=dtype).clone())

    @abstractmethod
    def update(self, *arguments: Any, **named: Any) -> None:
        """Add a micro-batch. The parameters' names are those of the tensors that ``Task.evaluate`` returns,
        such as ``preds`` and ``target``.
        """

    @abstractmethod
    def compute(self) -> float | torch.Tensor | Mapping[str, float | torch.Tensor]:
        """Return the result, or several by name, from the states of all ranks."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the states by name."""
        return {name: getattr(self, name) for name in self._defaults()}

    def reset(self, device: torch.device | None = None) -> None:
        """Set the states to their defaults, on ``device`` if it is given."""
        for name, (default, _) in self._defaults().items():
            setattr(self, name, default.clone().to(device or default.device))

    def combine(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Replace the states by the combination of those of all ranks, in order."""
        for name, (_, reduce) in self._defaults().items():
            combined = states[0][name]
            for other in states[1:]:
                combined = REDUCTIONS[reduce](combined, other[name])
            setattr(self, name, combined)

    def _defaults(self) -> dict[str, tuple[torch.Tensor, Reduction]]:
        found: dict[str, tuple[torch.Tensor, Reduction]] = self.__dict__.get("_states", {})
        return found


class EvaluationMetrics:
    """The metrics of a run, ``config.metrics``.

    Args:
        metrics: by what the configuration names.
        gather: None with a single data rank.
    """

    def __init__(
        self,
        metrics: Mapping[str, tuple[UserObject, Any]],
        device: torch.device,
        gather: DataRankGather | None,
    ) -> None:
        self._metrics, self._device, self._gather = dict(metrics), device, gather
        for _, metric in self._metrics.values():
            if not isinstance(metric, Metric):
                _connect_torchmetrics(metric, device, gather)

    def reset(self) -> None:
        """Start an evaluation set."""
        for given, metric in self._metrics.values():
            with user_code(given.key, metric):
                if isinstance(metric, Metric):
                    metric.reset(self._device)
                else:
                    metric.reset()

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch.

        Args:
            tensors: what ``Task.evaluate`` returned, other than scalars.

        Raises:
            ConfigError: a metric needs a tensor that is not there.
        """
        for given, metric in self._metrics.values():
            arguments = _select_arguments(given, metric, tensors)
            with user_code(given.key, metric.update):
                metric.update(**arguments)

    def compute(self, taken: Collection[str] = ()) -> dict[str, float]:
        """Return the results over all ranks: ``NAME``, or ``NAME/KEY`` of a metric with several. Collective.

        Args:
            taken: names that other results of the evaluation have.

        Raises:
            ConfigError: a result is no number, or its name is taken.
        """
        found: dict[str, float] = {}
        for name, (given, metric) in self._metrics.items():
            if name in taken:
                raise given.problem(
                    f"the task's evaluate returns {name}, too",
                    "each result of an evaluation has another name",
                    f"write +metrics.my_{name}.target={given.target}",
                )
            with user_code(given.key, metric.compute):
                if isinstance(metric, Metric) and self._gather is not None:
                    metric.combine(self._gather({key: value.cpu() for key, value in metric.state().items()}))
                result = metric.compute()
            if isinstance(result, Mapping):
                found |= {f"{name}/{key}": _number(given, metric, value) for key, value in result.items()}
            else:
                found[name] = _number(given, metric, result)
        return found

    def check_finite(self, results: Mapping[str, float]) -> ConfigError | None:
        """Return the error about the first result that is NaN or infinite, None if there is none."""
        for name, value in results.items():
            if not math.isfinite(value):
                given, metric = self._metrics[name.partition("/")[0]]
                return given.problem(
                    f"compute ({describe_source(metric.compute)}) returned {value} for {name}",
                    "a metric is a finite number",
                    "return a number for sets without the samples that it needs, too, or record it "
                    "nevertheless: train.on_nonfinite=skip",
                )
        return None


def _connect_torchmetrics(metric: Any, device: torch.device, gather: DataRankGather | None) -> None:
    """Let a metric of torchmetrics, or each of a collection, gather its states over the data ranks.

    ``compute`` of torchmetrics gathers over all ranks by default, which counts samples repeatedly if ranks
    share them.
    """
    metric.to(device)
    for each in metric.values() if hasattr(metric, "values") else (metric,):
        each.sync_on_compute = gather is not None
        each.distributed_available_fn = lambda: True
        each.dist_sync_fn = lambda tensor, group=None: [
            part.to(device) for part in (gather or (lambda own: [own]))(tensor.cpu())
        ]


def _select_arguments(
    given: UserObject, metric: Any, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    parameters = inspect.signature(metric.update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return tensors
    missing = [
        name
        for name, each in parameters.items()
        if name not in tensors and each.default is each.empty and each.kind is not each.VAR_POSITIONAL
    ]
    if missing:
        raise given.problem(
            f"update({', '.join(parameters)}) ({describe_source(metric.update)}) needs {', '.join(missing)}, "
            f"and the task's evaluate returns the tensors {', '.join(tensors) or '(none)'}",
            "the parameters of update are names of tensors that Task.evaluate returns",
            f"return {', '.join(missing)} from evaluate of your task, or rename the parameters of update",
        )
    return {name: tensors[name] for name in parameters if name in tensors}


def _number(given: UserObject, metric: Any, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, int | float):
        return float(value)
    seen = (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    )
    raise given.problem(
        f"compute ({describe_source(metric.compute)}) returned {seen}",
        "compute returns one number, or a dict of numbers",
        "return a float or a tensor of one element",
    )
