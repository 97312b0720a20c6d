"""Megatron-core's loader loads converted checkpoints of other layouts bitwise, and training continues.

pytest tests/checkpoint/test_megatron_write.py
pytest tests/checkpoint/test_megatron_write.py -m full      every family, axis and kind of optimizer
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import megatron_ranks as work
from tests.checkpoint.layouts import same_bits
from tests.checkpoint.megatron_cells import (
    BF16,
    GPT2_3D,
    LLAMA_TP,
    MIXTRAL_EP,
    QWEN2_BF16,
    TOLERANCE,
    Cell,
    Saves,
    cell,
    max_difference,
    opened,
    read_with_pytorch,
)
from tests.checkpoint.megatron_ranks import STOP
from tests.checkpoint.tiny_run import tiny_checkpoint, tiny_shape
from toolkit.checkpoint import manifest
from toolkit.checkpoint.formats.dcp import metadata as dcp_metadata
from toolkit.checkpoint.formats.megatron import rank_files
from toolkit.checkpoint.formats.megatron import target as megatron_target
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIM
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.verify import compute_digest
from toolkit.config.reshard import TargetConfig, TargetFormat, TargetOptimConfig, TargetParallelConfig
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError

SETTINGS = TargetOptimConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-4, weight_decay=0.1)


def asked(
    *,
    optim: TargetOptimConfig | None = None,
    precision: Precision | None = None,
    optimizer: bool | None = None,
    **parallel: int,
) -> TargetConfig:
    return TargetConfig(
        format=TargetFormat.megatron,
        parallel=TargetParallelConfig(**parallel),
        optim=optim or TargetOptimConfig(),
        precision=precision,
        optimizer=optimizer,
    )


def write(source: CheckpointSource, config: TargetConfig, path: Path) -> Path:
    """Write without this toolkit's manifest, so that only Megatron-core's files describe the content."""
    target = megatron_target.lay_out(source, config)
    Conversion(source, target, path).run()
    (path / manifest.FOREIGN_NAME).unlink()
    return path


def in_layout(case: Cell) -> TargetConfig:
    layout = case.layout
    return asked(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data, expert=layout.expert)


# (what saves, what opens it): between them every kind of optimizer and kind of keys; experts are in FULL.
QUICK = [
    (LLAMA_TP, cell("llama", pipeline=2, vocabulary=LLAMA_TP.layout.vocabulary)),
    (GPT2_3D, cell("gpt2", data=2, zero=1)),
    (QWEN2_BF16, QWEN2_BF16),
]
LLAMA = [
    cell("llama"),
    cell("llama", tensor=2),
    cell("llama", pipeline=2),
    cell("llama", data=2, zero=1),
    cell("llama", tensor=2, pipeline=2),
    cell("llama", data=2, tensor=2, zero=1),
]
VPP = cell("llama", pipeline=2, layers=4, label="vpp2", own=(("virtual_pipeline_model_parallel_size", 2),))
FULL = [
    *((saved, LLAMA[(at + step) % len(LLAMA)]) for at, saved in enumerate(LLAMA) for step in (1, 3)),
    (MIXTRAL_EP, cell("mixtral", data=2, zero=1)),
    (VPP, cell("llama", tensor=2, layers=4)),
    (cell("llama", tensor=2, layers=4), VPP),
    (MIXTRAL_EP, MIXTRAL_EP),
    (cell("mixtral", tensor=2), MIXTRAL_EP),
    (MIXTRAL_EP, cell("mixtral", data=2, expert=2, zero=1)),
    (cell("mixtral", data=2, expert=2, zero=1), cell("mixtral", pipeline=2)),
    *(
        (saved, saved)
        for saved in (
            cell("llama", tensor=2, precision=BF16),
            cell("gpt2", pipeline=2, precision=BF16),
            cell("mixtral", data=2, expert=2, zero=1, precision=BF16),
            cell("llama", tensor=2, data=2, zero=1, precision=BF16),
        )
    ),
    *((cell(family, tensor=2, pipeline=2), cell(family, data=2, zero=1)) for family in ("qwen2", "qwen3")),
]


@pytest.mark.parametrize(("case", "opens"), QUICK, ids=str)
def test_megatron_resumes_from_written_checkpoint(
    case: Cell, opens: Cell, megatron_saved: Saves, tmp_path: Path
) -> None:
    check(case, opens, megatron_saved, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("case", "opens"), FULL, ids=str)
def test_megatron_resumes_for_every_layout_pair(
    case: Cell, opens: Cell, megatron_saved: Saves, tmp_path: Path
) -> None:
    check(case, opens, megatron_saved, tmp_path)


def check(case: Cell, opens: Cell, saved: Saves, path: Path) -> None:
    folder, saved_state = saved.get(case)
    assert opens.plan.shape == case.plan.shape
    written = write(opened(case, folder), in_layout(opens), path / "written")
    found = saved.pool.run(work.continue_with_vendor, opens.plan, written, ranks=opens.ranks)[0]
    assert found.state.keys() == saved_state.state.keys()
    assert not [
        str(key) for key in saved_state.state if not same_bits(found.state[key], saved_state.state[key])
    ]
    assert found.scalars == saved_state.scalars
    assert max_difference(found.results, saved_state.results) <= TOLERANCE
    again = open_source(written, case.plan.shape)
    assert compute_digest(again.reader()) == compute_digest(opened(case, folder).reader())
    assert {key: again.catalog.scalars[key] for key in ("step", "optimizer_step", OPTIM)} == {
        key: opened(case, folder).catalog.scalars[key] for key in ("step", "optimizer_step", OPTIM)
    }


def test_control_zeroed_moments_change_losses(megatron_saved: Saves, tmp_path: Path) -> None:
    folder, saved_state = megatron_saved.get(QWEN2_BF16)
    written = write(opened(QWEN2_BF16, folder), in_layout(QWEN2_BF16), tmp_path / "written")
    forget(written / f"iter_{STOP:07d}")
    found = megatron_saved.pool.run(
        work.continue_with_vendor, QWEN2_BF16.plan, written, ranks=QWEN2_BF16.ranks
    )[0]
    assert max_difference(found.results, saved_state.results) > 10 * TOLERANCE


def forget(iteration: Path) -> None:
    """Zero every moment, and correct the checksums by saving its tensors again at the same offsets."""
    import zlib

    metadata = dcp_metadata.load_metadata(iteration)
    for key, stored in metadata.tensors.items():
        if not key.startswith(("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")):
            continue
        for chunk in stored.chunks:
            tensor = dcp_metadata.open_chunk(iteration, chunk, stored.dtype)
            begin, numbytes = tensor.storage.begin, tensor.numel * 4
            with (iteration / chunk.blob.file).open("r+b") as file:
                file.seek(begin)
                old = zlib.crc32(file.read(numbytes)).to_bytes(4, "little")
                file.seek(begin)
                file.write(bytes(numbytes))
                new = zlib.crc32(bytes(numbytes)).to_bytes(4, "little")
                file.seek(chunk.blob.begin)
                data = file.read(chunk.blob.end - chunk.blob.begin)
                head, tail = data[: begin - chunk.blob.begin], data[begin - chunk.blob.begin + numbytes :]
                assert head.count(old) == tail.count(old) == 1
                file.seek(chunk.blob.begin)
                file.write(head.replace(old, new) + bytes(numbytes) + tail.replace(old, new))


def test_every_key_of_megatron_is_written(megatron_saved: Saves, tmp_path: Path) -> None:
    """PyTorch's loader finds every tensor and object that Megatron-core saved, bitwise equal."""
    case = LLAMA_TP
    folder, _ = megatron_saved.get(case)
    written = write(opened(case, folder), in_layout(case), tmp_path / "written")
    theirs, ours = (read_with_pytorch(one / f"iter_{STOP:07d}") for one in (folder, written))
    assert theirs.keys() <= ours.keys()
    vocabulary = case.layout.vocabulary
    for key, tensor in theirs.items():
        assert same_bits(ours[key], tensor[:vocabulary] if tensor.shape[0] > vocabulary else tensor), key
    of_theirs, of_ours = (dcp_metadata.load_metadata(one / f"iter_{STOP:07d}") for one in (folder, written))
    assert of_theirs.objects.keys() <= of_ours.objects.keys()
    common = torch.load(written / f"iter_{STOP:07d}" / "common.pt", weights_only=True)
    saved = torch.load(folder / f"iter_{STOP:07d}" / "common.pt", weights_only=False)
    assert saved["optimizer"].keys() <= common["optimizer"].keys()
    for group, mine in zip(
        saved["optimizer"]["optimizer"]["param_groups"],
        common["optimizer"]["optimizer"]["param_groups"],
        strict=True,
    ):
        differing = {name for name in group if name not in ("max_lr", "min_lr") and group[name] != mine[name]}
        assert not differing, {name: (group[name], mine[name]) for name in differing}


