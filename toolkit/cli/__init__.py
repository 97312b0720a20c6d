"""``dmt``: every command under one name. Starts in a few milliseconds: a command is imported when it runs."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit import __version__
from toolkit.commands import COMMANDS, MODULES, PROGRAM
from toolkit.errors import ExitCode, Problem

SHELLS = ("bash", "zsh", "fish")
# Commands that leave threads of gloo or of an engine behind: see `exit_now`.
WITH_THREADS = ("train", "doctor", "calibrate")

HELP = """\
{program} {version}: train with DeepSpeed or Megatron-core from one description, in any layout.

  {program} COMMAND [ARGUMENTS]
  {program} COMMAND --help

COMMANDS
{commands}

EXAMPLES
  {program} new mine && cd mine && {program} train +exp=first   a project of your own
  {program} train +exp=quickstart cluster.cpu_ranks=2      train on two CPU ranks
  {program} plan +exp=quickstart zero=stage3               what a run would do; starts nothing
  {program} train -m +exp=quickstart optim.lr=1e-3,2e-3    a sweep: one run per value
  deepspeed --num_gpus 8 --module {modules}.train +exp=quickstart     with DeepSpeed's launcher
  torchrun --nproc_per_node 8 -m {modules}.train +exp=quickstart      with torch's launcher

OPTIONS
  --help, --version
  completion bash|zsh|fish   complete commands, groups and keys with TAB: eval "$({program} completion bash)"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. ``KEY=VALUE`` arguments reach it as they were typed."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h", "help"):
        if rest:
            return _run(rest[0], [*rest[1:], "--help"])
        print(_help(), end="")
    elif name == "--version":
        print(f"{PROGRAM} {__version__}")
    elif name == "completion":
        return _print_completion(rest)
    elif name == "__complete":
        from toolkit.cli.complete import print_candidates

        print_candidates(rest)
    else:
        return _run(name, rest)
    return ExitCode.DONE


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1, 0.5)
        problem = Problem(
            name,
            f"{PROGRAM} {name}",
            f"the commands are {', '.join(COMMANDS)}",
            f"write {PROGRAM} {near[0]}" if near else f"see {PROGRAM} --help",
        )
        print(f"{problem.severity}: {problem}", file=sys.stderr)
        return ExitCode.USER
    code: int = importlib.import_module(f"{MODULES}.{name}").main(arguments)
    if name in WITH_THREADS:
        from toolkit.cluster.attempt.exit_handling import exit_now

        exit_now(code)
    return code


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
    return HELP.format(program=PROGRAM, version=__version__, commands=commands, modules=MODULES)


def _print_completion(shells: Sequence[str]) -> int:
    if len(shells) != 1 or shells[0] not in SHELLS:
        problem = Problem(
            "completion",
            " ".join([PROGRAM, "completion", *shells]),
            f"the shells are {', '.join(SHELLS)}",
            f'write eval "$({PROGRAM} completion bash)"',
        )
        print(f"{problem.severity}: {problem}", file=sys.stderr)
        return ExitCode.USER
    print(Path(__file__).with_name(f"dmt.{shells[0]}").read_text(encoding="utf-8"), end="")
    return ExitCode.DONE
