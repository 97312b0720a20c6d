"""Canonical names and shapes equal the ``state_dict`` of the pinned transformers, and ``config.json``
round-trips.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import asdict, replace

import pytest

from toolkit.families import FAMILIES, get_family
from toolkit.families.base import ModelShape

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 24,
    "head_dim": None,
    "rope_theta": 1234.0,
    "norm_eps": 3e-5,
    "initializer_range": 0.03,
    "dropout": 0.25,
}


def small(family: str, tie: bool) -> ModelShape:
    model = replace(next(iter(get_family(family).published.values())), **SMALL, tie_word_embeddings=tie)
    if family == "gpt2":
        model = replace(model, rope_theta=None)
    else:
        model = replace(
            model,
            intermediate_size=24,
            num_key_value_heads=2,
            head_dim=get_family(family).tiny.get("head_dim"),
        )
    if get_family(family).traits.experts:
        model = replace(model, num_local_experts=3, num_experts_per_tok=2, router_aux_loss_coef=0.02)
    return get_family(family).resolve_shape(model)


def built(shape: ModelShape) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(**get_family(shape.family).hugging_face_config(shape))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_names_shapes_and_aliases_match_transformers(family: str, tie: bool) -> None:
    shape = small(family, tie)
    model = built(shape)
    assert type(model).__name__ == get_family(family).hugging_face_config(shape)["architectures"][0]
    ours = {spec.name: spec.shape for spec in get_family(family).parameters(shape)}
    aliases = get_family(family).tied_weights(shape)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert list(ours) == [name for name in theirs if name not in aliases]
    assert ours == {name: size for name, size in theirs.items() if name not in aliases}
    assert {name for name, _ in model.named_parameters()} == set(ours)
    for alias, name in aliases.items():
        assert theirs[alias] == ours[name]
        assert model.get_parameter(alias) is model.get_parameter(name)
    assert bool(aliases) is tie


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_config_json_round_trip(family: str, tie: bool) -> None:
    shape = small(family, tie)
    ours = get_family(family).hugging_face_config(shape)
    written = json.loads(json.dumps(ours))
    theirs = transformers.AutoConfig.for_model(**ours).to_dict()
    for config in (written, theirs):  # our file, and the file that transformers writes for it
        assert asdict(
            get_family(family).resolve_shape(get_family(family).from_hugging_face_config(config))
        ) == asdict(shape)


@pytest.mark.parametrize("family", ["mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_head_dim_may_differ_from_hidden_size_over_heads(family: str) -> None:
    """Control: transformers' Llama does not support it, so it is refused."""
    sizes = {"hidden_size": 18, "num_attention_heads": 4, "head_dim": 6}
    shape = get_family(family).resolve_shape(
        replace(
            next(iter(get_family(family).published.values())), **{**SMALL, **sizes}, num_key_value_heads=2
        )
    )
    assert {spec.name: spec.shape for spec in get_family(family).parameters(shape)} == {
        name: tuple(parameter.shape) for name, parameter in built(shape).named_parameters()
    }
    with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
        transformers.AutoConfig.for_model("llama", **sizes)


def test_gpt2_reads_configs_of_old_releases() -> None:
    """They have ``n_inner`` null and lack tie and initializer keys."""
    config = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 8,
        "vocab_size": 10,
        "n_inner": None,
    }
    shape = get_family("gpt2").resolve_shape(get_family("gpt2").from_hugging_face_config(config))
    assert (shape.intermediate_size, shape.tie_word_embeddings, shape.dropout) == (64, True, 0.1)


def test_qwen3_default_head_dim_matches_transformers() -> None:
    config = get_family("qwen3").hugging_face_config(small("qwen3", False))
    del config["head_dim"]
    assert (
        get_family("qwen3").resolve_shape(get_family("qwen3").from_hugging_face_config(config)).head_dim
        == 128
    )
    assert transformers.AutoConfig.for_model(**config).head_dim == 128


def test_mixtral_hub_names_match_transformers_conversion() -> None:
    """Each hub tensor matches a source of transformers' conversion, and maps to its target."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    shape = small("mixtral", False)
    expected = {"w1.weight": "gate_up_proj", "w3.weight": "gate_up_proj", "w2.weight": "down_proj"}
    converters = [
        entry for entry in get_checkpoint_conversion_mapping("mixtral") if hasattr(entry, "operations")
    ]
    patterns = [
        (pattern, target)
        for entry in converters
        for pattern in entry.source_patterns
        for target in entry.target_patterns
    ]
    for tensor in get_family("mixtral").hub_tensors(shape):
        if ".experts." not in tensor.name:
            continue
        matching = {target for pattern, target in patterns if fnmatch.fnmatch(tensor.name, f"*{pattern}")}
        assert len(matching) == 1, (tensor.name, patterns)
        suffix = ".".join(tensor.name.split(".")[-2:])
        assert tensor.canonical.endswith(expected[suffix])
        assert tensor.canonical.endswith(matching.pop().split(".")[-1])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_folder_saved_by_transformers_has_our_hub_names(family: str, tmp_path: object) -> None:
    """Compares the values of a saved model, box by box."""
    from pathlib import Path

    from safetensors.torch import load_file

    shape = small(family, False)
    config = transformers.AutoConfig.for_model(**get_family(family).hugging_face_config(shape))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(Path(str(tmp_path)) / "model.safetensors")
    hub = get_family(family).hub_tensors(shape)
    assert {tensor.name for tensor in hub} == set(saved)
    state = model.state_dict()
    for tensor in hub:
        box = state[tensor.canonical][
            tuple(slice(o, o + e) for o, e in zip(tensor.offset, tensor.extent, strict=True))
        ]
        assert torch.equal(box.reshape(tensor.shape), saved[tensor.name])
