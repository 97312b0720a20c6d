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
from toolkit.models import random_fill
from toolkit.models.initial_weights import InitialWeights
from toolkit.plan.types import RunPlan
from toolkit.progress import set_progress_listener
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
            # Six standard errors of the ratio of two estimates, which are about 1 / sqrt(n).
            tolerance = 6 / math.sqrt(ours.numel())
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


def draw_whole_modules(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights that transformers' initializers draw, run on whole modules on the CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(initial, "record_fills", lambda parameters, initialize: None)
        return whole(plan)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_equal_those_of_whole_modules(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if chunks are small, shards start in the middle of a block, and several threads draw."""
    monkeypatch.setattr(random_fill, "CHUNK", 48)
    monkeypatch.setattr(initial, "THREADED_NUMEL", 0)
    plan = tiny_plan(family, model__vocab_size=259)
    expected = draw_whole_modules(plan, monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for start, end in ((0, 1), (0.3, 0.71)):
            parts: dict[str, torch.Tensor] = {}
            shards: list[Shard] = []
            for name, weight in expected.items():
                first, last = int(start * weight.numel()), int(end * weight.numel())
                parts[name] = torch.full((last - first,), math.nan)
                shards += flat_shards(TensorKey(WEIGHT, name), tuple(weight.shape), first, parts[name])
            InitialWeights(plan).read(shards)
            for name, weight in expected.items():
                first = int(start * weight.numel())
                assert torch.equal(parts[name], weight.flatten()[first:][: parts[name].numel()]), name
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 3, 16, 33, 100])
@pytest.mark.parametrize("columns", [1, 5, 16])
def test_ranges_equal_those_of_whole_tensors(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``normal_`` treats sizes below 16, and those that are not divisible by 16, differently.

    The first distribution is overwritten, so it only takes numbers from the generator.
    """
    monkeypatch.setattr(random_fill, "CHUNK", 32)
    shape = (rows, columns)
    weight, bias = torch.empty(shape, device="meta"), torch.empty(rows, device="meta")
    expected, expected_bias = torch.empty(shape), torch.empty(rows)

    def initialize(weight: torch.Tensor, bias: torch.Tensor) -> None:
        weight.normal_(0, 1)
        bias.normal_(1, 2)
        weight.normal_(0.5, 3)

    fills = random_fill.record_fills({"weight": weight, "bias": bias}, lambda: initialize(weight, bias))
    assert fills is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        initialize(expected, expected_bias)
    for first in range(0, rows, 7):
        found, found_bias = (
            torch.full_like(expected[first:], math.nan),
            torch.full_like(expected_bias, math.nan),
        )
        shards = {
            "weight": [Shard(TensorKey(WEIGHT, "w"), shape, Box((first, 0), tuple(found.shape)), found)],
            "bias": [shard_of("b", found_bias)],
        }
        random_fill.draw(fills, shards, 11)
        assert torch.equal(found, expected[first:])
        assert torch.equal(found_bias, expected_bias)
    assert not torch.equal(torch.zeros(shape), expected), "a control"


@pytest.mark.parametrize(
    "initialize",
    [
        lambda weight: weight.normal_()[0].zero_(),
        lambda weight: weight.normal_().mul_(0.5),
        lambda weight: weight.data.normal_()[2:].fill_(1.0),
        lambda weight: weight.uniform_(),
        lambda weight: weight.normal_(torch.randn(()).item(), 1.0),
        lambda weight: weight.normal_(generator=torch.Generator()),
        lambda weight: None,
    ],
)
def test_other_initializers_are_not_drawn_in_parts(initialize: Any) -> None:
    weight = torch.empty(4, 8, device="meta")
    assert random_fill.record_fills({"weight": weight}, lambda: initialize(weight)) is None


def test_rank_draws_only_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_fill, "CHUNK", 64)
    plan = tiny_plan("mixtral")
    drawn: list[str] = []
    monkeypatch.setattr(initial, "report_progress", lambda what: drawn.append(what))
    reader = InitialWeights(plan)
    reader.read([shard_of("model.norm.weight", torch.empty(64))])
    assert not drawn, "a constant is not drawn"
    embedding = next(spec for spec in plan.parameters if spec.name == "model.embed_tokens.weight")
    first = Shard(
        TensorKey(WEIGHT, embedding.name), embedding.shape, Box((0, 0), (2, 64)), torch.empty(2, 64)
    )
    reader.read([first])
    assert drawn == ["initializing model.embed_tokens"] * 2, "two chunks have the two rows"
    assert all(parameter.is_meta for parameter in reader._skeleton.parameters())


def test_whole_modules_are_initialized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan("mixtral")
    reader = InitialWeights(plan)
    in_memory: list[int] = []
    copy = initial._copy

    def watched(*arguments: Any) -> None:
        in_memory.append(
            sum(parameter.numel() for parameter in reader._skeleton.parameters() if not parameter.is_meta)
        )
        copy(*arguments)

    monkeypatch.setattr(initial, "_copy", watched)
    monkeypatch.setattr(initial, "record_fills", lambda parameters, initialize: None)
    reader.read([shard_of(spec.name, torch.empty(spec.shape)) for spec in plan.parameters])
    experts = [spec.numel for spec in plan.parameters if spec.name.startswith("model.layers.0.mlp.experts")]
    assert max(in_memory) == sum(experts), "the experts of a layer are the largest module"
    assert all(parameter.is_meta for parameter in reader._skeleton.parameters())


def test_progress_has_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    beats: list[str] = []
    progress = initial.DrawProgress(8_000_000_000, clock=lambda: now)
    set_progress_listener(beats.append)
    try:
        with caplog.at_level("INFO", logger="toolkit"):
            progress.advance("model.embed_tokens", 1_000_000_000)
            now = 10.0
            progress.advance("model.layers.0.mlp.up_proj", 1_000_000_000)
    finally:
        set_progress_listener(None)
    assert [record.message for record in caplog.records] == [
        "initial weights: 2G numbers of 8G numbers at 200M numbers/s, 0:30 left (model.layers.0.mlp.up_proj)"
    ]
    assert beats == ["initializing model.embed_tokens", "initializing model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    "key", [TensorKey(WEIGHT, "model.norm"), TensorKey(EXP_AVG, "model.norm.weight")], ids=str
)
def test_unknown_name_is_refused(key: TensorKey) -> None:
    with pytest.raises(CheckpointError, match="nothing of that name"):
        InitialWeights(tiny_plan()).read([Shard(key, (64,), Box.whole((64,)), torch.empty(64))])


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"\[64\]"):
        InitialWeights(tiny_plan()).read([shard_of("model.norm.weight", torch.empty(32))])
