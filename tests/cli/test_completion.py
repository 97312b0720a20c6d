"""Completion of ``dmt`` in shells: commands, options, groups, keys and values.

pytest tests/cli/test_completion.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import cli
from toolkit.cli.complete import candidates, print_candidates
from toolkit.commands import COMMANDS
from toolkit.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]


def after(line: str) -> list[str]:
    """The candidates for the last word of ``dmt LINE`` that begin with it."""
    words = line.split(" ")
    return [candidate for candidate in candidates(words) if candidate.startswith(words[-1])]


def test_commands_and_options() -> None:
    assert set(COMMANDS) < set(after(""))
    assert after("tr") == ["train"]
    assert after("completion z") == ["zsh"]
    assert after("train -") == ["--help", "-m", "--config-dir="]


def test_groups_and_sections_come_before_their_keys() -> None:
    assert {"zero=", "zero.", "optim=", "optim.", "train.", "+exp="} <= set(after("train "))
    assert not any("steps" in name for name in after("train "))
    assert "optim.lr=" in after("train optim.")
    assert after("train train.batch_r") == ["train.batch_ramp."]
    assert after("train train.batch_ramp.sta") == ["train.batch_ramp.start="]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("plan zero=stage", ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"]),
        ("train +exp=quick", ["+exp=quickstart"]),
        ("train checkpoint.export=", ["checkpoint.export=true", "checkpoint.export=false"]),
        ("train -m zero=stage1,stage3", ["zero=stage1,stage3"]),
        ("prepare impo", ["import=", "import_validation="]),
        ("reshard action=d", ["action=diff"]),
        ("train --help schedule.w", ["schedule.warmup"]),
        ("train train.steps=", []),
        ("report ru", []),
        ("train --config-dir=/no/such/folder ", []),
    ],
)
def test_values_and_keys(line: str, found: list[str]) -> None:
    assert after(line) == found


def test_experiments_of_the_project_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.dmt]\n")
    (tmp_path / "conf/exp").mkdir(parents=True)
    (tmp_path / "conf/exp/mine.yaml").write_text("# @package _global_\n")
    monkeypatch.chdir(tmp_path)
    assert after("train +exp=mi") == ["+exp=mine", "+exp=mixtral_8x7b"]


def test_bash_gets_the_part_behind_the_word_break(capsys: pytest.CaptureFixture[str]) -> None:
    print_candidates(["zsh", "dmt plan zero=stage3"])
    print_candidates(["bash", "dmt plan zero=stage3"])
    print_candidates(["bash", "dmt plan 'zero=stage3"])  # inside quotes: none
    assert capsys.readouterr().out == "zero=stage3\nstage3\n"


def test_unknown_shell_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == ExitCode.USER
    assert "the shells are bash, zsh, fish" in capsys.readouterr().err


# Each prints what pressing TAB offers behind LINE.
SHELLS = {
    "bash": 'eval "$(dmt completion bash)"; COMP_LINE=$LINE; COMP_POINT=${#LINE}; _dmt; '
    'printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "compdef() {}; _files() {}; compadd() { while [[ $1 == -* ]]; do [[ $1 == -S ]] && shift; shift; "
    'done; (( $# )) && print -l -- "$@" }; eval "$(dmt completion zsh)"; words=(${=LINE}); '
    "CURRENT=$#words; PREFIX=$words[-1]; _dmt",
    "fish": "dmt completion fish | source; complete -C $LINE",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    dmt = tmp_path / "dmt"
    dmt.write_text(f"#!{sys.executable}\nimport sys\nfrom toolkit.cli import main\nsys.exit(main())\n")
    dmt.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = {}
    for line in ("dmt tr", "dmt plan zero=stage", "dmt train -m optim.weight_d"):
        done = subprocess.run(
            [program, "-c", SHELLS[shell]],
            env={**environ, "LINE": line},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        found[line] = [text.partition("\t")[0] for text in done.stdout.split("\n") if text]
        assert found[line], done.stderr
    group = "" if shell == "bash" else "zero="
    assert found["dmt tr"] == ["train"]
    assert found["dmt plan zero=stage"] == [f"{group}stage{number}" for number in range(4)]
    assert found["dmt train -m optim.weight_d"] == ["optim.weight_decay="]
