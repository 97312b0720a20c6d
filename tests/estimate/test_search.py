"""The search of layouts: it agrees with trying all of them, and keeps what the user typed.

pytest tests/estimate/test_search.py
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

import pytest

from tests.plan.cases import h100s, run_config
from toolkit.config.identity import identity
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.estimate import search
from toolkit.estimate.goal import Goal
from toolkit.estimate.layouts import Layout, SearchSpace, layout_of
from toolkit.estimate.profile import HardwareProfile, load_profile
from toolkit.estimate.search import Evaluator, find_best
from toolkit.estimate.types import StepEstimate
from toolkit.families import get_family, resolve_shape_of
from toolkit.plan.types import RunPlan

LARGE = {
    "model__hidden_size": 2048,
    "model__intermediate_size": 4096,
    "model__num_hidden_layers": 8,
    "model__num_attention_heads": 16,
    "model__num_key_value_heads": 8,
    "model__vocab_size": 8000,
    "model__max_position_embeddings": 8192,
    "data__vocab_size": 8000,
    "train__sequence_length": 1024,
    "precision__name": Precision.bf16,
}


def space_of(ranks: int, memory_gb: float, per_node: int = 4, **changes: object) -> SearchSpace:
    """A run of a small model on GPUs with so little memory that it matters."""
    config = run_config(**{**LARGE, **changes})
    world = replace(h100s(ranks, per_node), device_memory_bytes=int(memory_gb * 1e9))
    shape = resolve_shape_of(get_family(config.model.family or ""), config.model)
    return SearchSpace(config=config, world=world, shape=shape)


MIXTRAL = {"model__family": "mixtral", "model__num_local_experts": 4, "model__num_experts_per_tok": 2}
CASES: tuple[dict[str, object], ...] = (
    {"ranks": 1, "memory_gb": 80.0},
    {"ranks": 2, "memory_gb": 80.0},
    {"ranks": 4, "memory_gb": 80.0},
    {"ranks": 8, "memory_gb": 80.0},
    {"ranks": 2, "memory_gb": 6.0},
    {"ranks": 4, "memory_gb": 5.0},
    {"ranks": 8, "memory_gb": 4.0},
    {"ranks": 4, "memory_gb": 6.0, "train__sequence_length": 4096},
    {"ranks": 4, "memory_gb": 9.0, "train__sequence_length": 4096},
    {"ranks": 8, "memory_gb": 5.0, "train__sequence_length": 4096},
    {"ranks": 4, "memory_gb": 80.0, "train__global_batch": 32},
    {"ranks": 8, "memory_gb": 5.0, "train__global_batch": 32},
    {"ranks": 4, "memory_gb": 6.0, "precision__name": Precision.fp32},
    {"ranks": 4, "memory_gb": 5.0, "model__num_hidden_layers": 12},
    {"ranks": 6, "memory_gb": 5.0, "per_node": 6, "train__global_batch": 24},
    {"ranks": 4, "memory_gb": 5.0, "model__vocab_size": 32000, "data__vocab_size": 32000},
    {"ranks": 4, "memory_gb": 8.0, "model__vocab_size": 32000, "data__vocab_size": 32000},
    {"ranks": 4, "memory_gb": 5.0, "model__family": "qwen3"},
    {"ranks": 4, "memory_gb": 5.0, "model__family": "gpt2", "model__num_key_value_heads": 16},
    {"ranks": 4, "memory_gb": 7.0, **MIXTRAL},
    {"ranks": 8, "memory_gb": 7.0, **MIXTRAL},
    {"ranks": 4, "memory_gb": 80.0, "zero__stage": 3, "offload__optimizer": OffloadDevice.cpu},
)


def profile_of(space: SearchSpace) -> HardwareProfile:
    profile = load_profile(space.config.cluster, space.world)
    assert profile is not None
    return profile


def brute_force(evaluator: Evaluator, goal: Goal) -> float:
    """The least cost of all layouts."""
    costs = [inf]
    for layout in evaluator.space.layouts():
        result = evaluator.evaluate(layout)
        ranks = layout.ranks(evaluator.space.world)
        if result.estimate is not None and goal.allows(result.estimate.high, ranks):
            costs.append(goal.cost(result.seconds, ranks))
    return min(costs)


def found_cost(space: SearchSpace, goal: Goal) -> float:
    best = find_best(Evaluator(space, profile_of(space)), goal).best
    return goal.cost(best[0].seconds, best[0].layout.ranks(space.world)) if best else inf


def agrees(space: SearchSpace, goal: Goal) -> bool:
    expected = brute_force(Evaluator(space, profile_of(space)), goal)
    return found_cost(space, goal) == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(CASES)))
def test_agrees_with_brute_force(number: int) -> None:
    space = space_of(**CASES[number])  # type: ignore[arg-type]
    assert found_cost(space, Goal()) < inf
    assert agrees(space, Goal())


@pytest.mark.full
@pytest.mark.parametrize("number", [6, 11])
def test_agrees_with_brute_force_on_fewer_nodes(number: int) -> None:
    space = replace(space_of(**CASES[number]), fewer_nodes=True)  # type: ignore[arg-type]
    fastest = brute_force(Evaluator(space, profile_of(space)), Goal())
    assert agrees(space, Goal(cheapest=True, most_seconds=3 * fastest))
    assert agrees(space, Goal(most_gpu_seconds=16 * fastest))


# -- a step time that distinguishes layouts without depending on the estimator


def stub_estimate(plan: RunPlan, profile: HardwareProfile) -> StepEstimate:
    """Matrix products are faster with more tokens; tensor ranks, recomputation and ZeRO 3 add to them."""
    batch, axes, config = plan.batch, plan.axes, plan.config
    tokens = batch.micro_batch * config.train.sequence_length / axes.context
    each = (tokens + 40) * (
        1 + {"none": 0, "selective": 0.1, "full": 0.4}[config.train.activation_checkpointing]
    )
    forward = each / axes.tensor / axes.pipeline
    parts = {
        "forward": batch.accumulation * forward,
        "communication/tensor": batch.accumulation * tokens * 0.01 * (axes.tensor - 1) / axes.pipeline,
        "bubble": (axes.pipeline - 1) * forward,
        "communication/data": 5.0 * (config.zero.stage == 3),
        "transfer": 20.0 * (config.offload.optimizer is not OffloadDevice.none),
    }
    seconds = sum(parts.values())
    return StepEstimate(seconds=seconds, low=0.9 * seconds, high=1.1 * seconds, parts=parts)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "estimate_step", stub_estimate)


@pytest.mark.usefixtures("stubbed")
def test_agrees_with_brute_force_on_another_step_time() -> None:
    assert agrees(space_of(ranks=2, memory_gb=5.0, train__global_batch=4), Goal())


@pytest.mark.full
@pytest.mark.usefixtures("stubbed")
def test_control_wrong_bounds_miss_the_best_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are not lower bounds exclude the best layout."""
    space = space_of(ranks=4, memory_gb=5.0, train__global_batch=4)
    expected = brute_force(Evaluator(space, profile_of(space)), Goal())
    least_bytes, least_seconds = Evaluator.least_bytes, Evaluator.least_seconds

    def wrong_seconds(evaluator: Evaluator, layout: Layout, *, divided: bool) -> float:
        seconds = least_seconds(evaluator, layout, divided=divided)
        return 100 * seconds if layout.pipeline == 1 else seconds

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "least_bytes", lambda *args, **kwargs: 10 * least_bytes(*args, **kwargs))
        assert found_cost(space, Goal()) != pytest.approx(expected)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "least_seconds", wrong_seconds)
        assert found_cost(space, Goal()) != pytest.approx(expected)
    assert found_cost(space, Goal()) == pytest.approx(expected)


