"""Families: sizes, parameter counts, FLOPs, errors. No torch."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.config.model import ModelConfig
from toolkit.errors import InputError, PlanError
from toolkit.families import FAMILIES, PUBLISHED, get_family
from toolkit.families.base import ModelShape


def shape_of(name: str) -> ModelShape:
    model = PUBLISHED[name]
    assert model.family is not None
    return get_family(model.family).resolve_shape(model)


def count(shape: ModelShape) -> int:
    return sum(spec.numel for spec in get_family(shape.family).parameters(shape))


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [
        ("gpt2", 0.1244, 4),
        ("llama-2-7b", 6.74, 2),
        ("llama-3-8b", 8.03, 2),
        ("llama-3.1-405b", 405.85, 2),
        ("qwen2-7b", 7.62, 2),
        ("mixtral-8x7b", 46.7, 1),
        ("qwen3-0.6b", 0.596, 3),
        ("qwen3-8b", 8.19, 2),
        ("qwen3-30b-a3b", 30.5, 1),
    ],
)
def test_parameter_counts_match_published_sizes(name: str, billions: float, digits: int) -> None:
    assert round(count(shape_of(name)) / 1e9, digits) == billions


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.44), ("qwen3-8b", 6.95)])
def test_qwen3_non_embedding_count_matches_published_size(name: str, billions: float) -> None:
    shape = shape_of(name)
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    assert round((count(shape) - tables) / 1e9, 2) == billions


def test_gpt2_flops_match_the_megatron_lm_formula() -> None:
    shape = shape_of("gpt2")
    layers, hidden, sequence, vocab = shape.num_hidden_layers, shape.hidden_size, 1024, shape.vocab_size
    expected = 24 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    assert get_family("gpt2").forward_flops(shape, sequence).total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2-7b", "qwen3-8b"])
def test_dense_decoder_flops_are_two_per_weight_plus_attention(name: str) -> None:
    shape = shape_of(name)
    matrices = sum(
        spec.numel
        for spec in get_family(shape.family).parameters(shape)
        if spec.decays and "embed" not in spec.name
    )
    attention = 4 * 2048 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers
    assert get_family(shape.family).forward_flops(shape, 2048).total == 2 * matrices + attention


def test_flops_count_only_visited_experts() -> None:
    shape = shape_of("mixtral-8x7b")
    active = get_family("mixtral").forward_flops(shape, 1).total / 2
    assert active / 1e9 == pytest.approx(
        12.9 - 32000 * 4096 / 1e9, rel=0.01
    )  # 12.9 B active parameters, including the embedding, which is a lookup
    other = shape_of("qwen3-30b-a3b")
    assert get_family("qwen3_moe").forward_flops(other, 1).total / 2e9 == pytest.approx(
        3.35 - 151936 * 2048 / 1e9, rel=0.01
    )
    more = get_family("mixtral").forward_flops(replace(shape, num_experts_per_tok=4), 1).total / 2
    assert more - active == 2 * 3 * shape.hidden_size * shape.intermediate_size * shape.num_hidden_layers


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_hub_tensors_cover_each_parameter_exactly_once(name: str) -> None:
    shape = replace(shape_of(name), num_hidden_layers=2)
    family = get_family(shape.family)
    specs = {spec.name: spec for spec in family.parameters(shape)}
    boxes = defaultdict(list)
    for tensor in family.hub_tensors(shape):
        spec = specs[tensor.canonical]
        inside = all(o + e <= s for o, e, s in zip(tensor.offset, tensor.extent, spec.shape, strict=True))
        assert inside, tensor
        assert [e for e in tensor.extent if e != 1 or len(tensor.extent) == len(tensor.shape)] == list(
            tensor.shape
        ), tensor
        boxes[tensor.canonical].append((tensor.offset, tensor.extent))
    for spec in specs.values():
        assert len(set(boxes[spec.name])) == len(boxes[spec.name])
        assert sum(_volume(extent) for _, extent in boxes[spec.name]) == spec.numel
    names = [tensor.name for tensor in family.hub_tensors(shape)]
    assert len(set(names)) == len(names)


def _volume(extent: tuple[int, ...]) -> int:
    total = 1
    for size in extent:
        total *= size
    return total


def test_vectors_do_not_decay() -> None:
    specs = {spec.name: spec for spec in get_family("qwen2").parameters(shape_of("qwen2-7b"))}
    assert specs["model.layers.0.self_attn.q_proj.weight"].decays
    assert not specs["model.layers.0.self_attn.q_proj.bias"].decays
    assert not specs["model.norm.weight"].decays
    assert specs["model.layers.27.mlp.up_proj.weight"].layer == 27


SMALL = ModelConfig(
    family="llama",
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    vocab_size=32,
    max_position_embeddings=8,
)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 3}, "model.num_attention_heads"),
        ({"num_key_value_heads": 3}, "model.num_key_value_heads"),
        ({"num_attention_heads": 16}, "model.head_dim"),
        (
            {"num_attention_heads": 3, "head_dim": 8},
            "model.num_attention_heads",
        ),  # of llama, because of transformers
        ({"family": "qwen2", "num_attention_heads": 3, "head_dim": 7}, "model.head_dim"),
        ({"family": "gpt2", "num_key_value_heads": 2}, "model.num_key_value_heads"),
        ({"family": "gpt2", "head_dim": 8}, "model.head_dim"),
        (
            {"family": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "model.num_experts_per_tok",
        ),
    ],
)
def test_invalid_sizes_report_key_and_remedy(change: dict[str, object], key: str) -> None:
    model = replace(SMALL, **change)
    with pytest.raises(PlanError) as caught:
        get_family(model.family or "").resolve_shape(model)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert caught.value.problems[0].remedy


def test_all_missing_sizes_are_reported_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        get_family("mixtral").resolve_shape(ModelConfig(family="mixtral", hidden_size=16))
    assert {problem.key.removeprefix("model.") for problem in caught.value.problems} == {
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "intermediate_size",
        "num_local_experts",
        "num_experts_per_tok",
    }


def test_unknown_family_lists_known_families() -> None:
    with pytest.raises(PlanError, match=", ".join(FAMILIES)):
        get_family("bert")


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}),
        ("llama", {"attention_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen2", {"use_sliding_window": True}),
        ("mixtral", {"sliding_window": 4096}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_unsupported_variant_is_refused(family: str, change: dict[str, object]) -> None:
    shape = shape_of(next(iter(FAMILIES[family].published)))
    config = FAMILIES[family].hugging_face_config(shape)
    FAMILIES[family].from_hugging_face_config(config)
    with pytest.raises(InputError) as caught:
        FAMILIES[family].from_hugging_face_config(config | change)
    assert next(iter(change)).split("_")[0] in caught.value.problems[0].key


def test_family_is_one_file_and_its_registration() -> None:
    """In toolkit/ only these files mention it, and the parity matrix, which selects cells by name."""
    toolkit = Path(__file__).resolve().parents[2] / "toolkit"
    knowing = {
        path.relative_to(toolkit).as_posix() for path in toolkit.rglob("*.py") if mentions_family(path)
    }
    assert knowing - {"testing/matrix.py"} == {"families/qwen3_moe.py", "families/__init__.py"}
    registration = [
        line
        for line in (toolkit / "families/__init__.py").read_text(encoding="utf-8").splitlines()
        if "QWEN3_MOE" in line
    ]
    assert (
        len((toolkit / "families/qwen3_moe.py").read_text(encoding="utf-8").splitlines()) + len(registration)
        <= 150
    )


def mentions_family(path: Path) -> bool:
    """Whether code mentions it; comments and docstrings do not count."""
    text = path.read_text(encoding="utf-8")
    if "qwen3_moe" not in text.lower():
        return False
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return "qwen3_moe" in ast.unparse(tree).lower()
