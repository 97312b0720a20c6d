"""``status.json``: the truth of a run. Launchers change exit codes, this file does not."""

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
    STOPPED = "stopped"  # by a signal or a notice, after saving; where time was too short for that, the reason says what is lost
    FAILED = "failed"  # after training began also by a mistake (exit code 2), as of a full disk: steps are done, maybe saved
    REFUSED = "refused"  # a mistake in configuration or input, found after the folder was opened and before training began

    @property
    def live(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``exit_code`` is None while it runs. ``goodput`` is of the whole run until now, as ``toolkit/goodput.py`` describes it, and says
    nothing of how the run stands."""

    state: RunState
    attempt: int
    exit_code: int | None = None
    step: int | None = None  # optimizer steps done
    checkpoint: str | None = None  # the newest complete one
    reason: str | None = None
    goodput: Mapping[str, Any] | None = field(default=None, compare=False)


def write_status(file: Path, status: Status) -> None:
    """How a run ended is durable. A run under way writes every second and syncs nothing: who loses power has no run under way."""
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
    """None where no run has begun, or where a power failure emptied the status of a run under way.

    Raises:
        InputError: it is not what this toolkit writes.
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
                f"{file.name} is as a run of this toolkit wrote it",
                f"move the file away: mv {file} {file}.damaged",
            )
        ) from error
