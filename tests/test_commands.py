"""Hints repeat the form in which the user started the command.

pytest tests/test_commands.py
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import commands
from toolkit.commands import COMMANDS, VARIABLE, command_line, entry_point, in_this_form, python_arguments

ROOT = Path(__file__).resolve().parents[1]
TEXT = """\
see python launch/plan.py --help
  torchrun -n 2 launch/train.py +exp=a  starts ranks
  launch/x/plan.py"""


def started_as(monkeypatch: pytest.MonkeyPatch, program: str | Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)


def test_script_repeats_the_folder_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    started_as(monkeypatch, "launch/train.py")
    assert command_line("plan", "+exp=a") == "python launch/plan.py +exp=a"
    assert python_arguments(entry_point("train")) == ["launch/train.py"]
    assert in_this_form(TEXT) == TEXT
    monkeypatch.chdir(ROOT / "launch")
    started_as(monkeypatch, "train.py")
    assert command_line("plan") == "python plan.py"
    started_as(monkeypatch, ROOT / "launch/train.py")
    assert command_line("plan") == f"python {ROOT}/launch/plan.py"


def test_dmt_repeats_dmt_and_starts_ranks_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "/venv/bin/dmt")
    assert command_line("report", "runs/a") == "dmt report runs/a"
    assert python_arguments(entry_point("train")) == ["-m", "toolkit.launch.train"]
    assert in_this_form(TEXT).splitlines() == [
        "see dmt plan --help",
        "  torchrun -n 2 -m toolkit.launch.train +exp=a  starts ranks",
        "  launch/x/plan.py",
    ]
    assert in_this_form("deepspeed launch/train.py") == "deepspeed --module toolkit.launch.train"


def test_other_programs_and_notebooks_see_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "/home/me/train.py")  # a script of the user that has the name of a command
    assert command_line("train") == "python -m toolkit.launch.train"


def test_started_processes_inherit_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "/venv/bin/dmt")
    environ = {**os.environ, **commands.inherited_form(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "toolkit.launch.report"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "write dmt report runs/MINE" in done.stderr
    del environ[VARIABLE]  # the control: a process of its own
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert "write python -m toolkit.launch.report runs/MINE" in done.stderr


def test_explanations_behind_commands_stay_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    started_as(monkeypatch, "/venv/bin/dmt")
    text = "  deepspeed launch/train.py  one\n  python launch/plan.py      two"
    first, second = in_this_form(text).splitlines()
    assert first.index("one") == second.index("two")


def test_every_command_has_a_file_and_every_file_a_command() -> None:
    assert {path.stem for path in (ROOT / "launch").glob("*.py")} == set(COMMANDS)


def test_no_message_names_a_script() -> None:
    """Messages name commands with ``command_line``; only texts that ``in_this_form`` changes name scripts."""
    changed_when_printed = (
        "launch/",
        "toolkit/adopt/",
        "toolkit/config/help.py",
        "toolkit/config/overrides.py",
        "toolkit/estimate/advice_table.py",
    )
    checkout_only = "toolkit/testing/parity_report.py"  # the head of docs/parity.md
    script = re.compile(r"\blaunch/\w+\.py")
    found = []
    for path in sorted([*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if name.startswith((*changed_when_printed, checkout_only)) or not script.search(text):
            continue
        tree = ast.parse(text)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
            and script.search(node.value)
        ]
    assert found == []
