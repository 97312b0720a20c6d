"""Cells of the engine's matrices: a run small enough for 20 steps in a second, its samples, and what a rank does with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import MASTER, WEIGHT, Reader, Shard, TensorKey
from toolkit.config.schema import (
    DataConfig,
    EngineName,
    EvalConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    OptimizerKernel,
    OptimizerName,
    Place,
    Precision,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
    TrainConfig,
    ZeroConfig,
)
from toolkit.engine.build import build_engine
from toolkit.engine.protocol import Engine, MicroBatch, StepResult, StepSettings
from toolkit.models.initial import InitialWeights
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

VOCABULARY, LENGTH, MICRO_BATCH = 257, 32, 2  # an odd vocabulary, so that no range ends with a row
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},  # its embedding is tied
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout and setting. ``stage`` None: the local engine. The global batch is 8 sequences x ``accumulation`` / 2."""

    stage: int | None = 2
    ranks: int = 2
    accumulation: int = 2
    family: str = "llama"
    optimizer: str = "adamw"
    kernel: str = "torch"
    momentum: float = 0.0
    clip: float = 1.0
    lr: float = 1e-3
    weight_decay: float = 0.1
    optimizer_place: str = "none"
    parameter_place: str = "none"
    nvme_path: str | None = None
    precision: str = "fp32"
    scale_power: int = 16
    scale_window: int = 1000
    dropout: float = 0.0
    checkpointing: bool = False
    sizes: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        """The differences from the default, as a test's name."""
        plain = Cell()
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__ if getattr(self, name) != getattr(plain, name)}
        return "-".join(f"{name}={value}" for name, value in {"stage": self.stage, "ranks": self.ranks, **shown}.items())

    def config(self) -> RunConfig:
        sizes = {**SIZES, **FAMILIES[self.family], **dict(self.sizes)}
        sgd = {"lr": self.lr, "momentum": self.momentum}
        return RunConfig(
            model=ModelConfig(family=self.family, dropout=self.dropout, **sizes),
            data=DataConfig(vocab_size=VOCABULARY),
            zero=ZeroConfig(stage=self.stage or 0),
            offload=OffloadConfig(
                optimizer=Place(self.optimizer_place), parameters=Place(self.parameter_place), nvme_path=self.nvme_path
            ),
            precision=PrecisionConfig(
                name=Precision(self.precision), initial_scale_power=self.scale_power, scale_window=self.scale_window
            ),
            train=TrainConfig(
                steps=20,
                global_batch=self.ranks * MICRO_BATCH * self.accumulation,
                micro_batch=MICRO_BATCH,
                sequence_length=LENGTH,
                seed=3,
                activation_checkpointing=self.checkpointing,
            ),
            eval=EvalConfig(every=0),
            optim=OptimConfig(
                name=OptimizerName(self.optimizer),
                kernel=OptimizerKernel(self.kernel),
                weight_decay=self.weight_decay,
                eps=1e-4,
                clip=self.clip,
                **sgd,
            ),
            schedule=ScheduleConfig(name=ScheduleName.constant),
        )

    def plan(self, world: World | None = None) -> RunPlan:
        config = self.config()
        config.engine.name = EngineName.local if self.stage is None else EngineName.deepspeed
        here = World(ranks=self.ranks, ranks_per_node=self.ranks, device=Device.CPU, has_compiler=True)
        return make_plan(config, world or here)

    def oracle(self) -> Cell:
        """The same samples, weights and optimizer on the local engine: all ranks' micro-batches on one."""
        local = replace(self, stage=None, ranks=1, accumulation=self.ranks * self.accumulation)
        return replace(local, optimizer_place="none", parameter_place="none", nvme_path=None, kernel="torch", checkpointing=False)


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [LENGTH], learnable; the number of unmasked labels differs from sample to sample."""
    generator = torch.Generator().manual_seed(7919 * number + 1)
    bounds = ((0, VOCABULARY), (1, 4), (0, LENGTH - 4))
    first, stride, masked = (int(torch.randint(low, high, (), generator=generator)) for low, high in bounds)
    row = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    labels = row[1:].clone()
    labels[:masked] = -100
    return row[:-1], labels


def micro_batches(step: int, rank: int, ranks: int, accumulation: int) -> list[MicroBatch]:
    """Of the global batch of ``step``; micro-batch ``m`` of rank ``r`` is micro-batch ``m * ranks + r`` of one rank."""
    size = ranks * MICRO_BATCH * accumulation
    found = []
    for number in range(accumulation):
        first = step * size + (number * ranks + rank) * MICRO_BATCH
        tokens, labels = zip(*(sample(first + index) for index in range(MICRO_BATCH)), strict=True)
        found.append({"input_ids": torch.stack(tokens), "labels": torch.stack(labels)})
    return found


class Text:
    """Next-token cross entropy."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"]).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")

    def units(self, batch: MicroBatch) -> int:
        return int((batch["labels"] != -100).sum())


