"""``status.json``, the authoritative status of a run. Launchers may change exit codes, but not this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Problem
from toolkit.files import write_whole


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    # by a signal, a notice or the budget, after saving; if there was no time to save, the reason records
    # what is lost
    STOPPED = "stopped"
    # after training began also for user errors (exit code 2), such as a full disk: completed steps may be
    # saved
    FAILED = "failed"
    # an error in configuration or input, found after the folder was opened and before training began
    REFUSED = "refused"

    @property
    def live(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a run. ``exit_code`` is None while it runs. ``goodput`` covers the whole run so far,
    see ``toolkit/goodput.py``.
    """

    state: RunState
    attempt: int
    exit_code: int | None = None
    step: int | None = None  # completed optimizer steps
    checkpoint: str | None = None  # the newest complete checkpoint
    reason: str | None = None
    goodput: Mapping[str, Any] | None = field(default=None, compare=False)


def ended_by_budget(state: RunState | None, reason: str | None) -> bool:
    """Return whether an attempt with this end was stopped by its budget, so that a restart would stop at
    once.
    """
    return state is RunState.STOPPED and reason is not None and reason.startswith("budget.")


def write_status(file: Path, status: Status) -> None:
    """Write the status: durably at the end of a run, without sync every second while it runs."""
    write_whole(file, json.dumps(asdict(status)) + "\n", durable=not status.state.live)


FIELD_TYPES = {
    "attempt": int,
    "exit_code": int | None,
    "step": int | None,
    "checkpoint": str | None,
    "reason": str | None,
    "goodput": dict | None,
}


def read_status(file: Path) -> Status | None:
    """Return the status, or None if no run has begun or a power failure emptied the file of a running run.

    Raises:
        InputError: It is not a status that this toolkit wrote.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    if not text:
        return None
    try:
        fields = json.loads(text)
        wrong = [name for name, kinds in FIELD_TYPES.items() if not isinstance(fields.get(name), kinds)]
        if wrong:
            raise TypeError(f"{', '.join(wrong)} of another type")
        return Status(**{**fields, "state": RunState(fields["state"])})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            Problem(
                str(file),
                f"{file} cannot be read ({type(error).__name__}: {error})",
                f"{file.name} must be a file that a run of this toolkit wrote",
                f"move the file away: mv {file} {file}.damaged",
            )
        ) from error