# -- what stays as it is


@pytest.mark.usefixtures("stubbed")
def test_typed_keys_keep_their_values() -> None:
    space = space_of(ranks=4, memory_gb=80.0, zero__stage=1, train__micro_batch=1)
    fixed = frozenset({"zero.stage", "train.micro_batch", "engine.name"})
    layouts = list(replace(space, fixed=fixed).layouts())
    assert {(layout.zero, layout.micro_batch, layout.engine) for layout in layouts} == {
        (1, 1, EngineName.deepspeed)
    }
    assert len({layout.zero for layout in space.layouts()}) > 1


def test_a_key_of_an_engine_keeps_the_engine() -> None:
    space = space_of(ranks=4, memory_gb=80.0)
    fixed = frozenset({"engine.megatron.sequence_parallel"})
    assert {layout.engine for layout in replace(space, fixed=fixed).layouts()} == {EngineName.megatron}


def test_layouts_do_not_change_what_the_run_computes() -> None:
    space = space_of(ranks=8, memory_gb=80.0)
    expected = identity(space.config)
    for layout in space.layouts():
        changed = layout.apply(space.config)
        assert identity(changed) == expected
        assert changed.precision == space.config.precision
        assert changed.train.global_batch == space.config.train.global_batch


def test_bf16_gradients_accumulate_in_fp32_in_every_layout() -> None:
    space = space_of(ranks=4, memory_gb=80.0)
    layout = replace(layout_of(space.config, space.world), zero=1, micro_batch=1)
    result = Evaluator(space, profile_of(space)).evaluate(layout)
    assert result.plan is not None
    assert result.plan.deepspeed is not None
    assert result.plan.deepspeed["data_types"] == {"grad_accum_dtype": "fp32"}


def test_layout_of_a_configuration_changes_nothing() -> None:
    config = run_config(**LARGE, zero__stage=3, train__micro_batch=2)
    assert layout_of(config, h100s(4)).apply(config) == config


@pytest.mark.full
def test_1024_gpus_take_less_than_ten_seconds() -> None:
    from toolkit.config.compose import compose

    config = compose(["+exp=llama_8b_zero3_offload", "train.global_batch=1024"])
    shape = resolve_shape_of(get_family("llama"), config.model)
    space = SearchSpace(config=config, world=h100s(1024), shape=shape)
    began = time.process_time()
    assert find_best(Evaluator(space, profile_of(space)), Goal()).best
    assert time.process_time() - began < 10
