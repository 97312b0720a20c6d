"""docs/translation.md matches the rules, and every choice is planned or refused with a remedy.

pytest tests/plan/test_translation.py
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from toolkit.config.schema import EngineName
from toolkit.errors import PlanError
from toolkit.plan import make_plan, translation
from toolkit.plan.types import World

TEXT = (Path(__file__).resolve().parents[2] / "docs/translation.md").read_text(encoding="utf-8")


def test_document_is_up_to_date() -> None:
    assert translation.document() == TEXT, (
        "regenerate it: python -m toolkit.plan.translation > docs/translation.md"
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
    assert len(answers) == 2 * len(translation.experiments())
    runs = [answer for answer in answers if answer.startswith("exact")]
    assert len(runs) >= 0.8 * len(answers)
    assert all(len(answer.partition(", with ")[2].split()) <= 1 for answer in runs), "one override"


def test_dropout_is_never_exact() -> None:
    """Control: without dropout the same run is exact."""
    for engine in translation.ENGINES:
        assert translation.engine_support(["model.dropout=0.1"], engine).exactness == "own dropout masks"
        assert translation.engine_support(["model.dropout=0.0"], engine).exactness == "exact"
        balanced = translation.engine_support(["model=mixtral", "model.router_aux_loss_coef=0.02"], engine)
        assert balanced.exactness == "exact for one train.micro_batch"
    answers = [answer for choice, found in cells() if "model.dropout=" in choice for answer in found]
    assert answers
    assert not [answer for answer in answers if answer.startswith("exact")]


def combinations(count: int) -> list[tuple[str, ...]]:
    """Random combinations of the options of all groups and axes."""
    draw = random.Random(0)
    groups = {
        group: [f"{group}={option}" for option in translation.options(group)] for group in translation.GROUPS
    }
    return [
        (
            *(draw.choice(options) for options in groups.values()),
            *(f"parallel.{axis}={draw.choice((1, 1, 2, 3, 4))}" for axis in translation.AXES),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("engine", translation.ENGINES)
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(translation.MACHINE, id="gpus"),
        pytest.param(translation.TWO_CORES, id="cpus", marks=pytest.mark.full),
    ],
)
def test_random_combinations_are_planned_or_refused(engine: EngineName, world: World) -> None:
    planned = 0
    for overrides in combinations(60):
        config = translation.small_run(overrides, engine)
        try:
            make_plan(config, world)
            planned += 1
        except PlanError as error:
            for problem in error.problems:
                assert problem.seen, overrides
                assert problem.rule, overrides
                assert problem.remedy, overrides
    assert planned < 60, "some combinations are invalid"
