"""Errors of the user: the value, the rule that it breaks, and the remedy."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum

MOST_SHOWN = 200  # characters of a path in an error


class ExitCode(IntEnum):
    """Exit codes of ranks, their parent process and all commands.

    ``torchrun`` and ``deepspeed`` may replace them, so the authoritative result of a run is its
    ``status.json``.
    """

    DONE = 0
    FAILURE = 1
    USER = 2  # an error in configuration or input; a restart cannot help
    # A loss, gradient or weight is infinite or NaN, or a rank computes wrong values. A restart would repeat
    # it (EX_DATAERR).
    DIVERGED = 65
    STOPPED = 75  # stopped by a signal after a save; a restart continues (EX_TEMPFAIL of sysexits.h)


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule.

    Attributes:
        key: the configuration key or file, as a user would type it (``parallel.tensor``).
        seen: the value with its key (``parallel.tensor=3``).
        rule: the condition that does not hold, in one sentence.
        remedy: what to do instead, in one sentence.
    """

    key: str
    seen: str
    rule: str
    remedy: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        return without_secrets(f"{self.seen}\n    rule:   {self.rule}\n    remedy: {self.remedy}")


_URL = re.compile(r"""([a-z][a-z0-9+.-]*://)([^\s"]*@)?([^\s"?]*)(\?[^\s"]+)?""", re.IGNORECASE)


# Names of settings whose values are secrets. The values of cluster.kubernetes.secrets are names, not secrets.
_TOKENS = r"(?:access|api|auth|bearer|github|hf|hub|id|refresh|security|session|wandb)[_-]token|\.token"
_SECRET = (
    r"(?![\w.-]*secrets\.)[\w.-]*(?:api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key|secret(?:[_-]\w+)?|passw(?:or)?d"
    rf"|passphrase|credentials?|authorization|{_TOKENS})"
)
_QUOTED = r""""[^"\n]*"|'[^'\n]*'"""
# name=value, where the value may contain spaces; and {name: value} as in YAML, JSON and Python.
_SETTING = re.compile(
    rf"""(?<![\w.-])({_SECRET}["']?\s*)(?:(=\s*)({_QUOTED}|[^\n,;}}\])"']+)|(:\s*)({_QUOTED}|[^\s,;}}\])"']+))""",
    re.IGNORECASE,
)
# Keys of well-known services, recognised by their format.
_KEY = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}")


def without_secrets(text: str) -> str:
    """Remove secrets from ``text``, which may be shown and logged.

    Secrets are users, passwords and queries of URLs, values of settings with names of secrets
    (``wandb.api_key=...``), and keys of well-known services.
    """
    text = _URL.sub(lambda url: f"{url[1]}{'***@' if url[2] else ''}{url[3]}{'?***' if url[4] else ''}", text)
    text = _SETTING.sub(lambda setting: f"{setting[1]}{setting[2] or setting[4]}***", text)
    return _KEY.sub("***", text)


class UserError(ValueError):
    """An error of the user, with all problems that were found. Shown without a traceback; exit code 2."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "a UserError names at least one problem"
        self.problems = problems
        super().__init__("\n".join(f"{problem.severity}: {problem}" for problem in problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[Problem, ...]]:
        return (type(self), self.problems)  # pickling keeps the problems


class ConfigError(UserError):
    """An unknown key, a value of the wrong type, or a combination that no engine supports."""


class PlanError(UserError):
    """A run that breaks rules of its layout, engine or machine."""


class InputError(UserError):
    """A file, folder or dataset that is missing or invalid."""


@contextmanager
def file_errors(
    key: str | None = None, remedy: str = "name another file or folder, or grant this user access to it"
) -> Iterator[None]:
    """Turn an OSError about a file that the user named into an error without a traceback.

    Args:
        key: the setting that named the file; None: show only the file.

    Raises:
        InputError: for an OSError about a file. Other OSErrors (a connection, a time-out) are raised
            unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        name = error.filename
        path = os.fsdecode(name) if isinstance(name, str | bytes) else str(name)
        shown = path[:MOST_SHOWN] + "..." * (len(path) > MOST_SHOWN)
        seen = f"{f'{key}: ' if key else ''}{shown}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space there, or name a folder on another disk"
        raise InputError(
            Problem(key or path, seen, "named files and folders can be read and written", remedy)
        ) from error


def run_command(action: Callable[[], ExitCode | None], key: str | None = None) -> ExitCode:
    """Run a command and return its exit code. An error of the user is printed without a traceback.

    Args:
        action: returns the exit code; None if the command is done.
        key: see :func:`file_errors`.
    """
    try:
        with file_errors(key):
            code = action()
    except UserError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER
    return ExitCode.DONE if code is None else code


class CheckpointError(UserError):
    """A checkpoint that is corrupt, incomplete, or of another run."""
