"""Alerts: what is wrong with a run, the evidence, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    WARNING = "warning"  # the run continues, but something needs attention
    ERROR = "error"  # the run's result is in doubt, or the run ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A problem that a person should act on.

    Attributes:
        name: the kind of problem, such as ``slow-steps``. Alerts of one name call for the same action.
        fault: which of the causes that ``name`` covers was detected, such as ``garbage-collection``; empty if
            there is only one. Alerts that agree in name, fault and ``where`` are rate-limited together.
        where: the faulty component: ``rank 3``, ``node 1, GPU 2`` or ``axis tensor``; empty for the run.
        cause: one sentence.
        evidence: the measurements, with units and the threshold or reference they are compared with.
        next_step: what to type or inspect next.
        lost_share: the fraction of the run's time that is lost, 0 to 1; 0 if unknown or none.
    """

    name: str
    fault: str = ""
    level: Level
    step: int
    cause: str
    evidence: str
    next_step: str
    where: str = ""
    lost_share: float = 0.0

    def __str__(self) -> str:
        at = f" ({self.where})" if self.where else ""
        return (
            f"step {self.step}: {self.name}{at}: {self.cause}\n    evidence:  {self.evidence}\n"
            f"    next step: {self.next_step}"
        )

    def to_row(self) -> dict[str, Any]:
        """Return the fields as a row of ``Kind.ALERT``."""
        return asdict(self)

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Alert:
        """Build an alert from a row. Unknown keys are ignored, missing optional keys get defaults."""
        return Alert(
            **{
                **{field.name: row[field.name] for field in fields(Alert) if field.name in row},
                "level": Level(row["level"]),
            }
        )
