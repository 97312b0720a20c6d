"""Maps from canonical tensors to Megatron-core's: every element once, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.checkpoint.shard import flat_boxes
from toolkit.config.model import ModelConfig
from toolkit.families import FAMILIES, PUBLISHED, get_family
from toolkit.families.base import ModelShape
from toolkit.families.megatron import (
    LocalTensor,
    MegatronTensor,
    TensorCut,
    TensorPart,
    intersect_parts,
    local_tensor,
    tensors_by_name,
)
from toolkit.testing.wrong_maps import rotate_groups, swap_gate_and_up, wrong_map

Arrays = dict[str, np.ndarray]
NOTHING = -1


@st.composite
def shapes(draw: st.DrawFn, family: str) -> ModelShape:
    """Small shapes with different sizes if possible; sharded sizes are divisible by 4."""
    groups = draw(st.sampled_from([1, 2, 4]))
    heads, width = (
        groups * draw(st.sampled_from([1, 3] if groups == 4 else [4])),
        draw(st.sampled_from([2, 4])),
    )
    model = ModelConfig(
        family=family,
        hidden_size=heads * width,
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        vocab_size=draw(st.integers(5, 9)),
        max_position_embeddings=7,
        tie_word_embeddings=draw(st.booleans()),
    )
    if FAMILIES[family].traits.rotary:
        model = replace(
            model, num_key_value_heads=groups, head_dim=draw(st.sampled_from([2, 4])), intermediate_size=12
        )
    if FAMILIES[family].traits.experts:
        model = replace(model, num_local_experts=3, num_experts_per_tok=2)
    return get_family(family).resolve_shape(model)


def numbered(shape: ModelShape) -> Arrays:
    """Canonical tensors with distinct numbers."""
    found, count = {}, 0
    for spec in get_family(shape.family).parameters(shape):
        found[spec.name] = np.arange(count, count + spec.numel).reshape(spec.shape)
        count += spec.numel
    return found


def box(canonical: Mapping[str, np.ndarray], part: TensorPart) -> np.ndarray:
    return canonical[part.canonical][
        tuple(slice(o, o + e) for o, e in zip(part.offset, part.extent, strict=True))
    ]


def filled(canonical: Mapping[str, np.ndarray], local: MegatronTensor | LocalTensor) -> np.ndarray:
    """The tensor's memory, filled from canonical tensors; elements outside all parts are NOTHING."""
    data = np.full(local.shape, NOTHING)
    for part in local.parts:
        view = part.view(data)
        assert view.shape == part.extent
        assert (view == NOTHING).all(), f"two parts fill the same place: {part}"
        view[...] = box(canonical, part)
    return data


def returned(
    shape: ModelShape, memory: list[tuple[tuple[TensorPart, ...], np.ndarray]]
) -> tuple[Arrays, Arrays]:
    """Canonical tensors read from memory, and how often each element was found."""
    right = numbered(shape)
    back = {name: np.full(array.shape, NOTHING) for name, array in right.items()}
    times = {name: np.zeros(array.shape, int) for name, array in right.items()}
    for parts, data in memory:
        for part in parts:
            box(back, part)[...] = part.view(data)
            box(times, part)[...] += 1
    return back, times


def equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


each_family = pytest.mark.parametrize("family", sorted(FAMILIES))


@each_family
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_parts_cover_both_sides_exactly_once(family: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(family))
    canonical, tensors = numbered(shape), get_family(family).megatron_tensors(shape)
    memory = [(tensor.parts, filled(canonical, tensor)) for tensor in tensors]
    assert all((values != NOTHING).all() for _, values in memory)
    back, times = returned(shape, memory)
    assert equal(back, canonical)
    assert all((count == 1).all() for count in times.values())
    assert len({tensor.name for tensor in tensors}) == len(tensors)


