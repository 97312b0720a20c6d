"""Larger runs for tests on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.cases import BF16
from toolkit.config.data import DocumentMasking
from toolkit.config.schema import EngineName
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.tiny import tiny_config


def sized(engine: EngineName, stage: int, **changes: Any) -> RunPlan:
    """100 M parameters in bf16, sequences of 1024, so that unplanned memory (workspaces) is a small part."""
    config = tiny_config(
        "llama",
        engine__name=engine,
        zero__stage=stage,
        **BF16,
        model__hidden_size=768,
        model__intermediate_size=2048,
        model__num_attention_heads=12,
        model__num_key_value_heads=4,
        model__num_hidden_layers=12,
        model__vocab_size=16384,
        model__max_position_embeddings=1024,
        train__sequence_length=1024,
        train__micro_batch=4,
        train__global_batch=8,
        **changes,
    )
    return make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CUDA, has_compiler=True))


def text(plan: RunPlan, step: int, data_rank: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of random tokens of the plan's length; separate documents have 300 tokens."""
    generator = torch.Generator().manual_seed(step)
    size, length = plan.batch.micro_batch, plan.config.train.sequence_length
    rows = [
        torch.randint(0, 16384, (size, length + 1), generator=generator)
        for _ in range(plan.batch.at(step).accumulation)
    ]
    separate = plan.config.data.documents is DocumentMasking.separate
    positions = {"position_ids": (torch.arange(length) % 300).expand(size, -1)} if separate else {}
    return [
        {"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous(), **positions}
        for row in rows
    ]
