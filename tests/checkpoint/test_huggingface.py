"""Folders that transformers opens, and that come back as a Reader.

pytest tests/checkpoint/test_huggingface.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, same_bits, save, shards_of, whole
from toolkit import families
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.formats import huggingface_target
from toolkit.checkpoint.formats.huggingface_target import export
from toolkit.checkpoint.manifest import BESIDE
from toolkit.checkpoint.offline.convert import Conversion, Phase
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.verify import digest
from toolkit.config.schema import ModelConfig
from toolkit.errors import CheckpointError, InputError
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
    """The family's own model in transformers, with random weights that differ everywhere."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = families.get_family(shape.family).hugging_face_config(shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


def saved(model: Any, shape: ModelShape, directory: Path, *, mixed: bool = False) -> Path:
    """A checkpoint of two ranks; ``mixed``: bf16 weights and fp32 masters."""
    values = {
        spec.name: model.state_dict()[spec.name]
        for spec in families.get_family(shape.family).parameters(shape)
    }
    named = {TensorKey(WEIGHT, name): value.bfloat16() if mixed else value for name, value in values.items()}
    named |= {TensorKey(MASTER, name): value for name, value in values.items()} if mixed else {}
    return save(directory, 1, shards_of(named, LAYOUTS["flat"], 2))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(1, 12) * 5 % 67).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_opens_the_export_with_the_same_logits(tmp_path: Path, name: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    shape = tiny(name, tie_word_embeddings=tied)
    model = model_of(shape)
    source = open_source(saved(model, shape, tmp_path / "run", mixed=True), shape)
    for shard_bytes in (10**9, 20_000):
        folder = export(source, tmp_path / f"export{shard_bytes}", dtype="float32", shard_bytes=shard_bytes)
        assert (folder / "model.safetensors").exists() == (shard_bytes == 10**9)
        opened, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
            report
        )
        assert same_bits(logits(opened.eval()), logits(model))
        by_manifest = digest(open_reader(folder))
        (folder / BESIDE).unlink()
        back = open_reader(folder)
        assert digest(back) == by_manifest
        assert back.namespace == families.get_family(name).namespace
        for key, tensor in whole(back).items():
            assert same_bits(tensor, model.state_dict()[key.name])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_saves_is_read(tmp_path: Path, name: str) -> None:
    shape = tiny(name)
    model = model_of(shape)
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    reader = open_reader(tmp_path)
    found = whole(reader)
    assert [key.name for key in found] == [spec.name for spec in families.get_family(name).parameters(shape)]
    assert all(same_bits(tensor, model.state_dict()[key.name]) for key, tensor in found.items())
    for rank in shards_of(
        {key: tensor.float() for key, tensor in found.items()}, LAYOUTS["columns"], 3, empty=True
    ):
        reader.read(rank)
    exported = export(open_source(tmp_path), tmp_path / "again")
    assert digest(open_reader(exported)) == digest(reader)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    shape = tiny("llama")
    source = open_source(saved(model_of(shape), shape, tmp_path / "run"), shape)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    folder = export(source, tmp_path / "export", shard_bytes=20_000)
    export(source, folder, tokenizer=tokenizer, dtype="bfloat16")
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "toolkit-manifest.json",
    ]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        export(source, folder)
    with pytest.raises(InputError, match="dtype=int8"):
        export(source, tmp_path / "new", dtype="int8")
    with pytest.raises(CheckpointError, match="no weight of"):
        export(replace(source, shape=tiny("qwen2")), tmp_path / "new")
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["export", "run", "tokenizer"], (
        "nothing half-made stays"
    )


@pytest.mark.parametrize("moment", [Phase.PREPARE, Phase.UNITS, Phase.RENAME])
def test_an_export_that_fails_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Phase
) -> None:
    shape = tiny("llama")
    source = open_source(saved(model_of(shape), shape, tmp_path / "run"), shape)
    folder = export(source, tmp_path / "export")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def failing(*arguments: Any, **settings: Any) -> Conversion:
        def stop(phase: Phase) -> None:
            if phase is moment:
                raise KeyboardInterrupt

        return Conversion(*arguments, **settings, on_phase=stop)

    with monkeypatch.context() as patched:
        patched.setattr(huggingface_target, "Conversion", failing)
        with pytest.raises(KeyboardInterrupt):
            export(source, folder, dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["export", "run"]
    for left in (".export.made", ".export.replaced"):  # by one that was killed
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    export(source, folder, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["export", "run"]


def test_a_model_of_ones_own_is_exported_as_its_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    named = {TensorKey(WEIGHT, "layer.w"): torch.randn(5, 4), TensorKey(WEIGHT, "count"): torch.tensor(3)}
    named[TensorKey("exp_avg", "layer.w")] = torch.randn(5, 4)
    source = open_source(save(tmp_path / "run", 1, shards_of(named, LAYOUTS["rows"], 2)))
    found = load_file(export(source, tmp_path / "export") / "model.safetensors")
    assert found.keys() == {"layer.w", "count"}
    assert torch.equal(found["layer.w"], named[TensorKey(WEIGHT, "layer.w")])


def test_foreign_folders_are_refused(tmp_path: Path) -> None:
    shape = tiny("llama")
    model_of(shape).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(error: type[Exception], match: str, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(error, match=match):
            open_reader(tmp_path)

    refused(InputError, "model_type=bert", model_type="bert")
    refused(CheckpointError, r"model\.embed_tokens\.weight is float32 \(67, 32\)", vocab_size=68)
    refused(CheckpointError, r"no tensor model\.layers\.2\.", num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"llama/1[\s\S]*gpt2/1"):
        open_reader(tmp_path, namespace="gpt2/1")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has"):
        open_reader(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor[\s\S]*save_pretrained"):
        open_reader(tmp_path)
