"""Datasets, a model, a task and hooks such as a user writes, for tests of the extension points."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit import CompletedStep, Hook, Task

FEATURES = 4


class Table(torch.utils.data.Dataset[dict[str, np.ndarray]]):
    """A map-style dataset of a regression with noise drawn for each sample."""

    def __init__(self, samples: int = 40, split: str = "train", bad: int | None = None) -> None:
        self.samples, self.offset, self.bad = samples, 0 if split == "train" else 10_000, bad

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if number >= self.samples:
            raise IndexError(number)
        if number == self.bad:
            raise OSError("unreadable")
        rng = np.random.default_rng(number + self.offset)
        x = rng.normal(size=FEATURES).astype(np.float32)
        noise = random.random() / 10  # differs between epochs
        return {"x": x, "y": np.float32(x.sum() + noise), "number": np.int64(number)}


class Rows(torch.utils.data.IterableDataset[dict[str, np.ndarray]]):
    """The same samples, one after the other."""

    def __init__(self, samples: int = 40, split: str = "train") -> None:
        self.table = Table(samples, split)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for number in range(len(self.table)):
            yield self.table[number]


class StatefulRows(Rows):
    """Continues at its own state without reading what came before."""

    def __init__(self, samples: int = 40, split: str = "train") -> None:
        super().__init__(samples, split)
        self.next, self.read = 0, 0

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while self.next < len(self.table):
            self.next, self.read = self.next + 1, self.read + 1
            yield self.table[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Shares(Rows):
    """Yields the share of one data rank."""

    def __init__(self, samples: int = 40, split: str = "train", rank: int = 0, world_size: int = 1) -> None:
        super().__init__(samples, split)
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for number in range(self.rank, len(self.table), self.world_size):
            yield self.table[number]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze(1)


class Regression(Task):
    """The squared error of each sample."""

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).float().square().sum()


class Recorder(Hook):
    """Counts its events and stores the count in checkpoints."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.events: list[str] = []
        self.steps = 0

    def on_start(self, step: int) -> None:
        self.events.append(f"start {step}")

    def on_step(self, completed: CompletedStep) -> None:
        self.steps += 1
        self.events.append(f"step {completed.step}")
        self.context.log_metrics({"steps": self.steps, "rank": self.context.rank})
        if completed.step == self.stop_at:
            self.context.request_stop("enough")

    def on_eval(self, row: Mapping[str, Any]) -> None:
        self.events.append(f"eval {row['step']}")

    def on_checkpoint(self, path: Any) -> None:
        self.events.append(f"checkpoint {path.name}")

    def on_exception(self, error: Exception) -> None:
        self.events.append(f"exception {type(error).__name__}")
        print(f"rank {self.context.rank} saw {type(error).__name__}", flush=True)

    def on_end(self, step: int) -> None:
        self.events.append(f"end {step}")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.events = state["steps"], list(state["events"])


class Fails(Hook):
    """Raises in an event on one rank."""

    def __init__(self, event: str, rank: int = 0) -> None:
        self.event, self.rank = event, rank

    def on_step(self, completed: CompletedStep) -> None:
        if self.event == "step" and completed.step == 2 and self.context.rank == self.rank:
            raise KeyError("lost")

    def on_exception(self, error: Exception) -> None:
        if self.event == "step":
            raise ValueError("in on_exception")

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": torch.ones(1)} if self.event == "state" else {}


class Sleeps(Hook):
    """Blocks in one step."""

    def __init__(self, seconds: float, step: int = 3, rank: int = 1) -> None:
        self.seconds, self.step, self.rank = seconds, step, rank

    def on_step(self, completed: CompletedStep) -> None:
        if completed.step == self.step and self.context.rank == self.rank:
            time.sleep(self.seconds)