def test_chunks_match_requested_tensor_ranks(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run"))
    written = write(source, asked(tensor=2, pipeline=2, optim=SETTINGS), tmp_path / "written")
    found = dcp_metadata.load_metadata(written / "iter_0000003").tensors
    names = {
        "decoder.layers.self_attention.linear_qkv.weight": 4,
        "decoder.layers.mlp.linear_fc1.weight": 8,
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": 2,
        "embedding.word_embeddings.weight": 2,
    }
    assert {name: len(found[name].chunks) for name in names} == names
    assert {path.name for path in (written / "iter_0000003").glob("*.distcp")} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }
    assert (written / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "3"


def test_files_are_split_at_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "FILE_BYTES", 100_000)
    source = open_source(tiny_checkpoint(tmp_path / "run", mixed=True))
    written = write(source, asked(tensor=2, optim=SETTINGS), tmp_path / "written")
    files = list((written / "iter_0000003").glob("__0_*.distcp"))
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) <= 100_000
    assert compute_digest(open_source(written, tiny_shape()).reader()) == compute_digest(source.reader())


@pytest.mark.parametrize(
    ("family", "mixed"),
    [(family, number % 2 == 1) for number, family in enumerate(("llama", "gpt2", "qwen3", "mixtral"))]
    + [
        pytest.param(family, mixed, marks=pytest.mark.full)
        for family, mixed in (("qwen2", True), ("qwen3_moe", False))
    ],
)
def test_round_trip_restores_every_tensor(family: str, mixed: bool, tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run", family, mixed=mixed))
    written = write(source, asked(tensor=2, pipeline=2, optim=SETTINGS), tmp_path / "written")
    again = open_source(written, source.shape)
    assert compute_digest(again.reader()) == compute_digest(source.reader())
    assert again.catalog.scalars.keys() == {"step", "consumed_samples", "optimizer_step", OPTIM}
    assert {key: again.catalog.scalars[key] for key in ("step", "consumed_samples", "optimizer_step")} == {
        "step": 3,
        "consumed_samples": 24,
        "optimizer_step": 3,
    }
    assert again.catalog.scalars[OPTIM] == asdict(SETTINGS)
    assert not again.catalog.copies, "keys that name the same bytes are no copies"


def test_write_weights_without_optimizer(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run", mixed=True))
    written = write(source, asked(optimizer=False, precision=Precision.fp32), tmp_path / "written")
    again = open_source(written, source.shape)
    assert {key.state for key in again.catalog.tensors} == {WEIGHT}
    name = "model.norm.weight"
    values = {
        key: torch.empty(again.catalog.tensors[TensorKey(WEIGHT, name)].shape) for key in (WEIGHT, MASTER)
    }
    read(again, TensorKey(WEIGHT, name), values[WEIGHT])
    read(source, TensorKey(MASTER, name), values[MASTER])
    assert same_bits(values[WEIGHT], values[MASTER]), "fp32 weights are the masters"


def read(source: CheckpointSource, key: TensorKey, into: torch.Tensor) -> None:
    from toolkit.checkpoint.shard import Box, Shard

    source.reader().read([Shard(key, tuple(into.shape), Box.whole(into.shape), into)])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (asked(tensor=3, optim=SETTINGS), r"target\.parallel\.tensor=3"),
        (asked(pipeline=3, optim=SETTINGS), r"target\.parallel\.pipeline=3"),
        (asked(expert=2, optim=SETTINGS), r"target\.parallel\.expert=2"),
    ],
)
def test_invalid_layouts_are_rejected(config: TargetConfig, message: str, tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=message):
        megatron_target.lay_out(source, config)


