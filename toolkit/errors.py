"""Mistakes of the user, told as: the value seen, the rule it breaks, the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """How a rank, our parent and every command end. ``torchrun`` and ``deepspeed`` may change what the shell sees,
    so the truth of a run is its ``status.json``."""

    DONE = 0
    FAILURE = 1
    USER = 2  # a mistake in configuration or input: restarting cannot help
    DIVERGED = 65  # a loss, gradient or weight is infinite or NaN: another start would meet it again (EX_DATAERR)
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


def without_secrets(text: str) -> str:
    """``text`` without the users, passwords and queries of URLs in it: what a person wrote is shown where it is wrong, and kept in logs."""
    return _URL.sub(lambda url: f"{url[1]}{'***@' if url[2] else ''}{url[3]}{'?***' if url[4] else ''}", text)


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


class CheckpointError(UserError):
    """A checkpoint that is corrupt, incomplete, or not of this run."""
