"""How long each phase of a restart took: ``attempts/NNN/restart.json`` of the attempt that it started.

The supervisor, or torchrun's standby server, notes the failure and passes it on; rank 0 adds the phases until
its first step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolkit.files import write_whole

RESTART = "restart.json"


class RestartPhase(StrEnum):
    """Phases in order. Each ends where the next one begins."""

    DETECT = "detect"  # since all ranks were last seen alive, so an upper bound
    STOP = "stop"  # until all ranks of the failed attempt have ended
    PREPARE = "prepare"  # the next attempt is opened; with the delay after an attempt without progress
    START = "start"  # processes or standbys, imports, the plan
    RENDEZVOUS = "rendezvous"  # the store and the process group
    BUILD = "build"  # data, task, model, optimizer
    LOAD = "load"  # the state
    FIRST_STEP = "first step"


@dataclass(frozen=True, slots=True)
class RestartPhases:
    """The phases that have ended.

    Attributes:
        failed: when all ranks were last seen alive, in seconds since 1970.
        ends: when each phase ended, by phase in order.
        ranks, standbys: of the new attempt: its ranks on this machine, and how many of them had a standby.
    """

    failed: float
    ends: tuple[tuple[str, float], ...] = ()
    ranks: int = 1
    standbys: int = 0

    def ended(self, phase: RestartPhase, now: float | None = None) -> RestartPhases:
        """Return a copy in which ``phase`` ended at ``now`` (None: now)."""
        return replace(self, ends=(*self.ends, (phase.value, time.time() if now is None else now)))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase. A clock that was set back counts as no time."""
        result, began = {}, self.failed
        for phase, end in self.ends:
            result[phase] = max(0.0, end - began)
            began = end
        return result

    def describe(self) -> str:
        phases = self.seconds()
        listed = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
        standbys = f"{self.standbys} of {self.ranks} ranks had a standby"
        return f"restarted in {sum(phases.values()):.1f} s ({standbys}): {listed}"

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> RestartPhases:
        """Inverse of ``dataclasses.asdict`` after a way through JSON."""
        return RestartPhases(
            found["failed"],
            tuple((phase, end) for phase, end in found["ends"]),
            found["ranks"],
            found["standbys"],
        )


def write_restart(folder: Path, phases: RestartPhases) -> None:
    """Write the phases to an attempt's folder."""
    content = {**asdict(phases), "seconds": {name: round(took, 4) for name, took in phases.seconds().items()}}
    write_whole(folder / RESTART, json.dumps(content) + "\n", durable=False)


def read_restart(folder: Path) -> RestartPhases | None:
    """Read the phases; None if the attempt was not started by a restart, or did not reach its first step."""
    try:
        return RestartPhases.from_json(json.loads((folder / RESTART).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
