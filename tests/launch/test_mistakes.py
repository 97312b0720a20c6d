"""Mistakes are reported quickly with value, rule and remedy, and leave nothing behind.

pytest tests/launch/test_mistakes.py            some of each kind, in forks of one process
pytest tests/launch/test_mistakes.py -m full    all, some of them as a command, timed, and under launchers
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launch import plan, train
from tests.launch.mistakes import BASE, KINDS, Mistake
from tests.launch.processes import ROOT, TRAIN, RunningCommand, command

SECONDS = 8.0
SECONDS_OF_RANK_0 = 4.0  # CPU time
COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": train.main, "plan": plan.main}
FIRSTS = [mistakes[0] for mistakes in KINDS.values()]  # what differs is where a mistake is found
CASES = [
    *(
        ("train", mistake)
        if number < 3 or mistake.starting_only
        else pytest.param("train", mistake, marks=pytest.mark.full)
        for mistakes in KINDS.values()
        for number, mistake in enumerate(mistakes)
    ),
    *(("plan", mistake) for mistake in FIRSTS if not mistake.starting_only),
]


def words(mistake: Mistake) -> list[str]:
    return (
        [*mistake.typed]
        if any(word.startswith("+exp=") for word in mistake.typed)
        else [*BASE, *mistake.typed]
    )


def check_output(mistake: Mistake, code: int, output: str) -> None:
    assert code == 2, f"exit code {code}\n{output}"
    assert "Traceback" not in output
    assert mistake.shows in output, output
    assert "rule:" in output, output
    assert "remedy:" in output, output


def in_fork(main: Callable[[list[str]], int], arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run ``main(arguments)`` in a forked child with everything imported; return its exit code and output."""
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(output, os.O_CREAT | os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.chdir(folder)
            code = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output.read_text()


@pytest.fixture(scope="module")
def warm() -> None:
    """Import what every case needs before the forks."""
    import toolkit.config.compose
    import toolkit.config.engine_keys
    import toolkit.estimate.plan_report
    import toolkit.plan.rules  # noqa: F401 - imported to be inherited


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("script", "mistake"), CASES, ids=lambda value: str(value))
def test_mistake_is_reported(
    script: str, mistake: Mistake, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with capfd.disabled():
        code, output = in_fork(COMMANDS[script], words(mistake), tmp_path)
    check_output(mistake, code, output)
    assert [path.name for path in tmp_path.iterdir()] == ["output.txt"], "a refused run leaves no files"


TIMED = [("train", mistake) for mistake in FIRSTS] + [("plan", FIRSTS[0])]


@pytest.mark.parametrize(
    ("script", "mistake"),
    [TIMED[0], *(pytest.param(*case, marks=pytest.mark.full) for case in TIMED[1:])],
    ids=lambda value: str(value),
)
def test_mistake_is_reported_quickly(script: str, mistake: Mistake, tmp_path: Path) -> None:
    (tmp_path / "output.txt").touch()  # run.dir=. is a mistake in a folder that contains something else
    began = time.monotonic()
    argv = [sys.executable, str(ROOT / "launch" / f"{script}.py"), *words(mistake)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    seconds = time.monotonic() - began
    check_output(mistake, done.returncode, done.stdout + done.stderr)
    assert seconds < SECONDS


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_mistake_under_a_launcher_is_reported_once(launcher: str, tmp_path: Path) -> None:
    """Within two CPU seconds of rank 0 and before it loads torch, so no store, group or device exists."""
    mark = tmp_path / "run"
    argv = command(launcher, TRAIN, *BASE, "model.hidden_size=wide", f"run.dir={mark}")
    with RunningCommand(argv, mark, cwd=tmp_path) as started:
        started.wait_until(lambda: 0 in started.ranks(), 120, "started")
        rank = started.ranks()[0]
        spent: list[float] = []  # measured before the error message

        def answered() -> bool:
            now, mapped = 0.0, False
            with suppress(psutil.NoSuchProcess):  # it has printed the error and exited
                now, mapped = (
                    sum(rank.cpu_times()[:2]),
                    any("libtorch" in file.path for file in rank.memory_maps()),
                )
            if "remedy:" in started.output:
                return True
            spent.append(now)
            assert not mapped, "torch is loaded before the error message"
            return False

        started.wait_until(answered, 60, "answered")
        assert spent, "rank 0 was not observed"
        assert spent[-1] < SECONDS_OF_RANK_0
        code = started.wait_for_exit(150)
        started.wait_until_gone(15)
        assert started.output.count("remedy:") == (1 if launcher == "deepspeed" else 2), (
            "torchrun's own report repeats it at its end"
        )
        assert code == (2 if launcher == "deepspeed" else 1)  # torchrun has no other exit code for failures
        assert "toolkit" not in started.output.replace(str(ROOT), ""), "no traceback of the toolkit"
    assert not mark.exists()


def test_mistakes_are_reported_without_importing_torch(tmp_path: Path) -> None:
    code = """
import sys
from launch import train
ending = train.main(sys.argv[1:])
print([name for name in ("torch", "deepspeed", "transformers", "numpy", "wandb") if name in sys.modules])
sys.exit(ending)
"""
    argv = [sys.executable, "-c", code, *BASE, "model.hidden_size=wide"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