class DoubledGradients(Text):
    """A control: the loss is right and its gradient twice what it should be."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        loss = super().loss_sum(model, batch)
        return loss + (loss - loss.detach())


@dataclass(frozen=True)
class Trace:
    """What a run shows. ``weights`` are whole, in fp32, by canonical name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def distance(self, other: Trace) -> tuple[float, float, float]:
        """Largest difference of losses, of gradient norms and of weights."""
        assert len(self.losses) == len(other.losses)
        weights = max((float((self.weights[name] - other.weights[name]).abs().max()) for name in other.weights), default=math.nan)
        return _largest(self.losses, other.losses), _largest(self.norms, other.norms), weights


def _largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


Batches = Callable[[int, int, int, int], list[MicroBatch]]


def steps(engine: Engine, cell: Cell, rank: int, first: int, last: int, batches: Batches = micro_batches) -> list[StepResult]:
    mine = (batches(step, rank, cell.ranks, cell.accumulation) for step in range(first, last))
    return [engine.train_step(batch, StepSettings(step, cell.lr)) for step, batch in enumerate(mine, first)]


def make(cell: Cell, rank: int, reader: Reader | None = None, objective: Text | None = None) -> Engine:
    plan = cell.plan()
    engine = build_engine(plan, objective or Text(), rank=rank, local_rank=rank)
    engine.load(InitialWeights(plan) if reader is None else reader)
    return engine


def train(rank: int, ranks: int, cell: Cell, count: int = 20, objective: Text | None = None, batches: Batches = micro_batches) -> Trace:
    """A whole run. Weights are on rank 0 only."""
    assert ranks == cell.ranks
    engine = make(cell, rank, objective=objective)
    results = steps(engine, cell, rank, 0, count, batches)
    found = whole(engine.shards(), rank, ranks)
    engine.close()
    weights = {key.name: value.float() for key, value in found.items() if key.state == WEIGHT}
    weights |= {key.name: value for key, value in found.items() if key.state == MASTER}
    return Trace([result.loss for result in results], [result.grad_norm for result in results], weights)


def whole(shards: Sequence[Shard], rank: int, ranks: int) -> dict[TensorKey, torch.Tensor]:
    """Every tensor put together from all ranks' shards, on rank 0; each element must come from exactly the promised copies."""
    mine = [(shard.key, shard.global_shape, shard.box, shard.data.detach().clone(), shard.replicas) for shard in shards]
    every: list[Any] | None = [None] * ranks if rank == 0 else None
    if ranks > 1:
        torch.distributed.gather_object(mine, every)
    else:
        every = [mine]
    if every is None:
        return {}
    found: dict[TensorKey, torch.Tensor] = {}
    owed: dict[TensorKey, torch.Tensor] = {}
    for key, shape, box, data, replicas in (piece for pieces in every for piece in pieces):
        place = tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
        found.setdefault(key, torch.empty(shape, dtype=data.dtype))[place] = data
        owed.setdefault(key, torch.zeros(shape, dtype=torch.float64))[place] += 1 / replicas
    for key, share in owed.items():
        assert torch.allclose(share, torch.ones_like(share)), f"{key} is covered {share.min()} to {share.max()} times"
    return found
