"""A native checkpoint of a tiny model with optimizer state, created without training."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from tests.checkpoint.layouts import LAYOUTS, shards_of
from toolkit import families
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import MODEL
from toolkit.config.model import ModelConfig
from toolkit.families.base import ModelShape
from toolkit.testing.tiny import FAMILIES, SIZES

STEP = 3


def tiny_shape(family: str = "llama") -> ModelShape:
    return families.get_family(family).resolve_shape(
        ModelConfig(family=family, **{**SIZES, **FAMILIES[family]})
    )


def tensors_of(shape: ModelShape, *, mixed: bool = False) -> dict[TensorKey, torch.Tensor]:
    """``mixed``: bf16 weights and fp32 masters."""
    generator = torch.Generator().manual_seed(5)
    found: dict[TensorKey, torch.Tensor] = {}
    for spec in families.get_family(shape.family).parameters(shape):
        values = torch.randn((3, *spec.shape), generator=generator)
        found[TensorKey(WEIGHT, spec.name)] = values[0].bfloat16() if mixed else values[0]
        if mixed:
            found[TensorKey(MASTER, spec.name)] = values[0]
        found[TensorKey(EXP_AVG, spec.name)] = values[1]
        found[TensorKey(EXP_AVG_SQ, spec.name)] = values[2].square()
    return found


def tiny_checkpoint(
    directory: Path, family: str = "llama", *, mixed: bool = False, with_model: bool = True
) -> Path:
    """Create ``step-00000003`` in ``directory``."""
    shape = tiny_shape(family)
    (shards,) = shards_of(tensors_of(shape, mixed=mixed), LAYOUTS["replicated"], 1)
    optim = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.1}
    scalars = {
        "step": STEP,
        "consumed_samples": 24,
        "optimizer_step": STEP,
        "optim": optim,
        **({MODEL: asdict(shape)} if with_model else {}),
    }
    return (
        CheckpointStore(directory)
        .save(
            STEP, shards, scalars, namespace=families.get_family(family).namespace, rank=0, ranks=1, attempt=1
        )
        .wait()
    )
