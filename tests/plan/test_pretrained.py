"""Sizes from a pretrained model's folder.

pytest tests/plan/test_pretrained.py
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plan.cases import CPU, SMALL, h100s, run_config
from toolkit.config.model import ModelConfig
from toolkit.config.schema import EngineName
from toolkit.data.checks import check_vocabulary
from toolkit.errors import InputError, PlanError, UserError
from toolkit.families import get_family
from toolkit.plan import make_plan
from toolkit.plan.pretrained import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family = get_family("llama")
    config = family.hugging_face_config(family.resolve_shape(replace(SMALL, rope_theta=77.0)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_null_sizes_are_filled(folder: Path) -> None:
    config = resolve(run_config(model=ModelConfig(pretrained=str(folder), dropout=0.1)))
    assert config.model.family == "llama"
    assert config.model.rope_theta == 77.0
    assert config.model.dropout == 0.1
    assert config.model.pretrained == str(folder)
    plan = make_plan(config, CPU)
    assert plan.shape is not None
    assert plan.shape.num_key_value_heads == 2
    assert resolve(config) == config


def test_different_sizes_are_refused_together(folder: Path) -> None:
    model = ModelConfig(pretrained=str(folder), hidden_size=64, vocab_size=512, num_hidden_layers=3)
    with pytest.raises(PlanError) as caught:
        resolve(run_config(model=model))
    assert [problem.key for problem in caught.value.problems] == [
        "model.hidden_size",
        "model.num_hidden_layers",
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "no config.json"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"model_type": "bert"}', "'bert'"),
        ("{}", "None"),
    ],
)
def test_folders_without_a_model_are_refused(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=word) as caught:
        resolve(run_config(model=ModelConfig(pretrained=str(tmp_path))))
    assert caught.value.problems[0].key == "model.pretrained"


def test_missing_paths_are_not_searched_on_the_hub() -> None:
    with pytest.raises(InputError, match="no such folder"):
        resolve(run_config(model=ModelConfig(pretrained="./not/here")))


def test_a_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    requests = []

    def download(name: str, file: str) -> str:
        requests.append((name, file))
        return str(folder / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve(run_config(model=ModelConfig(pretrained="someone/model"))).model.hidden_size == 32
    assert requests == [("someone/model", "config.json")]


def test_hub_failures_are_input_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, file: str) -> Any:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(UserError, match="no route to host"):
        resolve(run_config(model=ModelConfig(pretrained="someone/model")))


MIXTRAL = replace(SMALL, family="mixtral", num_local_experts=4, num_experts_per_tok=2)
ODD_EXPERTS = replace(MIXTRAL, head_dim=8, intermediate_size=46)
MEGATRON = {"engine__name": EngineName.megatron}
# model, changes, ranks: each is refused, and for a random model most remedies suggest other sizes.
MISFITS: list[tuple[ModelConfig, dict[str, Any], int]] = [
    (SMALL, {"parallel__tensor": 3}, 3),
    (SMALL, {"parallel__pipeline": 3}, 3),
    (MIXTRAL, {"parallel__expert": 3}, 3),
    (SMALL, {"parallel__expert": 2}, 2),
    (ODD_EXPERTS, {}, 2),
    (SMALL, {"train__sequence_length": 128}, 2),
    (SMALL, {"data__vocab_size": 600}, 2),
    (
        SMALL,
        {
            **MEGATRON,
            "parallel__pipeline": 2,
            "engine__megatron": {"virtual_pipeline_model_parallel_size": 2},
        },
        2,
    ),
    (replace(SMALL, head_dim=7), {}, 2),
]


@pytest.mark.parametrize(("model", "changes", "ranks"), MISFITS)
def test_remedies_for_a_pretrained_model_suggest_no_other_sizes(
    model: ModelConfig, changes: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    family = get_family(str(model.family))
    config = family.hugging_face_config(family.resolve_shape(replace(model, head_dim=8)))
    config |= {"head_dim": model.head_dim} if model.head_dim else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = {"train__global_batch": 24, **changes}
    world = h100s(ranks)
    with pytest.raises(PlanError) as caught:
        make_plan(resolve(run_config(model=ModelConfig(pretrained=str(tmp_path)), **batch)), world)
    remedies = [problem.remedy for problem in caught.value.problems]
    assert all(remedies)
    assert not [remedy for remedy in remedies if re.search(r"model\.(?!target|pretrained)\w+=|heads", remedy)]
    with pytest.raises(PlanError) as own:
        make_plan(run_config(model=model, **batch), world)
    assert any(
        re.search(r"model(\.(?!target|pretrained)\w+)?=", problem.remedy) for problem in own.value.problems
    ), "control: other models get such remedies"


def test_remedy_for_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    manifest: Any = SimpleNamespace(tokenizer=SimpleNamespace(size=600))
    config = run_config(data__name="prepared")
    found = check_vocabulary(config, manifest, "data/mine", 512)
    assert found is not None
    assert found.remedy == "write model.vocab_size=600 or more"
    config.model.pretrained = "org/model"
    found = check_vocabulary(config, manifest, "data/mine", 512)
    assert found is not None
    assert found.remedy == "prepare the data with the tokenizer of org/model"


def test_resolve_without_pretrained_returns_the_same_object() -> None:
    config = run_config()
    assert resolve(config) is config
