"""Write the checkpoints that benchmarks/reshard.py converts: a Llama with random weights and moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from toolkit import families
from toolkit.checkpoint.catalog import Catalog, TensorPiece, byte_length
from toolkit.checkpoint.offline import reshard
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error, open_source
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.families.base import ModelShape

NATIVE = "native"  # name of the folder
NOISE_ELEMENTS = 2**24  # per write


def llama(parameters: float) -> ModelShape:
    """Return a Llama of about this many parameters: 20 layers, untied embeddings of 31.25 rows per hidden
    unit."""
    hidden = max(64, round((parameters / 307.5) ** 0.5 / 64) * 64)
    return ModelShape(
        family="llama",
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=20,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        vocab_size=hidden * 125 // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def make_native(folder: Path, parameters: float) -> int:
    """Write weights and moments with random values; return the number of parameters."""
    shape = llama(parameters)
    specs = families.get_family(shape.family).parameters(shape)
    tensors = {
        TensorKey(state, spec.name): TensorInfo("float32", spec.shape)
        for state in (WEIGHT, EXP_AVG, EXP_AVG_SQ)
        for spec in specs
    }
    noise, pieces, at = folder / "noise", {}, 0
    noise.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    with noise.open("wb") as file:
        for key, info in tensors.items():
            numbytes = byte_length(info.dtype, info.shape)
            pieces[key] = (
                TensorPiece(
                    key, info.dtype, info.shape, Box.whole(info.shape), noise.name, at, at + numbytes
                ),
            )
            for first in range(0, numbytes // 4, NOISE_ELEMENTS):
                count = min(NOISE_ELEMENTS, numbytes // 4 - first)
                file.write(np.square(random.standard_normal(count, np.float32)).data)
            at += numbytes
    source = CheckpointSource(
        format="noise",
        catalog=Catalog(folder, tensors, pieces, {"step": 10, "optimizer_step": 10, "consumed_samples": 80}),
        namespace=families.get_family(shape.family).namespace,
        step=10,
        shape=shape,
        damage_error=foreign_damage_error,
    )
    convert(source, folder / NATIVE, TargetFormat.native)
    noise.unlink()
    return sum(spec.numel for spec in specs)


def make_dcp(source: Path, target: Path) -> None:
    """Save the same tensors with torch."""
    import torch
    import torch.distributed.checkpoint as dcp

    from toolkit.checkpoint.shard import Shard

    reader = open_source(source).reader()
    tensors = {f"{key}": torch.empty(info.shape) for key, info in reader.tensors.items()}
    reader.read(
        [
            Shard(key, info.shape, Box.whole(info.shape), tensors[f"{key}"])
            for key, info in reader.tensors.items()
        ]
    )
    dcp.save(tensors, checkpoint_id=target, no_dist=True)


def convert(source: CheckpointSource, target: Path, form: TargetFormat, **more: Any) -> None:
    laid_out = reshard.lay_out(source, TargetConfig(format=form, **more))
    Conversion(source, laid_out, target).run()
