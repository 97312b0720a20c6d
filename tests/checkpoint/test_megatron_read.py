"""Read checkpoints that Megatron-core saved, bitwise equal to the engine's memory and to PyTorch's loader.

pytest tests/checkpoint/test_megatron_read.py
pytest tests/checkpoint/test_megatron_read.py -m full      every family, axis, kind of optimizer and of keys
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import megatron_ranks as work
from tests.checkpoint.layouts import same_bits
from tests.checkpoint.megatron_cells import (
    BF16,
    FULL,
    GPT2_3D,
    LLAMA_TP,
    MIXTRAL_EP,
    QUICK,
    QWEN2_BF16,
    TOLERANCE,
    Cell,
    Saves,
    cell,
    differing,
    max_difference,
    opened,
    read_with_pytorch,
)
from tests.checkpoint.megatron_ranks import SAMPLES, STOP
from toolkit import families
from toolkit.checkpoint.formats import native
from toolkit.checkpoint.formats.dcp import metadata as dcp_metadata
from toolkit.checkpoint.formats.megatron.keys import key_slots, parse_key
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import EXP_AVG, MASTER, WEIGHT, Box, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target_tensors import select_target_tensors
from toolkit.checkpoint.verify import verify
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError, InputError
from toolkit.testing.matrix import Cell as Layout
from toolkit.testing.matrix import OptimizerCase, megatron


def check(case: Cell, saved: Saves) -> CheckpointSource:
    folder, saved_state = saved.get(case)
    source = opened(case, folder)
    assert (source.format, source.step) == ("megatron", STOP)
    assert source.catalog.tensors.keys() == saved_state.state.keys()
    assert not differing(source, saved_state.state)
    for key, value in saved_state.scalars.items():
        assert source.catalog.scalars[key] == value, key
    optim = case.plan.config.optim
    expected = {
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    assert source.catalog.scalars["optim"] == expected
    compare_copies(source)
    return source


def compare_copies(source: CheckpointSource) -> None:
    """Copies are equal: in fp32 the distributed optimizer's weights are the model's."""
    for key in source.catalog.copies:
        ours = {(piece.box, piece.transposed): piece for piece in source.catalog.pieces[key]}
        for copy in source.catalog.copies[key]:
            own = ours[copy.box, copy.transposed]
            first, second = (
                (source.folder / piece.file).read_bytes()[piece.begin : piece.end] for piece in (own, copy)
            )
            assert first == second, copy


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_read_megatron_checkpoint(case: Cell, megatron_saved: Saves) -> None:
    check(case, megatron_saved)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in FULL if case not in QUICK], ids=str)
def test_read_every_megatron_layout(case: Cell, megatron_saved: Saves) -> None:
    check(case, megatron_saved)


def test_model_is_derived_from_megatron_lm_arguments(megatron_saved: Saves) -> None:
    folder, _ = megatron_saved.get(LLAMA_TP)
    source = open_source(folder)
    assert source.shape == LLAMA_TP.plan.shape
    assert source.catalog.scalars["consumed_samples"] == SAMPLES
    assert source.description["layout"] == "tensor 2"
    assert source.description["optimizer"] == "distributed"
    assert source.omitted == ()


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_arguments_distinguish_families(family: str) -> None:
    from toolkit.checkpoint.formats.megatron.args import read_model_shape

    case = cell(family)
    args = vars(work.arguments(case.plan))
    assert read_model_shape(args) == case.plan.shape
    assert read_model_shape({**args, "vocab_size": None}) is None, (
        "the padded vocabulary is not the vocabulary"
    )
    assert read_model_shape({**args, "normalization": "L2Norm"}) is None


def test_megatron_model_is_required(megatron_saved: Saves, tmp_path: Path) -> None:
    folder = shutil.copytree(megatron_saved.get(GPT2_3D)[0], tmp_path / "alone" / "deeper" / "here" / "copy")
    with pytest.raises(InputError, match="does not describe its model"):
        open_source(folder)


def test_pytorch_reads_equal_values(megatron_saved: Saves) -> None:
    """PyTorch's loader reads whole tensors, which the families' tables cut in memory."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    folder, saved_state = megatron_saved.get(MIXTRAL_EP)
    metadata = FileSystemReader(str(folder / f"iter_{STOP:07d}")).read_metadata()
    keys = {
        key for key, about in metadata.state_dict_metadata.items() if isinstance(about, TensorStorageMetadata)
    }
    ours = dcp_metadata.load_metadata(folder / f"iter_{STOP:07d}")
    assert ours.tensors.keys() == keys
    assert ours.objects.keys() == metadata.state_dict_metadata.keys() - keys
    whole = read_with_pytorch(folder / f"iter_{STOP:07d}")
    assert MIXTRAL_EP.plan.shape is not None
    for tensor in families.get_family("mixtral").megatron_tensors(MIXTRAL_EP.plan.shape):
        if tensor.expert is None:
            continue
        name = tensor.name.split(f"local_experts.{tensor.expert}.")[1]
        stacked = whole[f"optimizer.state.exp_avg.decoder.layers.mlp.experts.experts.{name}"]
        for part in tensor.parts:
            place = tuple(slice(low, low + size) for low, size in zip(part.offset, part.extent, strict=True))
            assert tensor.layer is not None
            assert same_bits(
                part.view(stacked[tensor.layer, tensor.expert]),
                saved_state.state[TensorKey(EXP_AVG, part.canonical)][place],
            )


