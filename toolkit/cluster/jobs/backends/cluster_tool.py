"""Run the command-line tools of a cluster."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.errors import InputError, Problem

COMMAND_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTool:
    """A command of a cluster, and the errors to report if it cannot run or fails.

    Attributes:
        rule: why the tool is needed.
        install: remedy if it is missing.
        ping: a command that checks the cluster.
        accepts: the rule that a failed command breaks.
        correct: remedy of a failed command.
    """

    rule: str
    install: str
    ping: str
    accepts: str
    correct: str

    def run(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
        """Run a command and return its output. Raises InputError if it is missing, hangs or fails."""
        shown = shlex.join(command)
        try:
            done = subprocess.run(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except FileNotFoundError:
            problem = Problem("cluster", f"{command[0]} is not installed here", self.rule, self.install)
            raise InputError(problem) from None
        except subprocess.TimeoutExpired:
            seen = f"{shown} took more than {COMMAND_SECONDS:g} s"
            raise InputError(
                Problem("cluster", seen, "the cluster must respond", f"check it with: {self.ping}")
            ) from None
        if done.returncode:
            error = done.stderr.strip() or f"exit code {done.returncode}"
            raise InputError(Problem("cluster", f"{shown}: {error}", self.accepts, self.correct))
        return done.stdout
