"""Write a small project of your own: a model, an experiment that trains it in seconds, and a test.

    python launch/new.py mine          # creates the folder mine
    cd mine
    python launch/train.py +exp=first

No file is overwritten. Commands that run in the folder find its experiments in conf/ without a flag. Exit
code: 0 done, 2 a mistake, reported with its rule and remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from toolkit.commands import command_line, in_this_form
from toolkit.errors import ExitCode, InputError, Problem, run_command
from toolkit.logs import configure_logging


def main(arguments: Sequence[str]) -> int:
    configure_logging()
    if not {"--help", "-h"}.isdisjoint(arguments):
        print(in_this_form(__doc__ or "").strip())
        return ExitCode.DONE
    return run_command(partial(write_project, arguments))


def write_project(arguments: Sequence[str]) -> None:
    """Write the project and print what to do next. Raises InputError."""
    from toolkit.new import create_project

    if len(arguments) != 1 or "=" in arguments[0] or arguments[0].startswith("-"):
        raise InputError(
            Problem(
                "NAME",
                " ".join([command_line("new"), *arguments]),
                "the only argument is the name of the project, or a folder with that name",
                f"write {command_line('new', 'mine')}",
            )
        )
    folder = Path(arguments[0])
    files = create_project(folder)
    print("\n".join([f"created {folder}:", *(f"    {file}" for file in files)]))
    print(f"train it: cd {folder} && {command_line('train', '+exp=first')}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
