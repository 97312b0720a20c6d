"""Runs and worlds for the tests of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.config.data import DataConfig
from toolkit.config.model import ModelConfig
from toolkit.config.schema import RunConfig, TrainConfig
from toolkit.plan.types import Device, World

SMALL = ModelConfig(
    family="llama",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=64,
)
CPU = World(ranks=2, ranks_per_node=2, device=Device.CPU, has_libaio=True, has_compiler=True)


def h100s(ranks: int, per_node: int = 8) -> World:
    return World(
        ranks=ranks,
        ranks_per_node=per_node,
        device=Device.CUDA,
        gpu="h100",
        has_libaio=True,
        has_compiler=True,
        has_nvcc=True,
        transformer_engine="2.11.0",
    )


def run_config(**changes: Any) -> RunConfig:
    """A run without problems; ``changes`` are by dotted key with ``__`` for the dot: ``zero__stage=3``."""
    config = RunConfig(
        model=replace(SMALL),
        data=DataConfig(vocab_size=512),
        train=TrainConfig(steps=100, global_batch=8, micro_batch=2, sequence_length=32),
    )
    for key, value in changes.items():
        *path, name = key.split("__")
        owner: Any = config
        for part in path:
            owner = getattr(owner, part)
        assert hasattr(owner, name), key
        setattr(owner, name, value)
    return config
