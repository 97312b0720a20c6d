"""Tasks and metrics that fail in a run of several ranks. Tests start commands in the folder of this file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit import Metric, Task


class Table(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, split: str) -> None:
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[row], "y": self.x[row].sum()}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1), nn.Flatten(0))


def is_rank_1() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_rank() == 1


class Regression(Task):
    """Fails in ``where`` in the third micro-batch of rank 1."""

    def __init__(self, where: str = "nowhere") -> None:
        self.where, self.seen = where, 0

    def collate(self, samples: Any) -> Any:
        self.seen += 1
        if self.where == "collate" and self.seen == 3 and is_rank_1():
            return ["not", "a", "dict"]
        return super().collate(samples)

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.where == "loss_sum" and self.seen == 3 and is_rank_1():
            raise ArithmeticError("broken on rank 1 only")
        return self.evaluate(model, batch)["loss"]

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        preds = model(batch["x"])
        return {"loss": ((preds - batch["y"]) ** 2).sum(), "preds": preds, "target": batch["y"]}


class WrongSignature(Regression):
    def loss_sum(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return batch["x"].sum()


class Error(Metric):
    """Fails in ``where`` on rank 1."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.add_state("total", 0.0)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        if self.where == "update" and is_rank_1():
            raise ArithmeticError("broken on rank 1 only")
        self.total += (preds - target).abs().sum()

    def compute(self) -> float | torch.Tensor:
        if self.where == "compute" and is_rank_1():
            raise ArithmeticError("broken on rank 1 only")
        return math.nan if self.where == "no_number" else self.total
