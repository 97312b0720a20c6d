"""Tiny runs for tests, twenty steps per second: configurations of each family and learnable samples."""

from __future__ import annotations

from typing import Any

import torch

from toolkit import families
from toolkit.config.data import DataConfig, DocumentMasking
from toolkit.config.kernels import CompileConfig, CompileMode
from toolkit.config.model import ModelConfig
from toolkit.config.optim import OptimConfig, ScheduleConfig, ScheduleName
from toolkit.config.schema import EngineConfig, EngineName, RunConfig, TrainConfig
from toolkit.engine.protocol import MicroBatch
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.train.task import IGNORE_INDEX

VOCABULARY, LENGTH, MICRO_BATCH, GLOBAL_BATCH = 264, 32, 2, 8
END_OF_TEXT = 256  # in samples that consist of documents
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
# They cover tied and untied embeddings, grouped-query attention, biases, norms of queries and keys, and
# experts.
FAMILIES: dict[str, dict[str, Any]] = {name: dict(family.tiny) for name, family in families.FAMILIES.items()}


def tiny_config(family: str | None = "llama", **changes: Any) -> RunConfig:
    """Return a tiny configuration. Its eps of 1e-4 keeps Adam from amplifying rounding of tiny gradients.

    Args:
        family: None for ``model__target``.
        changes: keys with two underscores for the dot: ``zero__stage=2``.
    """
    config = RunConfig(
        model=ModelConfig(family=family, **SIZES, **FAMILIES[family]) if family else ModelConfig(),
        engine=EngineConfig(name=EngineName.local),
        data=DataConfig(vocab_size=257),
        train=TrainConfig(
            steps=20, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, sequence_length=LENGTH, seed=3
        ),
        compile=CompileConfig(mode=CompileMode.none),  # on GPUs, too: tests compare numbers of eager layers
        optim=OptimConfig(lr=1e-3, eps=1e-4),
        schedule=ScheduleConfig(name=ScheduleName.constant),
    )
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def tiny_plan(family: str | None = "llama", *, ranks: int = 1, **changes: Any) -> RunPlan:
    """Return a plan on ``ranks`` CPU ranks; by default ``local`` on one rank and ``deepspeed`` on several."""
    changes = {"engine__name": EngineName.local if ranks == 1 else EngineName.deepspeed, **changes}
    return make_plan(
        tiny_config(family, **changes),
        World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True),
    )


def sample(number: int) -> dict[str, torch.Tensor]:
    """Inputs and labels, int64 [LENGTH], counting in steps of 1 to 3; the number of masked labels varies."""
    generator = torch.Generator().manual_seed(7919 * number + 1)
    first, stride, masked = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((0, 256), (1, 4), (0, LENGTH - 4))
    )
    return _shifted((first + stride * torch.arange(LENGTH + 1)) % 256, masked)


def document_sample(number: int) -> dict[str, torch.Tensor]:
    """Return a ``sample`` with ``position_ids`` from documents of 1 to 12 tokens closed by END_OF_TEXT.

    Each document counts in its own steps, so a token depends only on those before it in its document.
    """
    generator = torch.Generator().manual_seed(7919 * number + 1)
    rows: list[torch.Tensor] = []
    while sum(map(len, rows)) <= LENGTH:
        first, stride, length = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((0, 256), (1, 4), (1, 13))
        )
        rows.append((first + stride * torch.arange(length)) % 256)
        rows[-1][-1] = END_OF_TEXT
    masked = int(torch.randint(0, LENGTH // 2, (), generator=generator))
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return {**_shifted(torch.cat(rows)[: LENGTH + 1], masked), "position_ids": positions[:LENGTH]}


def _shifted(row: torch.Tensor, masked: int) -> dict[str, torch.Tensor]:
    labels = row[1:].clone()
    labels[:masked] = IGNORE_INDEX
    return {"input_ids": row[:-1], "labels": labels}


def micro_batches(plan: RunPlan, step: int, data_rank: int = 0) -> list[MicroBatch]:
    """Return a data rank's part of the global batch of ``step``, which has the same samples in every layout.

    With ``data.documents=separate`` samples consist of documents and have ``position_ids``.
    """
    make = document_sample if plan.config.data.documents is DocumentMasking.separate else sample
    batch, size, ranks = plan.batch.at(step), plan.batch.micro_batch, plan.batch.data_parallel
    found: list[MicroBatch] = []
    for number in range(batch.accumulation):
        first = batch.first_sample + (number * ranks + data_rank) * size
        rows = [make(first + index) for index in range(size)]
        found.append({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    return found
