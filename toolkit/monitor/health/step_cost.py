"""What a step cost, over all ranks, without what explains itself; and what it would at least have cost on an
idle host.

Ranks wait for each other, so the ledger shows one rank's delay in the communication of all others, often in
the next step: after a save that is slow on rank 0, the others wait in their next collective. A step's cost is
therefore the computing of the slowest rank and, of each axis' communication, the wait of the rank that waited
least: the rank that causes a wait does not wait itself. Samples, saves and evaluations have alerts of their
own and are left out.

On a host whose processors are oversubscribed, times say little about the run. Two rules make them comparable.
Time in which a rank was ready to run and had no processor is taken out. While nearly all processors are busy,
the rest counts half: neighbours that share caches, memory bandwidth or a core make a thread up to twice as
slow. Only what is judged is corrected. What it is compared with never is, so that too much correction cannot
produce an alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.monitor.sink import Row
from toolkit.monitor.step_parts import BUBBLE, COMMUNICATION

CROWDED_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step, or of several joined ones.

    Attributes:
        samples: of the step, over all ranks.
        computing: of the slowest rank, without ``starved``.
        waits: communication by axis, and bubble, of the rank that waited least.
        starved: of the rank that was starved most.
        crowded: the processors of a host were busy for most of the time.
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
        """Seconds that the step would at least have taken on an idle host."""
        return self.corrected(self.computing) + self.corrected(sum(self.waits.values()), starved=self.starved)

    def corrected(self, seconds: float, starved: float = 0.0) -> float:
        """At least so much of ``seconds`` is the run's own doing."""
        return max(0.0, seconds - starved) / (CROWDED_FACTOR if self.crowded else 1.0)


def cost_of_row(row: Row, samples: int, explained: float = 0.0) -> StepCost:
    """
    Args:
        row: of ``Kind.LEDGER``.
        explained: seconds of the slowest rank's computing that another alert is about.
    """
    return StepCost(
        samples=samples,
        computing=max(0.0, row["slowest_busy_seconds"] - explained),
        waits={name: low for name, (low, _, _) in row["parts"].items() if not is_computing(name)},
        starved=read_delay(row, "starved")[0],
        crowded=read_delay(row, "crowded")[0] > row["wall_seconds"] / 2,
    )


def read_delay(row: Row, name: str) -> tuple[float, int]:
    """Seconds of one of the ``Delays`` in a step, of the rank that had most, and that rank."""
    seconds, rank = row.get("delays", {}).get(name, (0.0, 0))
    return seconds, rank


def is_computing(part: str) -> bool:
    return part != BUBBLE and not part.startswith(COMMUNICATION)
