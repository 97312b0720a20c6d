"""Sizes of a model in an untrusted file."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch import plan
from tests.checkpoint.tiny_run import tiny_checkpoint, tiny_shape
from toolkit import families
from toolkit.checkpoint import manifest
from toolkit.checkpoint.source import open_source
from toolkit.config.model import ModelConfig
from toolkit.errors import ConfigError, ExitCode, InputError
from toolkit.families.model_files import parse_model_config, parse_model_shape

WRONG: dict[str, Any] = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "a float": {"num_hidden_layers": 1e9},
    "a small float": {"num_hidden_layers": 2.5},
    "negative": {"num_hidden_layers": -1},
    "text": {"hidden_size": "64"},
    "a list": {"vocab_size": [1]},
    "true": {"num_attention_heads": True},
    "no heads": {"num_attention_heads": 0},
    "many heads": {"num_attention_heads": 2**40},
    "a wide model": {"hidden_size": 10**12},
    "a large vocabulary": {"vocab_size": 10**15},
    "infinity": {"num_hidden_layers": float("inf")},
    "not a number": {"num_hidden_layers": float("nan")},
    "many positions": {"max_position_embeddings": 10**18},
}


def config_of(name: str) -> dict[str, Any]:
    return families.get_family(name).hugging_face_config(tiny_shape(name))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_own_configuration_is_parsed(name: str) -> None:
    family = families.get_family(name)
    assert family.resolve_shape(parse_model_config(family, config_of(name), "config.json")) == tiny_shape(
        name
    )
    assert parse_model_shape(
        {**asdict(tiny_shape(name)), "of_a_later_version": 3}, "plan.json"
    ) == tiny_shape(name)


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_size_is_refused(kind: str) -> None:
    began = time.monotonic()
    with pytest.raises(InputError, match=r"config\.json"):
        parse_model_config(families.get_family("llama"), {**config_of("llama"), **WRONG[kind]}, "config.json")
    with pytest.raises(InputError, match=r"plan\.json"):
        parse_model_shape({**asdict(tiny_shape()), **WRONG[kind]}, "plan.json")
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_missing_size_is_refused(missing: str) -> None:
    config, shape = config_of("llama"), asdict(tiny_shape())
    del config[missing], shape[missing]
    with pytest.raises(InputError, match=missing):
        parse_model_config(families.get_family("llama"), config, "config.json")
    with pytest.raises(InputError, match=missing):
        parse_model_shape(shape, "plan.json")


def test_null_size_in_a_recorded_shape_is_refused() -> None:
    with pytest.raises(InputError, match="hidden_size is missing"):
        parse_model_shape({**asdict(tiny_shape()), "hidden_size": None}, "plan.json")


def test_excessive_expert_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 262144 experts"):
        ModelConfig(family="mixtral", num_hidden_layers=4096, num_local_experts=4096)


@pytest.mark.parametrize("kind", ["a billion layers", "a float", "text", "nested"])
def test_hostile_pretrained_folder_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "[" * 200_000 if kind == "nested" else json.dumps({**config_of("llama"), **WRONG[kind]})
    (tmp_path / "config.json").write_text(config)
    began = time.monotonic()
    assert plan.main(["model=pretrained", f"model.pretrained={tmp_path}"]) == ExitCode.USER
    assert "config.json" in capsys.readouterr().err
    assert time.monotonic() - began < 10


def test_checkpoint_with_a_billion_layers_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    content = json.loads((folder / manifest.NAME).read_text())
    content["scalars"]["model"]["num_hidden_layers"] = 10**9
    content.pop("content_hash")
    content["content_hash"] = manifest._content_hash(content)
    (folder / manifest.NAME).write_text(json.dumps(content))
    with pytest.raises(InputError, match="num_hidden_layers=1000000000"):
        open_source(folder)