def test_missing_optimizer_settings_are_requested(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run"))
    silent = {name: value for name, value in source.catalog.scalars.items() if name != OPTIM}
    with pytest.raises(CheckpointError, match=r"target\.optim\.lr"):
        megatron_target.lay_out(replace(source, catalog=replace(source.catalog, scalars=silent)), asked())


def test_other_optimizers_are_rejected(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run"))
    catalog = source.catalog
    kept: dict[Any, Any] = {
        key: info for key, info in catalog.tensors.items() if key.state not in (EXP_AVG, EXP_AVG_SQ)
    }
    kept |= {TensorKey("momentum_buffer", key.name): info for key, info in kept.items()}

    with pytest.raises(CheckpointError, match="momentum_buffer"):
        megatron_target.lay_out(
            replace(source, catalog=replace(catalog, tensors=kept)), asked(optim=SETTINGS)
        )


def test_published_weights_become_release(tmp_path: Path) -> None:
    """Without a step, as Megatron-LM's converters write them."""
    source = replace(open_source(tiny_checkpoint(tmp_path / "run")), step=None)
    written = write(source, asked(tensor=2, optimizer=False), tmp_path / "written")
    assert (written / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "release"
    again = open_source(written, source.shape)
    assert (again.folder.name, again.step) == ("release", None)
    assert {key.state for key in again.catalog.tensors} == {WEIGHT}


def test_fp16_loss_scale_is_written(tmp_path: Path) -> None:
    source = open_source(tiny_checkpoint(tmp_path / "run", mixed=True))
    scaler = {"cur_scale": 1024.0, "cur_iter": 7, "last_overflow_iter": 3, "cur_hysteresis": 1}
    source = replace(
        source, catalog=replace(source.catalog, scalars={**source.catalog.scalars, LOSS_SCALER: scaler})
    )
    written = write(source, asked(precision=Precision.fp16), tmp_path / "written")
    common = torch.load(written / "iter_0000003" / "common.pt", weights_only=True)
    assert torch.equal(common["optimizer"]["grad_scaler"]["scale"], torch.tensor([1024.0]))
    again = open_source(written, source.shape).catalog.scalars[LOSS_SCALER]
    assert again == {"cur_scale": 1024.0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 1}
    bf16 = open_source(write(source, asked(), tmp_path / "bf16"), source.shape)
    assert LOSS_SCALER not in bf16.catalog.scalars
