"""The commands, and the form in which the user starts them, which every hint repeats.

    command_line("plan", "+exp=quickstart")

is ``python launch/plan.py +exp=quickstart`` in a process of ``python launch/train.py``, with the folder as it
was typed, ``dmt plan +exp=quickstart`` in a process of ``dmt train``, and otherwise
``python -m toolkit.launch.plan +exp=quickstart``. Processes that a command starts inherit its form.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from itertools import groupby
from pathlib import Path

# Each command of launch/, with its line in `dmt --help`.
COMMANDS = {
    "new": "create a project of your own: a model, an experiment, a test",
    "train": "train a model, resume a run, or run a sweep (-m)",
    "plan": "show layout, memory and batch of a run without starting it",
    "prepare": "turn text, JSONL or parquet into a data folder, or inspect one",
    "report": "write one HTML page about a run",
    "generate": "continue a text with the weights of a run",
    "reshard": "convert, inspect, verify or compare checkpoints",
    "doctor": "check the machines of a run: what would fail or be slow",
    "calibrate": "measure the machines of a run, so that the plan predicts its step time better",
    "submit": "submit a run to Slurm, Kubernetes or this machine",
    "verify": "compare both engines with plain PyTorch on this machine",
    "adopt": "translate the configuration of another tool into an experiment",
}
PROGRAM = "dmt"
MODULES = "toolkit.launch"
VARIABLE = "DMT_COMMAND_FORM"  # the form, for processes that a command starts

_MENTION = re.compile(
    r"(?P<launcher>\b(?:deepspeed|torchrun)\b[^\n]*? )?(?P<python>python )?"
    r"(?<![\w/.-])launch/(?P<name>\w+)\.py"
)


def command_line(name: str, *arguments: str) -> str:
    """Return what a user types to start a command; ``arguments`` are appended as they are."""
    return " ".join([command_form().replace("{}", name), *arguments])


def command_form() -> str:
    """Return the form of this process with ``{}`` in place of a command's name."""
    inherited = os.environ.get(VARIABLE)
    if inherited:
        return inherited
    folder = script_folder()
    if folder is not None:
        path = str(folder / "{}.py")
        return f"python {shlex.quote(path) if ' ' in path else path}"
    return f"{PROGRAM} {{}}" if Path(sys.argv[0]).name == PROGRAM else f"python -m {MODULES}.{{}}"


def inherited_form() -> dict[str, str]:
    """Return the environment variable that makes a process that this one starts print the same form."""
    return {VARIABLE: command_form()}


def script_folder() -> Path | None:
    """Return the folder of the running script, as it was typed; None unless a file of launch/ was started."""
    script = _running_script()
    if script is not None and script.stem in COMMANDS and (script.parent / "plan.py").is_file():
        return script.parent
    return None


def _running_script() -> Path | None:
    """Return the file that this process was started with; None if it is a module or a console command."""
    started = Path(sys.argv[0])
    by_path = getattr(sys.modules.get("__main__"), "__spec__", None) is None
    return started if by_path and started.suffix == ".py" else None


def entry_point(name: str) -> str:
    """Return what starts a command in another process of this machine, for :func:`python_arguments`: the
    script if this process was started by a script, which may be one of the user's that calls the command's
    ``main``; else the module.
    """
    folder, script = script_folder(), _running_script()
    if folder is not None:
        return str(folder / f"{name}.py")
    return f"{MODULES}.{name}" if script is None else str(script)


def python_arguments(entry: str) -> list[str]:
    """Return the arguments with which Python and torchrun start ``entry``, a file or a module."""
    return [entry] if entry.endswith(".py") else ["-m", entry]


def in_this_form(text: str) -> str:
    """Replace the commands of a text, which mentions them as ``python launch/plan.py``, by the form of this
    process. A column of explanations behind consecutive commands stays aligned.
    """
    blocks = ((mentions, list(lines)) for mentions, lines in groupby(text.split("\n"), _mentions_command))
    return "\n".join(
        line for mentions, lines in blocks for line in (_block_in_this_form(lines) if mentions else lines)
    )


def _mentions_command(line: str) -> bool:
    return "launch/" in line


def _block_in_this_form(lines: list[str]) -> list[str]:
    parts = [re.split(r"(?<=\S)\s{2,}(?=\S)", line, maxsplit=1) for line in lines]
    changed = [[_MENTION.sub(_mention, part) for part in line] for line in parts]
    column = max(len(command) for command, *_ in changed) + 2
    return [f"{command.ljust(column)}{about[0]}" if about else command for command, *about in changed]


def _mention(found: re.Match[str]) -> str:
    name, launcher, folder = found["name"], found["launcher"], script_folder()
    if launcher is None:
        return command_line(name) if found["python"] or folder is None else str(folder / f"{name}.py")
    if folder is not None:
        return f"{launcher}{folder / f'{name}.py'}"
    option = "--module" if launcher.startswith("deepspeed") else "-m"
    return f"{launcher}{option} {MODULES}.{name}"
