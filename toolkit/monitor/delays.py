"""What keeps a rank's training thread from running, apart from what the thread does itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds since the rank began to measure, or in one step.

    Attributes:
        starved: the thread was ready to run and had no processor, since other threads or processes used it.
        stopped: no thread of the process ran: a signal stopped it, or its container or machine was paused.
        crowded: nearly all processors that the rank may use were busy, with whatever process. Neighbours share
            caches, memory bandwidth and, with hyperthreads, cores, so that a thread is slower although it has a
            processor.
    """

    starved: float = 0.0
    stopped: float = 0.0
    crowded: float = 0.0

    def __sub__(self, earlier: Delays) -> Delays:
        return Delays(
            starved=self.starved - earlier.starved,
            stopped=self.stopped - earlier.stopped,
            crowded=self.crowded - earlier.crowded,
        )


NO_DELAYS = Delays()
ReadDelays = Callable[[], Delays]
