"""What deserves a person's attention: the cause, what shows it, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    WARNING = "warning"  # the run goes on, and something about it is not as it should be
    ERROR = "error"  # the run's result is in doubt, or it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """
    Attributes:
        name: of the kind of trouble, ``data-stall``; alerts of one name and ``where`` are rate-limited together.
        where: what is at fault, as ``rank 3``, ``node 1, GPU 2`` or ``axis tensor``; empty: the run.
        cause: one sentence.
        evidence: the figures that show it, with units and what they are compared with.
        next_step: what a person should type or look at.
        lost_share: of the run's time, 0 to 1, that the trouble costs; 0: unknown, or it costs no time.
    """

    name: str
    level: Level
    step: int
    cause: str
    evidence: str
    next_step: str
    where: str = ""
    lost_share: float = 0.0

    def __str__(self) -> str:
        at = f" ({self.where})" if self.where else ""
        return f"step {self.step}: {self.name}{at}: {self.cause}\n    evidence:  {self.evidence}\n    next step: {self.next_step}"

    def row(self) -> dict[str, Any]:
        """As ``Kind.ALERT`` has it."""
        return asdict(self)

    @staticmethod
    def of(row: Mapping[str, Any]) -> Alert:
        """The alert of which ``row`` is; what others added to the row, or an older version did not write, does not matter."""
        return Alert(
            **{
                **{field.name: row[field.name] for field in fields(Alert) if field.name in row},
                "level": Level(row["level"]),
            }
        )
