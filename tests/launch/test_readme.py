"""The commands of README.md: each composes and plans, and all run in order in a fresh folder.

pytest tests/launch/test_readme.py
pytest tests/launch/test_readme.py -m full      half an hour on two cores
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.sweep_points import LAPTOP, points
from tests.launch.processes import BIN, ROOT
from toolkit.cluster.job import plan_job
from toolkit.config.compose import compose, compose_prepare, compose_reshard
from toolkit.plan.schedule import rate
from toolkit.plan.types import RunPlan

README = (ROOT / "README.md").read_text(encoding="utf-8")
LAUNCHERS = ("deepspeed", "torchrun", "python")
BLOCKS = re.findall(r"```\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    for line in block.splitlines()
    if line.split(" ")[0] in LAUNCHERS
]
MAKE_TRAIN = [
    "deepspeed",
    "--quiet",
    "--num_gpus",
    "2",
    "launch/train.py",
    "+exp=quickstart",
]  # on a machine without GPUs
IN_ORDER = [MAKE_TRAIN, *COMMANDS]


def parts(command: list[str]) -> tuple[str, list[str]]:
    """Return the script's name, its arguments, and the number of ranks that the launcher starts."""
    place = next(number for number, word in enumerate(command) if word.startswith("launch/"))
    ranks = [f"cluster.cpu_ranks={command[place - 1]}"] if command[0] != "python" else []
    return Path(command[place]).stem, command[place + 1 :] + ranks


def trainings() -> list[RunPlan]:
    """Yield the configuration of each single-run command, in order."""
    found = [
        words for name, words in map(parts, IN_ORDER) if name == "train" and not {"-m", "--help"} & set(words)
    ]
    return [plan_job(compose(words), LAPTOP) for words in found]


def test_readme_has_commands_of_every_kind() -> None:
    assert {parts(command)[0] for command in COMMANDS} >= {
        "train",
        "plan",
        "doctor",
        "prepare",
        "reshard",
        "verify",
    }
    recipe = (ROOT / "Makefile").read_text().partition("\ntrain: ")[2].splitlines()[1]
    assert recipe.endswith("$(BIN)/deepspeed --quiet $(LAUNCH_RANKS) launch/train.py +exp=quickstart $(ARGS)")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_readme_commands_plan_without_warnings(command: list[str], tmp_path: Path) -> None:
    name, words = parts(command)
    assert (ROOT / "launch" / f"{name}.py").is_file()
    match name:
        case "train" if "-m" in words:
            made = points(*[word for word in words if word != "-m"], folder=tmp_path)
            assert [point.problems for point in made] == [()] * 4
        case "train" | "plan" | "doctor" if "--help" not in words:
            assert plan_job(compose(words), LAPTOP).warnings == ()
        case "prepare":
            compose_prepare(words)
        case "reshard":
            compose_reshard(words)


def test_readme_trainings_have_steps_to_do() -> None:
    """Two commands share a directory only if the second one resumes the first."""
    steps: dict[str, int] = {}
    for plan in trainings():
        assert plan.config.train.steps > steps.get(plan.run_dir, 0), plan.run_dir
        steps[plan.run_dir] = plan.config.train.steps


def test_readme_engine_switch_is_one_run() -> None:
    hops = [plan for plan in trainings() if plan.config.run.name == "hop"]
    assert len({plan.run_dir for plan in hops}) == 1
    assert len({plan.config.engine.name for plan in hops}) == 3
    for before, after in pairwise(hops):
        step = before.config.train.steps
        assert rate(before.config, step - 1) == rate(after.config, step - 1)
    without = [
        compose([word for word in words if not word.startswith("schedule.decay")])
        for words in (words for _, words in map(parts, COMMANDS) if "run.name=hop" in words)
    ]
    assert rate(without[0], 99) < 0.2 * rate(without[1], 99), "control: without schedule.decay the rate jumps"


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_readme_commands_run_in_order(tmp_path: Path) -> None:
    for name in ("launch", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    environ = {**clean, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for command in IN_ORDER:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{shlex.join(command)}\n{output}"
        assert "nothing to do" not in output, shlex.join(command)
        assert not re.search("Traceback|[A-Z][a-z]+Warning:", output), f"{shlex.join(command)}\n{output}"
