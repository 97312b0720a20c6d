"""Mistakes of the user, told as: the value seen, the rule it breaks, the remedy."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum

MOST_SHOWN = 200  # characters of a path in an error


class ExitCode(IntEnum):
    """How a rank, our parent and every command end. ``torchrun`` and ``deepspeed`` may change what the shell sees,
    so the truth of a run is its ``status.json``."""

    DONE = 0
    FAILURE = 1
    USER = 2  # a mistake in configuration or input: restarting cannot help
    DIVERGED = (
        65  # a loss, gradient or weight is infinite or NaN: another start would meet it again (EX_DATAERR)
    )
    STOPPED = 75  # a signal came, the state was saved: start again to continue (EX_TEMPFAIL of sysexits.h)


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule.

    Attributes:
        key: the configuration key or file at fault, as a user would type it (``parallel.tensor``).
        seen: the value found, with its key (``parallel.tensor=3``).
        rule: what must hold, in one sentence.
        remedy: what to type or do instead, in one sentence.
    """

    key: str
    seen: str
    rule: str
    remedy: str
    severity: Severity = Severity.ERROR

    def __str__(self) -> str:
        return without_secrets(f"{self.seen}\n    rule:   {self.rule}\n    remedy: {self.remedy}")


_URL = re.compile(r"""([a-z][a-z0-9+.-]*://)([^\s"]*@)?([^\s"?]*)(\?[^\s"]+)?""", re.IGNORECASE)


# Names of settings whose values are secrets. Names of secrets themselves (cluster.kubernetes.secrets) are none.
_TOKENS = r"(?:access|api|auth|bearer|github|hf|hub|id|refresh|security|session|wandb)[_-]token|\.token"
_SECRET = (
    r"(?![\w.-]*secrets\.)[\w.-]*(?:api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key|secret(?:[_-]\w+)?|passw(?:or)?d"
    rf"|passphrase|credentials?|authorization|{_TOKENS})"
)
_QUOTED = r""""[^"\n]*"|'[^'\n]*'"""
# name=value to the end of the value, which may have blanks; and {name: value} as in YAML, JSON and Python.
_SETTING = re.compile(
    rf"""(?<![\w.-])({_SECRET}["']?\s*)(?:(=\s*)({_QUOTED}|[^\n,;}}\])"']+)|(:\s*)({_QUOTED}|[^\s,;}}\])"']+))""",
    re.IGNORECASE,
)
# Keys of well-known services by their own form, wherever they stand.
_KEY = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}")


def without_secrets(text: str) -> str:
    """``text`` without the users, passwords and queries of URLs in it, values of settings that are named as secrets are
    (``wandb.api_key=...``), and keys of well-known services: what a person wrote is shown where it is wrong, and kept in logs."""
    text = _URL.sub(lambda url: f"{url[1]}{'***@' if url[2] else ''}{url[3]}{'?***' if url[4] else ''}", text)
    text = _SETTING.sub(lambda setting: f"{setting[1]}{setting[2] or setting[4]}***", text)
    return _KEY.sub("***", text)


class UserError(ValueError):
    """A user's mistake: shown without a traceback, exit code 2. Carries every problem found, not only the first."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "a UserError names at least one problem"
        self.problems = problems
        super().__init__("\n".join(f"{problem.severity}: {problem}" for problem in problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[Problem, ...]]:
        return (type(self), self.problems)  # so that it crosses process borders whole


class ConfigError(UserError):
    """An unknown key, a value of the wrong type, or a combination that no engine can carry out."""


class PlanError(UserError):
    """A described run that breaks rules of its layout, engine or machine."""


class InputError(UserError):
    """A file, folder or data set that is missing or is not what it should be."""


@contextmanager
def file_errors(
    key: str | None = None, remedy: str = "name another file or folder, or let this user read and write it"
) -> Iterator[None]:
    """Around work on files that the user named: what the operating system refuses becomes an error without a traceback.

    Args:
        key: the setting that named the file; None: the file itself is shown.

    Raises:
        InputError: for an OSError of a file. One of no file (a connection, a time-out) goes through as it is.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        place = (
            os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
        )
        seen = f"{f'{key}: ' if key else ''}{place[:MOST_SHOWN]}{'...' * (len(place) > MOST_SHOWN)}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room there, or name a folder on another disk"
        raise InputError(
            Problem(key or place, seen, "files and folders that are named can be read and written", remedy)
        ) from error


class CheckpointError(UserError):
    """A checkpoint that is corrupt, incomplete, or not of this run."""
