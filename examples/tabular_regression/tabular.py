"""Regression on a table: a dataset, a model, a task, a metric and a hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit import Hook, Metric, Task

FEATURES = 8


class Table(torch.utils.data.Dataset):
    """Rows of a synthetic table. Some have no target, and so do not count."""

    def __init__(self, split: str, rows: int = 2048) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.x = torch.randn(rows, FEATURES, generator=generator)
        self.y = self.x[:, 0] * self.x[:, 1] + torch.sin(2 * self.x[:, 2]) + 0.5 * self.x[:, 3]
        self.known = torch.rand(rows, generator=generator) < 0.9

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[row], "y": self.y[row], "known": self.known[row]}


class Network(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype)).squeeze(1).float()


class Regression(Task):
    """The Huber loss of the rows whose target is known."""

    unit = "row"

    def __init__(self, delta: float = 1.0) -> None:
        self.delta = delta

    def units(self, batch: Mapping[str, torch.Tensor]) -> int:
        return int(batch["known"].sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(model(batch["x"]), batch)

    def evaluate(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        known, preds = batch["known"], model(batch["x"])
        return {"loss": self._loss(preds, batch), "preds": preds[known], "target": batch["y"][known]}

    def _loss(self, preds: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses = nn.functional.huber_loss(preds, batch["y"], reduction="none", delta=self.delta)
        return (losses * batch["known"]).sum()


class RSquared(Metric):
    """The coefficient of determination, from sums that are exact for any number of ranks."""

    def __init__(self) -> None:
        for name in ("count", "total", "squares", "residual"):
            self.add_state(name, 0.0)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        target = target.double()
        self.count += len(target)
        self.total += target.sum()
        self.squares += (target**2).sum()
        self.residual += ((preds - target) ** 2).sum()

    def compute(self) -> torch.Tensor:
        return 1 - self.residual / (self.squares - self.total**2 / self.count)


class BestResult(Hook):
    """Remember the best evaluation, also when the run resumes."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}

    def on_eval(self, row: Mapping[str, Any]) -> None:
        if row["r2"] > self.best.get("r2", float("-inf")):
            self.best = {"step": row["step"], "r2": row["r2"]}
            self.context.log_metrics({"best_r2": row["r2"]})

    def state_dict(self) -> Mapping[str, Any]:
        return self.best

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = dict(state)
