"""The examples have equal losses on one process and under ZeRO 2 and 3, and resume across these layouts.

pytest tests/examples                      one example: local, then ZeRO 3 from its checkpoint
pytest tests/examples -m full              all examples: ZeRO 2, ZeRO 3 and one process, and their commands
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.sweep_points import LAPTOP
from tests.examples.example_runs import EXAMPLES, NAMES, ExampleRun, train_example
from toolkit.cluster.jobs.job import plan_job
from toolkit.config.compose import compose
from toolkit.rows import read_rows
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.train.user_task import check_user_task
from toolkit.user_code import check_user_code

STEPS = 6
SHORT = (f"train.steps={STEPS}", "eval.every=3", "schedule.decay=60", 'checkpoint.every="3"')
TOLERANCE = 1e-5
ROOT = EXAMPLES.parent


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def references() -> dict[str, ExampleRun]:
    return {}


def reference(name: str, references: dict[str, ExampleRun], tmp_path: Path, pool: RankPool) -> ExampleRun:
    if name not in references:
        references[name] = train_example(name, tmp_path / "local", *SHORT, pool=pool)
    return references[name]


def numbers(rows: list[dict[str, object]]) -> list[dict[str, float]]:
    """The rows without times."""
    return [
        {key: value for key, value in row.items() if isinstance(value, int | float) and "second" not in key}
        for row in rows
    ]


def check_equal(run: ExampleRun, expected: ExampleRun) -> None:
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(expected.losses, abs=TOLERANCE)
    for own, others in ((run.evals, expected.evals), (run.hooks, expected.hooks)):
        assert numbers(own), "the example has a metric and a hook"
        assert len(own) == len(others)
        for row, other in zip(numbers(own), numbers(others), strict=True):
            assert row == pytest.approx(other, rel=1e-4, abs=1e-4)


def resume_across_layouts(name: str, tmp_path: Path, pool: RankPool) -> ExampleRun:
    """Three steps under ZeRO 3 on two ranks, then three steps on one process."""
    train_example(name, tmp_path / "hop", *SHORT, "zero=stage3", "train.steps=3", ranks=2, pool=pool)
    return train_example(name, tmp_path / "hop", *SHORT, pool=pool)


def test_an_example_resumes_from_zero3_on_one_process(
    references: dict[str, ExampleRun], tmp_path: Path, pool: RankPool
) -> None:
    name = "tabular_regression"
    expected = reference(name, references, tmp_path, pool)
    check_equal(resume_across_layouts(name, tmp_path, pool), expected)
    other = train_example(name, tmp_path / "other", *SHORT, "data.shuffle_seed=1", pool=pool)
    assert max(abs(a - b) for a, b in zip(other.losses, expected.losses, strict=True)) > 100 * TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_every_example_matches_one_process_and_resumes_across_layouts(
    name: str, references: dict[str, ExampleRun], tmp_path: Path, pool: RankPool
) -> None:
    expected = reference(name, references, tmp_path, pool)
    small = (*SHORT, "zero=stage2", "train.micro_batch=4")
    check_equal(train_example(name, tmp_path / "small", *small, ranks=2, pool=pool), expected)
    check_equal(resume_across_layouts(name, tmp_path, pool), expected)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short(name: str) -> None:
    folder = EXAMPLES / name
    (module,) = folder.glob("*.py")
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 120
    readme = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(readme) <= 30
    assert all(len(line) <= 142 for line in readme)


def readme_commands(name: str) -> list[str]:
    (block,) = re.findall(r"^```sh\n(.*?)^```", (EXAMPLES / name / "README.md").read_text(), re.DOTALL | re.M)
    return block.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_the_readme_plan_without_a_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, *commands = readme_commands(name)
    assert change == f"cd examples/{name}"
    monkeypatch.chdir(EXAMPLES / name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    plans = [
        plan_job(compose(command.partition("launch/train.py ")[2].split()), LAPTOP) for command in commands
    ]
    assert [plan.warnings for plan in plans] == [()] * len(plans)
    assert len({plan.run_dir for plan in plans}) == 1, "the second command continues the first run"
    assert plans[0].config.train.steps < plans[1].config.train.steps
    for plan in plans:
        check_user_code(plan.config)
        check_user_task(plan.config)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("launchers_port")
@pytest.mark.parametrize("name", NAMES)
def test_commands_of_the_readme_run(name: str, tmp_path: Path) -> None:
    shutil.copytree(
        EXAMPLES / name, tmp_path / "examples" / name, ignore=shutil.ignore_patterns("runs", "__pycache__")
    )
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = "\n".join(["set -e", *readme_commands(name)])
    done = subprocess.run(
        ["bash"], input=script, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (metrics,) = (tmp_path / "examples" / name).glob("runs/*/metrics.jsonl")
    steps = list(read_rows(metrics))
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    evaluations = list(read_rows(metrics.parent / "eval.jsonl"))
    assert all(math.isfinite(row["loss"]) for row in steps)
    assert evaluations[-1]["loss"] < min(0.8 * steps[0]["loss"], evaluations[0]["loss"]), "it learns"


def test_losses_are_compared_step_by_step() -> None:
    """The control: a run that is one step late is not equal."""
    rows = [{"step": step, "loss": 1 / (1 + step)} for step in range(STEPS + 1)]
    late, expected = (ExampleRun(each, [{"step": 1}], [{"step": 1}]) for each in (rows[1:], rows[:-1]))
    assert all(a != b for a, b in pairwise(expected.losses))
    with pytest.raises(AssertionError):
        check_equal(late, expected)
