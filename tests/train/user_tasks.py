"""Tasks, metrics and a model as users write them, for the tests of ``task.target`` and ``+metrics``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit import Metric, NextTokenTask, Task


class Network(nn.Module):
    """Two layers, and one that only samples with a positive first feature use."""

    def __init__(self, features: int = 4, width: int = 16) -> None:
        super().__init__()
        self.inner, self.sometimes = nn.Linear(features, width), nn.Linear(width, width)
        self.outer = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.inner(x.to(self.inner.weight.dtype)))
        return self.outer(hidden).squeeze(1).float()


class Regression(Task):
    """The squared error, weighted by ``weight`` in the loss, and by the number of samples with a weight."""

    unit = "row"

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.scale * (batch["weight"] * (model(batch["x"]) - batch["y"]) ** 2).sum()

    def units(self, batch: Mapping[str, torch.Tensor]) -> int:
        return int((batch["weight"] > 0).sum())

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        preds = model(batch["x"])
        errors = batch["weight"] * (preds - batch["y"]) ** 2
        return {"loss": errors.sum(), "close": (errors < 0.1).sum(), "preds": preds, "target": batch["y"]}


class Weighted(NextTokenTask):
    """Masks the first quarter of each sequence, and weights later tokens more."""

    def collate(self, samples: Any) -> dict[str, torch.Tensor]:
        batch = dict(super().collate(samples))
        length = batch["labels"].shape[1]
        batch["labels"][:, : length // 4] = -100
        batch["loss_weights"] = torch.linspace(0.5, 2.0, length).expand_as(batch["labels"]).clone()
        return batch


class OwnLoss(NextTokenTask):
    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return 2 * super().loss_sum(model, batch)


class WrongSignature(Task):
    def loss_sum(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return batch["x"].sum()


class NoLoss(Task):
    pass


class NotDerived:
    pass


class Broken(Regression):
    """Returns ``wrong`` from the method ``where``."""

    def __init__(self, where: str, wrong: Any = None) -> None:
        super().__init__()
        self.where, self.wrong = where, wrong

    def collate(self, samples: Any) -> Any:
        return self.wrong if self.where == "collate" else super().collate(samples)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        return self.wrong if self.where == "loss_sum" else super().loss_sum(model, batch)

    def units(self, batch: Mapping[str, torch.Tensor]) -> Any:
        return self.wrong if self.where == "units" else super().units(batch)

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
        return self.wrong if self.where == "evaluate" else super().evaluate(model, batch)


class Errors(Metric):
    """Mean, smallest and largest absolute error, and the number of samples."""

    def __init__(self) -> None:
        self.add_state("total", 0.0)
        self.add_state("samples", 0)
        self.add_state("smallest", math.inf, reduce="min")
        self.add_state("largest", 0.0, reduce="max")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        errors = (preds - target).abs()
        self.total += errors.sum()
        self.samples += errors.numel()
        self.smallest = torch.minimum(self.smallest, errors.min())
        self.largest = torch.maximum(self.largest, errors.max())

    def compute(self) -> dict[str, torch.Tensor]:
        return {
            "mean": self.total / self.samples,
            "samples": self.samples,
            "smallest": self.smallest,
            "largest": self.largest,
        }


class SinglePrecisionTotal(Metric):
    """A control: a sum in fp32, whose rounding depends on the order."""

    def __init__(self) -> None:
        self.add_state("total", torch.zeros((), dtype=torch.float32))

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.total += (preds - target).abs().sum()

    def compute(self) -> torch.Tensor:
        return self.total


class NotANumber(Metric):
    def __init__(self, result: Any = math.nan) -> None:
        self.result = result

    def update(self, preds: torch.Tensor) -> None:
        pass

    def compute(self) -> Any:
        return self.result


class WantsMore(NotANumber):
    def update(self, preds: torch.Tensor, sample_weight: torch.Tensor) -> None:  # type: ignore[override]
        pass
