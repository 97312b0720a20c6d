"""Tiny models of transformers, and folders with their optimizer state, for the tests of the Hugging
Face format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.layouts import LAYOUTS, save, shards_of
from toolkit import families
from toolkit.checkpoint.formats.huggingface.target import lay_out
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.config.model import ModelConfig
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.families.base import ModelShape

FAMILIES = tuple(families.FAMILIES)


def tiny(name: str, **changes: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 67,
    }
    sizes["max_position_embeddings"] = 16
    if name != "gpt2":
        sizes |= {"intermediate_size": 48, **families.get_family(name).tiny, "tie_word_embeddings": False}
    return families.get_family(name).resolve_shape(ModelConfig(family=name, **{**sizes, **changes}))


def model_of(shape: ModelShape) -> Any:
    """The family's model in transformers, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = families.get_family(shape.family).hugging_face_config(shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


SCALARS = {
    "step": 7,
    "consumed_samples": 112,
    "optimizer_step": 6,
    "loss_scaler": {"cur_scale": 4.0},
    "data": {"train": "abc"},
}


def with_optimizer(
    name: str, folder: Path, *, mixed: bool = True, momentum: bool = False
) -> CheckpointSource:
    """A run's checkpoint of step 7 on two ranks. ``momentum``: as in Muon, one moment of matrices and two
    of other parameters.
    """
    shape = tiny(name)
    weights = model_of(shape).state_dict()
    values = {spec.name: weights[spec.name] for spec in families.get_family(name).parameters(shape)}
    named = {TensorKey(WEIGHT, name): value.bfloat16() if mixed else value for name, value in values.items()}
    named |= {TensorKey(MASTER, name): value for name, value in values.items() if mixed}
    for name, value in values.items():
        if momentum and value.ndim > 1:
            named[TensorKey(MOMENTUM, name)] = value * 3
        else:
            named |= {TensorKey(EXP_AVG, name): value / 3, TensorKey(EXP_AVG_SQ, name): value**2}
    return open_source(save(folder, 7, shards_of(named, LAYOUTS["flat"], 2), scalars=SCALARS), shape)


def write(source: CheckpointSource, target: CheckpointTarget, folder: Path) -> Path:
    Conversion(source, target, folder).run()
    return folder


def converted(folder: Path, name: str, **settings: Any) -> Path:
    source = with_optimizer(name, folder / "run", **settings)
    return write(
        source,
        lay_out(source, TargetConfig(format=TargetFormat.huggingface, optimizer=True), shard_bytes=30_000),
        folder / "hub",
    )
