"""docs/engine_support.md matches the rules, and every choice is planned or refused with a remedy.

pytest tests/plan/test_engine_support.py
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from toolkit.config.schema import EngineName
from toolkit.errors import PlanError
from toolkit.plan import engine_support, make_plan
from toolkit.plan.types import World

TEXT = (Path(__file__).resolve().parents[2] / "docs/engine_support.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_document_is_up_to_date() -> None:
    assert engine_support.document() == TEXT, (
        "regenerate it: python -m toolkit.plan.engine_support > docs/engine_support.md"
    )


def cells() -> list[tuple[str, list[str]]]:
    rows = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
    return [(row[0], row[1:]) for row in rows]


def test_choices_are_exact_or_refused_with_a_remedy() -> None:
    assert len(cells()) > 60
    for choice, answers in cells():
        assert len(answers) == (2 if "+exp=" in choice else 3)
        for answer in answers:
            planned = r"(exact( for one train\.micro_batch)?|own dropout masks)(, with `.+`)?"
            assert re.fullmatch(rf"{planned}|refused: .+\. Remedy: .+", answer), f"{choice}: {answer}"


def test_most_experiments_run_on_both_engines_with_one_override() -> None:
    answers = [answer for choice, found in cells() if "+exp=" in choice for answer in found]
    assert len(answers) == 2 * len(engine_support.experiments())
    runs = [answer for answer in answers if answer.startswith("exact")]
    assert len(runs) >= 0.8 * len(answers)
    assert all(len(answer.partition(", with ")[2].split()) <= 1 for answer in runs), "one override"


def test_dropout_is_never_exact() -> None:
    """Control: without dropout the same run is exact."""
    for engine in engine_support.ENGINES:
        assert engine_support.engine_support(["model.dropout=0.1"], engine).exactness == "own dropout masks"
        assert engine_support.engine_support(["model.dropout=0.0"], engine).exactness == "exact"
        balanced = engine_support.engine_support(["model=mixtral", "model.router_aux_loss_coef=0.02"], engine)
        assert balanced.exactness == "exact for one train.micro_batch"
    answers = [answer for choice, found in cells() if "model.dropout=" in choice for answer in found]
    assert answers
    assert not [answer for answer in answers if answer.startswith("exact")]


def combinations(count: int) -> list[tuple[str, ...]]:
    """Random combinations of the options of all groups and axes."""
    draw = random.Random(0)
    groups = {
        group: [f"{group}={option}" for option in engine_support.options(group)]
        for group in engine_support.GROUPS
    }
    return [
        (
            *(draw.choice(options) for options in groups.values()),
            *(f"parallel.{axis}={draw.choice((1, 1, 2, 3, 4))}" for axis in engine_support.AXES),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("engine", engine_support.ENGINES)
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(engine_support.MACHINE, id="gpus"),
        pytest.param(engine_support.TWO_CORES, id="cpus", marks=pytest.mark.full),
    ],
)
def test_random_combinations_are_planned_or_refused(engine: EngineName, world: World) -> None:
    planned = 0
    for overrides in combinations(60):
        config = engine_support.small_run(overrides, engine)
        try:
            make_plan(config, world)
            planned += 1
        except PlanError as error:
            for problem in error.problems:
                assert problem.seen, overrides
                assert problem.rule, overrides
                assert problem.remedy, overrides
    assert planned < 60, "some combinations are invalid"
