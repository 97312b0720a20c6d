"""The cost of a step over all ranks, corrected for a busy host.

Ranks wait for each other, so the ledger shows one rank's delay in the communication of all others, often in
the next step: after a slow save on rank 0, the others wait in their next collective. A step's cost is
therefore the computing of the slowest rank plus, for each axis' communication, the wait of the rank that
waited least, because the rank that causes a wait does not wait itself. Waits for samples, saves and
evaluations have their own alerts and are left out.

On a host with oversubscribed processors, times become comparable by two corrections: the time in which a rank
was ready to run but had no processor is subtracted, and while nearly all processors are busy the rest counts
half, because neighbours that share caches, memory bandwidth or a core make a thread up to twice as slow. Only
the judged time is corrected, never the reference, so that a correction cannot cause an alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.monitor.sink import Row
from toolkit.step_parts import BUBBLE, COMMUNICATION

CROWDED_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step, or of several joined steps.

    Attributes:
        samples: samples of the step, over all ranks.
        computing: computing of the slowest rank, without ``starved``.
        waits: communication by axis, and bubble, of the rank that waited least.
        starved: seconds without a processor, of the rank with the most.
        crowded: whether the processors of a host were busy for most of the time.
    """

    samples: int
    computing: float
    waits: Mapping[str, float]
    starved: float
    crowded: bool

    @property
    def measured(self) -> float:
        return self.computing + self.starved + sum(self.waits.values())

    @property
    def least(self) -> float:
        """The seconds that the step would at least have taken on an idle host."""
        return self.corrected(self.computing) + self.corrected(sum(self.waits.values()), starved=self.starved)

    def corrected(self, seconds: float, starved: float = 0.0) -> float:
        """Return a lower bound of the part of ``seconds`` that the run itself caused."""
        return max(0.0, seconds - starved) / (CROWDED_FACTOR if self.crowded else 1.0)


def cost_of_row(row: Row, samples: int, explained: float = 0.0) -> StepCost:
    """Compute the cost of one step.

    Args:
        row: a row of ``Kind.LEDGER``.
        explained: seconds of the slowest rank's computing that another alert covers.
    """
    return StepCost(
        samples=samples,
        computing=max(0.0, row["slowest_busy_seconds"] - explained),
        waits={name: low for name, (low, _, _) in row["parts"].items() if not is_computing(name)},
        starved=read_delay(row, "starved")[0],
        crowded=read_delay(row, "crowded")[0] > row["wall_seconds"] / 2,
    )


def read_delay(row: Row, name: str) -> tuple[float, int]:
    """Return one of the row's delays: its largest value over ranks, in seconds, and the rank that has it."""
    seconds, rank = row.get("delays", {}).get(name, (0.0, 0))
    return seconds, rank


def is_computing(part: str) -> bool:
    return part != BUBBLE and not part.startswith(COMMUNICATION)
