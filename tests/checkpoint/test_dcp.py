"""Read distributed checkpoints that PyTorch saved, bitwise.

pytest tests/checkpoint/test_dcp.py
pytest tests/checkpoint/test_dcp.py -m full
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint import dcp_ranks as work
from tests.checkpoint.dcp_ranks import DECAY, SETTINGS, STOP, State
from tests.checkpoint.megatron_cells import differing
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats.dcp import metadata as dcp_metadata
from toolkit.checkpoint.formats.dcp.metadata import Blob, ChunkedTensor, DcpMetadata, TensorChunk
from toolkit.checkpoint.shard import EXP_AVG, WEIGHT, Box, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.errors import CheckpointError, InputError
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.tiny import tiny_plan

Case = tuple[str, int, bool, bool, str]
# (family, ranks, FSDP, flattened optimizer names, name of the model in the saved dict): tied and untied, odd
# sizes.
QUICK: tuple[Case, ...] = (("qwen2", 2, True, True, "model"), ("gpt2", 1, False, False, "app.model"))
FULL: tuple[Case, ...] = (
    ("mixtral", 2, True, False, "model"),
    ("llama", 4, True, True, "state"),
    ("qwen3", 2, False, True, "model"),
    ("gpt2", 4, True, False, "model"),
)


def plan_of(family: str) -> RunPlan:
    return tiny_plan(family, model__vocab_size=263)


class Saves:
    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self.get = cache(self._make)

    def _make(self, case: Case) -> tuple[Path, State]:
        family, ranks, *how = case
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        return folder, self._pool.run(work.save, plan_of(family), folder, *how, ranks=ranks)[0]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(pool, tmp_path_factory.mktemp("dcp"))


def check(case: Case, saved: Saves) -> None:
    folder, saved_state = saved.get(case)
    source = open_source(folder, plan_of(case[0]).shape)
    assert (source.format, source.step) == ("dcp", STOP)
    assert source.catalog.tensors.keys() == saved_state.keys()
    assert not differing(source, saved_state)
    assert source.catalog.scalars == {
        "step": STOP,
        "optimizer_step": STOP,
        "optim": {"lr": SETTINGS["lr"], "betas": [0.9, 0.99], "eps": SETTINGS["eps"], "weight_decay": DECAY},
    }
    assert source.omitted == ("epoch",)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_read_dcp_saved_by_pytorch(case: Case, saved: Saves) -> None:
    check(case, saved)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=str)
def test_read_every_dcp_variant(case: Case, saved: Saves) -> None:
    check(case, saved)


def test_model_is_required_and_must_match(saved: Saves, tmp_path: Path) -> None:
    folder = shutil.copytree(saved.get(QUICK[1])[0], tmp_path / "alone" / "deeper" / "here" / "copy")
    with pytest.raises(InputError, match="does not describe its model"):
        open_source(folder)
    shape = plan_of("gpt2").shape
    assert shape is not None
    with pytest.raises(CheckpointError, match=r"wte\.weight"):
        open_source(folder, replace(shape, vocab_size=264))
    with pytest.raises(CheckpointError, match=r"has no transformer\.h\.2\."):
        open_source(folder, replace(shape, num_hidden_layers=3))


def names() -> dict[str, torch.Tensor]:
    shape = plan_of("llama").shape
    assert shape is not None
    from toolkit import families

    return {spec.name: torch.randn(spec.shape) for spec in families.get_family("llama").parameters(shape)}


def test_optimizer_state_by_number_is_rejected(tmp_path: Path) -> None:
    weights = names()
    checkpoint.save(
        {"model": weights, "optim": {"state": {"0": {"exp_avg": torch.zeros(3)}}}},
        checkpoint_id=str(tmp_path / "x"),
        no_dist=True,
    )
    with pytest.raises(CheckpointError, match="keyed by parameter numbers"):
        open_source(tmp_path / "x", plan_of("llama").shape)


def test_disagreeing_steps_are_rejected(tmp_path: Path) -> None:
    weights = names()
    state = {
        name: {"exp_avg": torch.zeros_like(value), "step": torch.tensor(3.0)}
        for name, value in weights.items()
    }
    state["model.norm.weight"]["step"] = torch.tensor(4.0)
    checkpoint.save(
        {"model": weights, "optim": {"state": state}}, checkpoint_id=str(tmp_path / "x"), no_dist=True
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight at step 4"):
        open_source(tmp_path / "x", plan_of("llama").shape)


def test_two_models_in_one_checkpoint_are_rejected(tmp_path: Path) -> None:
    weights = names()
    checkpoint.save({"model": weights, "average": weights}, checkpoint_id=str(tmp_path / "x"), no_dist=True)
    with pytest.raises(CheckpointError, match="has both"):
        open_source(tmp_path / "x", plan_of("llama").shape)


def test_tied_weight_becomes_copy(tmp_path: Path) -> None:
    from toolkit import families

    shape = plan_of("qwen2").shape
    assert shape is not None
    weights = {spec.name: torch.randn(spec.shape) for spec in families.get_family("qwen2").parameters(shape)}
    embedding = TensorKey(WEIGHT, "model.embed_tokens.weight")
    checkpoint.save(
        {**weights, "lm_head.weight": weights[embedding.name].clone()},
        checkpoint_id=str(tmp_path / "both"),
        no_dist=True,
    )
    both = open_source(tmp_path / "both", shape)
    assert list(both.catalog.copies) == [embedding]
    assert len(both.catalog.copies[embedding]) == 1
    head = weights.pop(embedding.name)
    checkpoint.save({**weights, "lm_head.weight": head}, checkpoint_id=str(tmp_path / "head"), no_dist=True)
    assert not differing(open_source(tmp_path / "head", shape), {embedding: head})


def test_written_metadata_loads_in_pytorch(tmp_path: Path) -> None:
    """PyTorch reads what this toolkit writes, and this toolkit reads both."""
    tensors = {
        "a": ChunkedTensor(
            "bfloat16",
            (4, 6),
            (
                TensorChunk(Box((0, 0), (3, 6)), Blob("__0_0.distcp", 64, 200)),
                TensorChunk(Box((3, 0), (1, 6)), Blob("__1_0.distcp", 0, 100)),
            ),
        ),
        "b": ChunkedTensor("float32", (), (TensorChunk(Box((), ()), Blob("__0_0.distcp", 64, 200)),)),
    }
    written = DcpMetadata(tensors, {"c/shard_0_1": Blob("__0_0.distcp", 0, 64)})
    (tmp_path / ".metadata").write_bytes(dcp_metadata.encode_metadata(written))
    for name, size in (("__0_0.distcp", 200), ("__1_0.distcp", 100)):
        (tmp_path / name).write_bytes(bytes(size))
    found = FileSystemReader(str(tmp_path)).read_metadata()
    assert found.state_dict_metadata["a"].properties.dtype is torch.bfloat16  # type: ignore[union-attr]
    assert found.state_dict_metadata["a"].size == (4, 6)  # type: ignore[union-attr]
    assert dcp_metadata.load_metadata(tmp_path) == written
    import pickle

    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    assert dcp_metadata.load_metadata(tmp_path) == written
    (tmp_path / "__1_0.distcp").write_bytes(bytes(99))
    with pytest.raises(DamagedFile, match="99 of at least 100"):
        dcp_metadata.load_metadata(tmp_path)


def test_incomplete_chunks_are_rejected() -> None:
    blob = Blob("x", 0, 1)
    whole = ChunkedTensor(
        "float32", (4,), (TensorChunk(Box((0,), (3,)), blob), TensorChunk(Box((3,), (1,)), blob))
    )
    dcp_metadata.check_coverage("a", whole)
    with pytest.raises(DamagedFile, match="3 of 4"):
        dcp_metadata.check_coverage("a", replace(whole, chunks=whole.chunks[:1]))
    with pytest.raises(DamagedFile, match="both contain"):
        dcp_metadata.check_coverage(
            "a", replace(whole, chunks=(*whole.chunks, TensorChunk(Box((2,), (1,)), blob)))
        )


def test_training_state_needs_its_step(tmp_path: Path) -> None:
    weights = names()
    state = {name: {EXP_AVG: torch.zeros_like(value)} for name, value in weights.items()}
    checkpoint.save(
        {"model": weights, "optim": {"state": state}}, checkpoint_id=str(tmp_path / "x"), no_dist=True
    )
    with pytest.raises(CheckpointError, match="no step"):
        open_source(tmp_path / "x", plan_of("llama").shape)
