"""``dmt``: one program for every command.

pytest tests/cli/test_dmt.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import __version__, cli
from toolkit.commands import COMMANDS
from toolkit.errors import ExitCode

HEAVY = ("torch", "hydra", "omegaconf", "yaml", "rich", "numpy")


def test_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == ExitCode.DONE
    text = capsys.readouterr().out
    for name, about in COMMANDS.items():
        assert f"\n  {name:<10} {about}\n" in text
    assert max(map(len, text.splitlines())) <= 110
    assert cli.main([]) == ExitCode.DONE
    assert capsys.readouterr().out == text


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; began = time.process_time()\nfrom toolkit.cli import main\nmain(['--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules], time.process_time() - began < 0.2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] True"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"dmt {__version__}\n"


def test_unknown_command_is_reported_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian", "+exp=first"]) == ExitCode.USER
    assert "remedy: write dmt train\n" in capsys.readouterr().err


def test_arguments_reach_the_command_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.launch import plan

    given = ["+exp=a", "optim.betas=[0.9,0.95]", "--json", 'monitor.prompt="a b"']
    seen: list[list[str]] = []
    monkeypatch.setattr(plan, "main", lambda arguments: seen.append(list(arguments)) or ExitCode.USER)
    assert cli.main(["plan", *given]) == ExitCode.USER
    assert seen == [given]


@pytest.mark.parametrize("form", [["plan", "--help", "zero"], ["help", "plan", "zero"]])
def test_help_of_a_command_teaches_dmt(
    form: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/venv/bin/dmt"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert cli.main(form) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "dmt plan +exp=quickstart" in text
    assert "launch/" not in text
    assert "stage2" in text


def test_mistake_has_the_exit_code_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "zero=stage9"]) == ExitCode.USER
    assert cli.main(["new"]) == ExitCode.USER
