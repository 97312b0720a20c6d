"""Initial weights depend on seed and name only, and are distributed as transformers' own."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.checkpoint.shard import EXP_AVG, WEIGHT, Box, Shard, TensorKey, flat_shards
from toolkit.errors import CheckpointError
from toolkit.families import get_family
from toolkit.models import initial_weights as initial
from toolkit.models.initial_weights import InitialWeights
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import run_ranks
from toolkit.testing.tiny import FAMILIES, tiny_plan


def whole(plan: RunPlan, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    reader = InitialWeights(plan)
    weights = {
        key.name: torch.full(info.shape, math.nan, dtype=dtype) for key, info in reader.tensors.items()
    }
    reader.read([shard_of(name, value) for name, value in weights.items()])
    return weights


def shard_of(name: str, value: torch.Tensor) -> Shard:
    return Shard(TensorKey(WEIGHT, name), tuple(value.shape), Box.whole(value.shape), value)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_equal_in_any_layout(family: str) -> None:
    """Flat ranges as in ZeRO, read separately and in another order."""
    plan = tiny_plan(family)
    expected = whole(plan)
    ranks = 3
    for rank in reversed(range(ranks)):
        reader = InitialWeights(plan)
        for name, weight in reversed(expected.items()):
            length = -(-weight.numel() // ranks)
            mine = weight.flatten()[rank * length : (rank + 1) * length]
            found = torch.full_like(mine, math.nan)
            reader.read(
                flat_shards(TensorKey(WEIGHT, name), tuple(weight.shape), rank * length, found)
                if len(mine)
                else []
            )
            assert torch.equal(found, mine), name


def digest(family: str) -> str:
    found = hashlib.sha256()
    for name, weight in sorted(whole(tiny_plan(family)).items()):
        found.update(name.encode() + weight.numpy().tobytes())
    return found.hexdigest()


def digest_elsewhere(rank: int, ranks: int, family: str) -> str:
    torch.set_num_threads(2)
    torch.manual_seed(5)
    return digest(family)


def test_weights_are_equal_in_another_process() -> None:
    assert run_ranks(digest_elsewhere, 1, "gpt2") == [digest("gpt2")]


def test_weights_depend_on_seed_and_name() -> None:
    plan, other = tiny_plan(), tiny_plan(train__seed=4)
    ours, theirs = whole(plan), whole(other)
    assert all(torch.equal(ours[name], again) for name, again in whole(plan).items())
    matrices = [name for name, weight in ours.items() if weight.dim() > 1]
    assert all(not torch.equal(ours[name], theirs[name]) for name in matrices)
    assert len({ours[name].flatten()[:8].sum().item() for name in matrices}) == len(matrices), (
        "no two matrices share their numbers"
    )


def test_deeper_model_has_the_same_first_layers() -> None:
    shallow, deep = whole(tiny_plan()), whole(tiny_plan(model__num_hidden_layers=3))
    assert all(torch.equal(weight, deep[name]) for name, weight in shallow.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_distribution_matches_transformers(family: str) -> None:
    plan = tiny_plan(family, model__initializer_range=0.03)
    assert plan.shape is not None
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**get_family(family).hugging_face_config(plan.shape))
    )
    weights = whole(plan)
    for name, expected in theirs.state_dict().items():
        if name not in weights:
            continue  # tied
        ours = weights[name]
        if expected.std() == 0:
            assert torch.equal(ours, expected), name
        else:
            tolerance = 6 / math.sqrt(
                ours.numel()
            )  # standard errors of the ratio of two estimates: about 1 / sqrt(n)
            assert float(ours.std() / expected.std()) == pytest.approx(1, abs=tolerance), name
            assert abs(float(ours.mean())) < tolerance * 0.03, name


def test_gpt2_scales_residual_projections() -> None:
    weights = whole(tiny_plan("gpt2", model__num_hidden_layers=8))
    for name, std in (
        ("attn.c_proj", 0.02 / 4),
        ("mlp.c_proj", 0.02 / 4),
        ("attn.c_attn", 0.02),
        ("mlp.c_fc", 0.02),
    ):
        assert float(weights[f"transformer.h.3.{name}.weight"].std()) == pytest.approx(std, rel=0.06), name


def test_weights_are_cast_to_the_target_dtype() -> None:
    plan = tiny_plan()
    expected = whole(plan)
    assert all(
        torch.equal(weight, expected[name].bfloat16()) for name, weight in whole(plan, torch.bfloat16).items()
    )


def test_random_state_outside_is_unchanged() -> None:
    state = torch.get_rng_state()
    whole(tiny_plan("gpt2"))
    assert torch.equal(torch.get_rng_state(), state)


def test_one_module_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan("mixtral")
    reader = InitialWeights(plan)
    held: list[int] = []
    copy = initial._copy

    def watched(*arguments: Any) -> None:
        held.append(
            sum(parameter.numel() for parameter in reader._skeleton.parameters() if not parameter.is_meta)
        )
        copy(*arguments)

    monkeypatch.setattr(initial, "_copy", watched)
    reader.read([shard_of(spec.name, torch.empty(spec.shape)) for spec in plan.parameters])
    experts = [spec.numel for spec in plan.parameters if spec.name.startswith("model.layers.0.mlp.experts")]
    assert max(held) == sum(experts), "the experts of a layer are the largest module"
    assert all(parameter.is_meta for parameter in reader._skeleton.parameters())
    del held[:]
    reader.read([shard_of("model.norm.weight", torch.empty(64))])
    assert held == [64], "unrequested modules are not initialized"


@pytest.mark.parametrize(
    "key", [TensorKey(WEIGHT, "model.norm"), TensorKey(EXP_AVG, "model.norm.weight")], ids=str
)
def test_unknown_name_is_refused(key: TensorKey) -> None:
    with pytest.raises(CheckpointError, match="nothing of that name"):
        InitialWeights(tiny_plan()).read([Shard(key, (64,), Box.whole((64,)), torch.empty(64))])


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"\[64\]"):
        InitialWeights(tiny_plan()).read([shard_of("model.norm.weight", torch.empty(32))])
