"""The advice as typed by a user, its words, its experiment and its cost.

pytest tests/estimate/test_advice.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import plan as command
from tests.plan.cases import h100s
from toolkit.config.compose import compose
from toolkit.config.overrides import overridden_keys
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import ExitCode, PlanError
from toolkit.estimate import search
from toolkit.estimate.advice import Advice, advise, layout_overrides
from toolkit.estimate.cost import NODE_SHARE, run_cost
from toolkit.estimate.search import layout_kind
from toolkit.estimate.types import StepEstimate
from toolkit.plan import make_plan
from toolkit.plan.make import DraftPlan
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import Device, World

SMALL = (
    "+exp=llama_1b_zero3",
    "train.global_batch=16",
    "train.micro_batch=null",
    "train.sequence_length=2048",
    "cluster.nodes=2",
    "cluster.gpus_per_node=4",
    "cluster.gpu=h100",
)
WORLD = h100s(8, 4)


def advice_on(*words: str, hours: float | None = None) -> Advice:
    arguments = [*SMALL, *words]
    return advise(compose(arguments), WORLD, fixed=frozenset(overridden_keys(words)), hours=hours)


@pytest.fixture(scope="module")
def fastest() -> Advice:
    return advice_on()


def test_best_layouts_are_sorted_and_of_different_kinds(fastest: Advice) -> None:
    seconds = [advised.estimate.seconds for advised in fastest.best]
    assert seconds == sorted(seconds)
    assert len(fastest.best) == 5
    assert len({layout_kind(advised.layout) for advised in fastest.best}) == 5


def test_words_compose_to_the_advised_run(fastest: Advice) -> None:
    for advised in fastest.best[:2]:
        words = layout_overrides(advised, fastest.config)
        assert compose([*SMALL, *words]) == advised.layout.apply(fastest.config), words


def test_advised_overrides_reproduce_the_plan(fastest: Advice) -> None:
    first = fastest.best[0]
    composed = compose([*SMALL, *layout_overrides(first, fastest.config)])
    assert make_plan(composed, WORLD).memory == first.plan.memory


def test_alternatives_are_not_better(fastest: Advice) -> None:
    assert fastest.alternatives
    for other in fastest.alternatives:
        runs = " x the " in other.reason
        assert runs or other.reason.startswith(("does not fit", "may not fit", "refused"))
        assert not runs or (other.seconds or 0) >= fastest.best[0].estimate.seconds


def test_typed_words_stay(fastest: Advice) -> None:
    assert fastest.best[0].layout.engine is not EngineName.local
    advice = advice_on("engine=megatron", "parallel.tensor=2", "train.micro_batch=1")
    for advised in advice.best:
        assert advised.layout.engine is EngineName.megatron
        assert (advised.layout.tensor, advised.layout.micro_batch) == (2, 1)


def test_layouts_that_break_a_rule_are_refused_together() -> None:
    with pytest.raises(PlanError, match=r"layouts on 8 ranks with parallel.tensor as given"):
        advice_on("parallel.tensor=3")


# -- budget and deadline


@pytest.mark.full
def test_deadline_chooses_the_cheapest_and_budget_the_fastest(fastest: Advice) -> None:
    hours = fastest.best[0].cost.hours
    cheapest = advice_on(hours=20 * hours).best[0]
    assert cheapest.layout.nodes == 1
    assert cheapest.cost.high_hours <= 20 * hours
    price = "monitor.price_per_gpu_hour=2"
    rich = advice_on(price, "budget.usd=1e9").best[0]
    assert rich.estimate.seconds == fastest.best[0].estimate.seconds
    assert rich.cost.cost == pytest.approx(8 * 2 * rich.cost.hours)


@pytest.mark.full
def test_nearest_layouts_are_shown_if_none_meets_the_limit(fastest: Advice) -> None:
    late = advice_on(hours=0.01)
    assert late.missed is not None
    assert "too many" in late.missed
    assert late.best[0].estimate.seconds == fastest.best[0].estimate.seconds
    dear = advice_on("monitor.price_per_gpu_hour=2", "budget.usd=0.01")
    assert dear.missed is not None
    assert "0.005 GPU-hours (cost 0)" in dear.missed
    assert "too much" in dear.missed
    both = advice_on("budget.gpu_hours=0.01", hours=1000.0)
    assert both.missed is not None
    assert "the upper end of the cheapest in time is" in both.missed


# -- cost


def test_cost_is_proportional_to_time_and_price() -> None:
    config = compose([*SMALL, "monitor.price_per_gpu_hour=2.5", "train.steps=3600", "zero.stage=2"])
    cost = run_cost(make_plan(config, WORLD), StepEstimate(seconds=2.0, low=1.0, high=4.0, parts={}))
    assert (cost.hours, cost.low_hours, cost.high_hours) == (2.0, 1.0, 4.0)
    assert cost.gpu_hours == 16.0
    assert cost.cost == 40.0
    assert cost.kwh == pytest.approx(16 * 0.7 * NODE_SHARE * 1.2)
    assert cost.kg_co2 == pytest.approx(16 * 0.7 * NODE_SHARE * 1.2 * 0.473)


def test_cost_is_unknown_without_a_price_and_energy_without_a_gpu() -> None:
    estimate = StepEstimate(seconds=2.0, low=1.0, high=4.0, parts={})
    assert run_cost(make_plan(compose(SMALL), WORLD), estimate).cost is None
    cpus = World(ranks=2, ranks_per_node=2, device=Device.CPU)
    cost = run_cost(make_plan(compose(["+exp=quickstart"]), cpus), estimate)
    assert (cost.gpu_hours, cost.kwh, cost.kg_co2) == (None, None, None)


# -- the command


@pytest.mark.full
def test_command_writes_an_experiment_that_composes_to_the_best_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "conf"
    (folder / "exp").mkdir(parents=True)
    arguments = [f"--config-dir={folder}", "advise=true", "out=advised", *SMALL]
    assert command.main([*arguments, "--json"]) == ExitCode.DONE
    shown = json.loads(capsys.readouterr().out)
    text = (folder / "exp" / "advised.yaml").read_text()
    assert text.startswith("# @package _global_\n# torchrun --nnodes 2 --nproc_per_node 4")
    written = compose([f"--config-dir={folder}", "+exp=advised"])
    assert written == compose([*SMALL, *shown["best"][0]["overrides"]])
    assert command.main(arguments) == ExitCode.USER
    assert "an experiment is not overwritten" in capsys.readouterr().err


def test_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["advise=true", "engine=deepspeed", "parallel.context=1", *SMALL]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "the fastest layouts on h100" in printed
    assert "as configured" in printed
    assert "To run the first, add:" in printed


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        pytest.param(
            ["advise=true", "budget.usd=100"], "monitor.price_per_gpu_hour=2.5", marks=pytest.mark.full
        ),
        pytest.param(["advise=true", "deadline=2020-01-01"], "deadline=36h", marks=pytest.mark.full),
        (["advise=true", "deadline=soon"], "deadline=2d"),
        (["advise=true", "model.family=null"], "write model=llama"),
        (["deadline=36h"], "advise=true"),
        (["budget.usd=100"], "monitor.price_per_gpu_hour=2.5"),
        pytest.param(["advise=true", "out=a/b"], "out=mine", marks=pytest.mark.full),
        pytest.param(["advise=true", "cluster.gpu=null"], "cluster.gpu=", marks=pytest.mark.full),
        (["advise=maybe"], "advise=false"),
    ],
)
def test_wrong_arguments_have_a_remedy(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*SMALL, *words]) == ExitCode.USER
    assert remedy in capsys.readouterr().err


def test_search_is_not_repeated_for_known_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluator plans a layout once, also for the alternatives."""
    planned: list[RunConfig] = []
    draft_plan = search.draft_plan

    def counted(config: RunConfig, world: World, trace: ModuleTrace | NotTraced | None = None) -> DraftPlan:
        planned.append(config)
        return draft_plan(config, world, trace)

    monkeypatch.setattr(search, "draft_plan", counted)
    advice_on("engine=deepspeed", "parallel.context=1", "parallel.tensor=1")
    assert planned
    assert all(planned.count(config) == 1 for config in planned)