# ---- what is refused


@pytest.mark.full
def test_other_sharding_types_are_rejected(megatron_saved: Saves, tmp_path: Path) -> None:
    case = QWEN2_BF16
    megatron_saved.pool.run(
        work.train, case.plan, tmp_path / "x", {"sharding_type": "dp_reshardable"}, ranks=case.ranks
    )
    with pytest.raises(CheckpointError, match="sharded as dp_reshardable"):
        opened(case, tmp_path / "x")


def test_other_model_is_reported(megatron_saved: Saves) -> None:
    folder, _ = megatron_saved.get(GPT2_3D)
    shape = GPT2_3D.plan.shape
    assert shape is not None
    with pytest.raises(CheckpointError, match=r"linear_fc1\.weight"):
        open_source(folder, replace(shape, intermediate_size=96))
    with pytest.raises(CheckpointError, match=r"no weight of decoder\.layers\.2\."):
        open_source(folder, replace(shape, num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=r"has decoder\.layers\.1\."):
        open_source(folder, replace(shape, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("metadata", r"\.metadata cannot be read"),
        ("missing", "is missing"),
        ("short", "of at least"),
        ("common", r"common\.pt"),
        ("legacy", r"metadata\.json is missing"),
        ("zarr", "format zarr"),
        ("tracker", "is missing"),
        ("chunk", "cannot be read as a file of torch"),
        ("steps", "all parameters have taken the same steps"),
    ],
)
def test_damage_is_reported_by_file(megatron_saved: Saves, tmp_path: Path, damage: str, message: str) -> None:
    folder = shutil.copytree(megatron_saved.get(GPT2_3D)[0], tmp_path / "copy")
    iteration = folder / f"iter_{STOP:07d}"
    file = max(iteration.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if damage == "metadata":
        (iteration / ".metadata").write_bytes((iteration / ".metadata").read_bytes()[:-20])
    elif damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "common":
        (iteration / "common.pt").write_bytes(b"nothing")
    elif damage == "legacy":
        (iteration / "metadata.json").unlink()
    elif damage == "zarr":
        (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}), encoding="utf-8")
    elif damage == "tracker":
        (folder / "latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
    elif damage == "steps":
        common = torch.load(iteration / "common.pt", weights_only=False)
        common["optimizer"]["param_groups"][0]["step"] = STOP + 1
        torch.save(common, iteration / "common.pt")
    else:
        blob = (
            dcp_metadata.load_metadata(iteration).tensors["embedding.word_embeddings.weight"].chunks[0].blob
        )
        with (iteration / blob.file).open("r+b") as stream:
            stream.seek(blob.end - 22)
            stream.write(bytes(22))
    with pytest.raises(CheckpointError, match=message):
        differing(opened(GPT2_3D, folder), megatron_saved.get(GPT2_3D)[1].state)


# ---- what upstream writes wrongly


OVERLAP = (("overlap_grad_reduce", True), ("bucket_size", 6000))


@pytest.mark.full
@pytest.mark.parametrize("precision", [BF16, None], ids=["bf16", "fp32"])
def test_known_upstream_corruption_is_rejected(megatron_saved: Saves, tmp_path: Path, precision: Any) -> None:
    """With several buckets under overlap_grad_reduce, Megatron-core 0.16 writes wrong optimizer state,
    with a warning.
    """
    layout = megatron("llama", data=2, zero=1, label="overlap", own=OVERLAP)
    case = Cell(layout, precision or LLAMA_TP.precision)
    folder, saved_state = megatron_saved.get(case)
    source = opened(case, folder)
    wrong = differing(source, saved_state.state)
    assert wrong, "upstream has fixed it: update the docs and remove this test"
    with pytest.raises(CheckpointError, match="corrupt"):
        convert(source, tmp_path / "native")
    assert verify(folder, case.plan.shape)
    sound, _ = megatron_saved.get(QWEN2_BF16)
    convert(opened(QWEN2_BF16, sound), tmp_path / "sound")
    assert verify(sound, QWEN2_BF16.plan.shape) == []


def convert(source: CheckpointSource, path: Path) -> None:
    Conversion(
        source, native.lay_out(source, select_target_tensors(source, None, optimizer=True)), path
    ).run()


# ---- training goes on from it


RESUMED = [(LLAMA_TP, megatron("llama", pipeline=2, vocabulary=LLAMA_TP.layout.vocabulary))]


@pytest.mark.parametrize(("case", "into"), RESUMED, ids=["llama"])
def test_training_resumes_in_other_layout(case: Cell, into: Layout, megatron_saved: Saves) -> None:
    folder, saved_state = megatron_saved.get(case)
    plan = into.plan(OptimizerCase.ADAM)
    assert plan.shape == case.plan.shape
    found = megatron_saved.pool.run(work.resume, plan, folder, ranks=into.ranks)[0]
    assert max_difference(found.results, saved_state.results) <= TOLERANCE
    forgot = megatron_saved.pool.run(work.resume, plan, folder, True, ranks=into.ranks)[0]
    assert max_difference(forgot.results, saved_state.results) > 10 * TOLERANCE


# ---- names


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_written_keys_can_be_parsed(family: str) -> None:
    shape = cell(family).plan.shape
    assert shape is not None
    for tensor in families.get_family(family).megatron_tensors(shape):
        for slot in key_slots(tensor, shape):
            for prefix, state in (
                ("", WEIGHT),
                ("optimizer.state.param.", MASTER),
                ("chained_1.optimizer.state.exp_avg.", EXP_AVG),
            ):
                key = parse_key(prefix + slot.key)
                assert key is not None
                assert (key.state, key.weight, key.half) == (state, slot.key, None)
                (member,) = key.members(
                    Box((*slot.index, *(0 for _ in tensor.shape)), (*(1 for _ in slot.index), *tensor.shape))
                )
                assert member == (tensor.name, (0,) * len(slot.index), Box.whole(tensor.shape))
                assert key.whole_shape(tensor.shape, shape) == (*slot.counts, *tensor.shape)


def test_parse_half_keys_and_unknown_keys() -> None:
    gate, up = (
        parse_key(f"optimizer.state.exp_avg.decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_{half}")
        for half in "wv"
    )
    assert gate is not None
    assert up is not None
    assert (gate.half, up.half, gate.source == up.source) == (0, 1, True)
    assert gate.name == "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    assert parse_key("optimizer.state.master_param.decoder.final_layernorm.weight") is None


@pytest.mark.full
@pytest.mark.parametrize("precision", [BF16])
def test_sgd_momentum_is_read(megatron_saved: Saves, precision: Precision) -> None:
    settings = {"optim__name": "sgd", "optim__momentum": 0.9, "optim__lr": 0.1, "optim__clip": 0.0}
    case = Cell(megatron("llama", tensor=2), precision, more=tuple(settings.items()))
    folder, saved_state = megatron_saved.get(case)
    source = opened(case, folder)
    assert "momentum_buffer" in {key.state for key in source.catalog.tensors}
    assert source.catalog.tensors.keys() == saved_state.state.keys()
    assert not differing(source, saved_state.state)
