"""Targets in DeepSpeed's formats: what is rejected, that every element is written once and every byte is
hashed.

pytest tests/checkpoint/test_deepspeed_target.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.deepspeed_ranks import Layout
from tests.checkpoint.layouts import same_bits, whole
from tests.checkpoint.tiny_run import tiny_checkpoint
from toolkit.checkpoint.catalog import Catalog
from toolkit.checkpoint.formats.deepspeed import target as deepspeed_target
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.planner import find_coverage_errors
from toolkit.checkpoint.scalars import OPTIM, OPTIMIZER_STEP
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.verify import verify
from toolkit.config.model import ModelConfig
from toolkit.config.reshard import TargetConfig, TargetOptimConfig, TargetParallelConfig, TargetZeroStage
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError, InputError
from toolkit.families import get_family


@pytest.mark.parametrize(
    "layout", [Layout(1, data=2), Layout(3, data=2, tensor=2), Layout(1, pipeline=2)], ids=str
)
def test_manifest_of_target_detects_changed_bytes(layout: Layout, tmp_path: Path) -> None:
    """Every byte of tensors is hashed, including copies."""
    source = open_source(tiny_checkpoint(tmp_path / "source", mixed=True))
    target = deepspeed_target.lay_out(source, layout.config())
    Conversion(source, target, tmp_path / "t").run()
    assert verify(tmp_path / "t") == []
    found = open_source(tmp_path / "t")
    assert (found.format, found.shape, found.step) == ("deepspeed", source.shape, source.step)
    values = whole(source.reader())
    assert all(same_bits(value, values[key]) for key, value in whole(found.reader()).items())
    assert {key.state for key in found.catalog.tensors} == {key.state for key in values} - (
        {WEIGHT} if layout.stage == 3 else set()
    )
    copies = [piece for of_key in found.catalog.copies.values() for piece in of_key]
    for piece in [next(iter(found.catalog.pieces.values()))[-1], *copies[:1]]:
        with (tmp_path / "t" / piece.file).open("r+b") as file:
            file.seek(piece.end - 1)
            last = file.read(1)
            file.seek(piece.end - 1)
            file.write(bytes([last[0] ^ 1]))
        assert verify(tmp_path / "t")
        with (tmp_path / "t" / piece.file).open("r+b") as file:
            file.seek(piece.end - 1)
            file.write(last)
    assert bool(copies) == (layout.tensor > 1)


REFUSED = {
    "files for expert parallelism": TargetConfig(parallel=TargetParallelConfig(expert=2)),
    "data parallelism with one other axis": TargetConfig(parallel=TargetParallelConfig(tensor=2, pipeline=2)),
    "has ZeRO 0 or 1": TargetConfig(zero=TargetZeroStage.stage2, parallel=TargetParallelConfig(pipeline=2)),
    "each stage has a layer": TargetConfig(parallel=TargetParallelConfig(pipeline=3)),
    "loss scaler": TargetConfig(precision=Precision.fp16),
    "hidden optimizer step": TargetConfig(zero=TargetZeroStage.stage0, precision=Precision.bf16),
    "equal parts of dim": TargetConfig(parallel=TargetParallelConfig(tensor=3)),
    "whole key-value heads": TargetConfig(parallel=TargetParallelConfig(tensor=4)),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_unsupported_targets_are_rejected(rule: str, tmp_path: Path) -> None:
    config = REFUSED[rule]
    config.optim = TargetOptimConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
    with pytest.raises(CheckpointError, match=rule):
        deepspeed_target.lay_out(open_source(tiny_checkpoint(tmp_path)), config)


def test_optimizer_settings_are_required(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path))
    config = TargetConfig(optim=TargetOptimConfig(lr=1e-3))
    with pytest.raises(
        CheckpointError,
        match=r"write target.optim.betas=... target.optim.eps=... target.optim.weight_decay=...",
    ):
        deepspeed_target.lay_out(saying(source, None), config)
    target = deepspeed_target.lay_out(
        saying(source, {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}), config
    )
    assert target.scalars[OPTIM] == {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}, (
        "the user's word comes first"
    )


def saying(source: CheckpointSource, optim: Mapping[str, Any] | None) -> CheckpointSource:
    scalars = {key: value for key, value in source.catalog.scalars.items() if key != OPTIM}
    return dataclasses.replace(
        source,
        catalog=dataclasses.replace(source.catalog, scalars=scalars | ({OPTIM: optim} if optim else {})),
    )


def test_unknown_model_is_rejected(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path, with_model=False))
    with pytest.raises(InputError, match="does not describe its model"):
        deepspeed_target.lay_out(source, TargetConfig())


@pytest.mark.parametrize(
    "layout",
    [Layout(1, data=64), Layout(3, data=50), Layout(2, data=8, tensor=8), Layout(1, data=4, pipeline=5)],
    ids=str,
)
@pytest.mark.parametrize("precision", [pytest.param(Precision.fp32, marks=pytest.mark.full), Precision.bf16])
def test_every_element_is_written_once(layout: Layout, precision: Precision, tmp_path: Path) -> None:
    """For models and ranks too large to run: pieces cover every tensor once, without overlapping bytes."""
    source = fabricated(
        tmp_path,
        ModelConfig(
            family="llama",
            hidden_size=1000,
            intermediate_size=1608,
            num_hidden_layers=7,
            num_attention_heads=8,
            head_dim=120,
            vocab_size=1024,
            max_position_embeddings=128,
        ),
    )
    target = deepspeed_target.lay_out(source, layout.config(precision=precision))
    pieces = {key: target.pieces[key] for key in target.tensors}
    assert find_coverage_errors(pieces) == []
    assert all(
        sum(piece.box.numel for piece in of_key) == torch.Size(target.tensors[key].shape).numel()
        for key, of_key in pieces.items()
    )
    wide = precision is Precision.fp32
    weights = (WEIGHT,) if wide else (MASTER,) if layout.stage == 3 else (WEIGHT, MASTER)
    assert {key.state for key in pieces} == {EXP_AVG, EXP_AVG_SQ, *weights}
    ends: dict[str, int] = {}
    lengths = {file.name: file.numbytes for file in target.files}
    everything = [piece for key in target.tensors for piece in (*target.pieces[key], *target.copies[key])]
    for piece in sorted(everything, key=lambda piece: (piece.file, piece.begin)):
        assert ends.get(piece.file, 0) <= piece.begin <= piece.end <= lengths[piece.file], piece
        ends[piece.file] = piece.end


def fabricated(folder: Path, model: ModelConfig) -> CheckpointSource:
    """Return a source with metadata only."""
    family = get_family(str(model.family))
    shape = family.resolve_shape(model)
    tensors = {
        TensorKey(state, spec.name): TensorInfo("float32", spec.shape)
        for state in (WEIGHT, EXP_AVG, EXP_AVG_SQ)
        for spec in family.parameters(shape)
    }
    optim = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    catalog = Catalog(folder, tensors, {}, {"step": 4, OPTIMIZER_STEP: 4, OPTIM: optim})

    def damage_error(_: Path, damage: Exception) -> CheckpointError:
        raise damage

    return CheckpointSource(
        format="native",
        catalog=catalog,
        namespace=family.namespace,
        step=4,
        shape=shape,
        damage_error=damage_error,
    )