@each_family
@settings(max_examples=20, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 2, 4]))
def test_local_tensors_match_an_independent_formula(family: str, data: st.DataObject, size: int) -> None:
    """With 4 ranks and 1 or 2 key-value heads, shards split query groups; the vocabulary is padded."""
    shape = data.draw(shapes(family))
    rows = -(-shape.vocab_size // size) * size + data.draw(st.integers(0, 1)) * size
    canonical, memory = numbered(shape), []
    for tensor in get_family(family).megatron_tensors(shape):
        whole = by_formula(shape, canonical, tensor)
        for rank in range(size):
            local = local_tensor(tensor, rank, size, rows if tensor.cut is TensorCut.vocabulary else None)
            values = filled(canonical, local)
            assert np.array_equal(values, cut_by_formula(whole, tensor.cut, rank, size, rows)), (
                tensor.name,
                rank,
            )
            memory.append((tensor.cut, local.parts, values))
    back, _ = returned(shape, [(parts, values) for _, parts, values in memory])
    assert equal(back, canonical)
    for cut in TensorCut:
        _, times = returned(shape, [(parts, values) for found, parts, values in memory if found is cut])
        found = {int(count) for array in times.values() for count in np.unique(array)} - {0}
        assert found <= {size if cut is TensorCut.whole else 1}, cut


def cut_by_formula(whole: np.ndarray, cut: TensorCut, rank: int, size: int, rows: int) -> np.ndarray:
    """Shard as tensor_parallel/layers.py and mlp.py of Megatron-core do."""
    if cut is TensorCut.whole:
        return whole
    if cut is TensorCut.gated:
        return np.concatenate([np.split(half, size)[rank] for half in np.split(whole, 2)])
    if cut is TensorCut.vocabulary:
        whole = np.concatenate([whole, np.full((rows - len(whole), whole.shape[1]), NOTHING)])
    return np.split(whole, size, axis=1 if cut is TensorCut.columns else 0)[rank]


def by_formula(shape: ModelShape, canonical: Arrays, tensor: MegatronTensor) -> np.ndarray:
    """The whole tensor by reshaping and concatenating, without ``parts``; only names are used."""
    ours = canonical.__getitem__
    if shape.family == "gpt2":
        return gpt2_by_formula(shape, ours, tensor)
    block, rest = f"model.layers.{tensor.layer}.", tensor.name.partition(f"layers.{tensor.layer}.")[2]
    kind = tensor.name.rpartition(".")[2]
    if "linear_qkv" in rest:
        return packed(
            *(ours(f"{block}self_attn.{letter}_proj.{kind}") for letter in "qkv"),
            groups=shape.num_key_value_heads,
        )
    if tensor.expert is not None:
        return ours(f"{block}mlp.experts.{'gate_up' if 'fc1' in rest else 'down'}_proj")[tensor.expert]
    if "linear_fc1" in rest:
        return np.concatenate([ours(f"{block}mlp.gate_proj.weight"), ours(f"{block}mlp.up_proj.weight")])
    return ours(
        {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
        }.get(tensor.name)
        or block
        + {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "mlp.router.weight": "mlp.gate.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        }[rest]
    )


def gpt2_by_formula(
    shape: ModelShape, ours: Callable[[str], np.ndarray], tensor: MegatronTensor
) -> np.ndarray:
    block, rest = f"transformer.h.{tensor.layer}.", tensor.name.partition(f"layers.{tensor.layer}.")[2]
    kind = tensor.name.rpartition(".")[2]
    outside = {
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "output_layer.weight": "lm_head.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        f"decoder.final_layernorm.{kind}": f"transformer.ln_f.{kind}",
    }
    if tensor.layer is None:
        return ours(outside[tensor.name])
    if "linear_qkv" in rest:
        return packed(*np.split(ours(f"{block}attn.c_attn.{kind}").T, 3), groups=shape.num_attention_heads)
    within = {
        "input_layernorm": "ln_1",
        "pre_mlp_layernorm": "ln_2",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    return ours(f"{block}{within[rest.rpartition('.')[0]]}.{kind}").T


def packed(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, groups: int) -> np.ndarray:
    """Rows of the three projections by query groups."""
    return np.concatenate(
        [one.reshape(groups, -1, *query.shape[1:]) for one in (query, key, value)], axis=1
    ).reshape(-1, *query.shape[1:])


@each_family
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_flat_ranges_map_to_canonical_boxes(family: str, data: st.DataObject) -> None:
    """The optimizer state of data ranks: ranges of the flattened tensor with any start."""
    shape = data.draw(shapes(family))
    canonical = numbered(shape)
    rows = -(-shape.vocab_size // 2) * 2
    for tensor in get_family(family).megatron_tensors(shape):
        local = local_tensor(tensor, 1, 2, rows if tensor.cut is TensorCut.vocabulary else None)
        flat, count = filled(canonical, local).reshape(-1), 0
        at = data.draw(st.integers(0, flat.size))
        for start, stop in ((0, at), (at, flat.size)):
            for piece in flat_boxes(local.shape, start, stop):
                memory = flat[start : start + piece.numel].reshape(piece.shape)
                start += piece.numel
                for part in intersect_parts(local.parts, piece.offset, piece.shape):
                    assert np.array_equal(part.view(memory), box(canonical, part))
                    count += math.prod(part.extent)
        assert count == (flat != NOTHING).sum()


def small(family: str, **changes: object) -> ModelShape:
    model = ModelConfig(
        family=family,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=6,
        max_position_embeddings=4,
    )
    if family != "gpt2":
        model = replace(model, **{"intermediate_size": 12, **FAMILIES[family].tiny})
    return get_family(family).resolve_shape(replace(model, **changes))


def test_tied_output_layer_maps_to_the_embedding() -> None:
    """A separate last pipeline stage has a copy, which is saved and loaded as the embedding."""
    for family in FAMILIES:
        tied, own = (
            tensors_by_name(get_family(family).megatron_tensors(small(family, tie_word_embeddings=tie)))
            for tie in (True, False)
        )
        assert tied["output_layer.weight"] is tied["embedding.word_embeddings.weight"]
        assert own["output_layer.weight"].parts[0].canonical == "lm_head.weight"


def test_rank_may_store_only_padding() -> None:
    tensor = tensors_by_name(get_family("llama").megatron_tensors(small("llama")))[
        "embedding.word_embeddings.weight"
    ]  # 6 rows
    assert [local_tensor(tensor, rank, 4, 12).parts != () for rank in range(4)] == [True, True, False, False]
    assert local_tensor(tensor, 3, 4, 12).shape == (3, 8)


@each_family
def test_wrong_maps_permute_elements(family: str) -> None:
    """Only the numbers of a run can show them: names, shapes and coverage are right."""
    shape = small(family)
    right = get_family(family).megatron_tensors(shape)
    canonical = numbered(shape)
    for change, moved in ((rotate_groups, ".linear_qkv."), (swap_gate_and_up, ".linear_fc1.")):
        if change is swap_gate_and_up and not FAMILIES[family].traits.gated:
            assert change(right) == right
            continue
        with wrong_map(family, change):
            wrong = get_family(family).megatron_tensors(shape)
        for one, other in zip(right, wrong, strict=True):
            assert (one.name, one.shape, one.cut) == (other.name, other.shape, other.cut)
            same, found = filled(canonical, one), filled(canonical, other)
            assert np.array_equal(same, found) == (moved not in one.name), one.name
            assert np.array_equal(np.sort(same, axis=None), np.sort(found, axis=None))
    assert get_family(family).megatron_tensors(shape) == right


def test_tables_of_published_models_cover_every_element() -> None:
    """By count only: their tensors are too large to fill here."""
    for name, model in PUBLISHED.items():
        assert model.family is not None
        shape = get_family(model.family).resolve_shape(model)
        tensors = get_family(model.family).megatron_tensors(shape)
        elements = sum(spec.numel for spec in get_family(model.family).parameters(shape))
        assert sum(math.prod(part.extent) for tensor in tensors for part in tensor.parts) == elements, name
        assert sum(math.prod(tensor.shape) for tensor in tensors) == elements, name
