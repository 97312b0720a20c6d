"""Rules about datasets, hooks, sinks and tracked metrics: each remedy, typed, is accepted.

pytest tests/plan/test_rules_user_code.py
"""

from __future__ import annotations

import re

import pytest

from toolkit.config.compose import compose
from toolkit.config.user_objects import object_problems
from toolkit.errors import PlanError, Problem
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

WORLD = World(ranks=2, ranks_per_node=2, device=Device.CPU)
HOOK = "+hooks.mine.target=my.package.Hook"

# Words, the key of the problem, a part of the rule, and the words of the remedy that replace those with the
# same keys; None: the remedy leaves the key out.
MISTAKES: tuple[tuple[str, str, str, str | None], ...] = (
    ("+hooks.mine.ranks=all", "hooks.mine.target", "has a target", HOOK),
    ("+hooks.mine=my.package.Hook", "hooks.mine", "has the keys target, arguments, ranks", HOOK),
    (f"{HOOK} +hooks.mine.rank=all", "hooks.mine.rank", "has the keys", "+hooks.mine.ranks=all"),
    (f"{HOOK} +hooks.mine.width=3", "hooks.mine.width", "has the keys", "+hooks.mine.arguments.width=3"),
    (f"{HOOK} +hooks.mine.arguments=3", "hooks.mine.arguments", "arguments have names", None),
    (
        f"{HOOK} +hooks.mine.ranks=some",
        "hooks.mine.ranks",
        "all, first (rank 0), or a list",
        "+hooks.mine.ranks=all",
    ),
    (f"{HOOK} +hooks.mine.ranks=1", "hooks.mine.ranks", "or a list of numbers", "+hooks.mine.ranks=[1]"),
    (f"{HOOK} +hooks.mine.ranks=[0,2]", "hooks.mine.ranks", "number of ranks - 1", "+hooks.mine.ranks=all"),
    (
        "+monitor.sinks.board={}",
        "monitor.sinks.board.target",
        "tensorboard, mlflow, aim",
        "+monitor.sinks.board.target=my.package.Sink",
    ),
    (
        "+monitor.sinks.tensorboard.folder=x",
        "monitor.sinks.tensorboard.folder",
        "has the keys target, arguments",
        "+monitor.sinks.tensorboard.arguments.folder=x",
    ),
    ("data.target=my.package.Data", "data.target", "belong to data=custom", None),
    ("data.workers=2", "data.workers", "belong to data=custom", None),
    (
        "data=custom data.target=my.package.Data",
        "task.target",
        "a task collates",
        "task.target=my.package.Task",
    ),
    (
        "eval.every=0 train.early_stopping.metric=validation/loss",
        "train.early_stopping.metric",
        "measured by evaluations",
        "eval.every=100",
    ),
    (
        "eval.every=5 train.early_stopping.metric=loss",
        "train.early_stopping.metric",
        "SET/NAME",
        "train.early_stopping.metric=validation/loss",
    ),
    (
        "eval.every=5 checkpoint.keep_best.metric=test/accuracy",
        "checkpoint.keep_best.metric",
        "SET/NAME",
        "checkpoint.keep_best.metric=validation/accuracy",
    ),
)


def planned(words: list[str]) -> RunPlan:
    return make_plan(compose(words), WORLD)


def problem_of(words: list[str], key: str) -> Problem:
    with pytest.raises(PlanError) as caught:
        planned(words)
    return next(problem for problem in caught.value.problems if problem.key == key)


@pytest.mark.parametrize(("typed", "key", "rule", "remedy"), MISTAKES, ids=[typed for typed, *_ in MISTAKES])
def test_mistake_is_refused_and_its_remedy_is_accepted(
    typed: str, key: str, rule: str, remedy: str | None
) -> None:
    words = typed.split()
    problem = problem_of(words, key)
    assert rule in problem.rule
    assert f"{key}" in problem.seen
    if remedy is None:
        wrong = problem.key
        kept = [word for word in words if word.lstrip("+").partition("=")[0] != wrong]
    else:
        assert re.search(rf"(write|rename it:) (\S+=\S+ )*{re.escape(remedy)}", problem.remedy), (
            problem.remedy
        )
        name = remedy.lstrip("+").partition("=")[0]
        replaced = {name, problem.key, problem.key.removesuffix(".target")} - {"task.target"}
        kept = [word for word in words if word.lstrip("+").partition("=")[0] not in replaced]
        kept.append(remedy)
    planned(kept)


def test_names_from_a_file_are_checked() -> None:
    """The command line does not accept such a name."""
    (problem,) = object_problems("hooks", {"1st": {"target": "my.package.Hook"}}, 1)
    assert "begins with a letter" in problem.rule


def test_hooks_and_sinks_do_not_change_the_identity_of_a_run() -> None:
    plain = planned([])
    extended = planned([HOOK, "+hooks.mine.ranks=[1]", "+monitor.sinks.tensorboard={}", "eval.every=10"])
    stopping = planned(["eval.every=10", "train.early_stopping.metric=validation/loss"])
    assert plain.identity == extended.identity == stopping.identity
    custom = ["model=custom", "model.target=my.Model", "data=custom", "data.target=my.package.Data"]
    assert planned(custom).identity == planned([*custom, "data.workers=2"]).identity
    assert planned(custom).identity != planned([*custom, "+data.arguments.samples=3"]).identity
