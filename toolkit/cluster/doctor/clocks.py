"""Measure clock offsets between machines through the rendezvous store.

Cristian's algorithm: the first machine reports its time between two readings of the requester's clock. The
report is assumed to be half-way between them, and half the round-trip time bounds the error. The fastest of
several rounds counts (Cristian, Distributed Computing 3, 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

ROUNDS = 5
ANSWER_SECONDS = 60.0  # both machines are ready, with nothing else to do
# the first machine receives all reports before this, including late ones, and serves the machines in turn
TURN_SECONDS = 300.0

Clock = Callable[[], float]


class KeyValueStore(Protocol):
    """The part of torch.distributed's stores that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """``seconds``: this machine's clock minus the first machine's, ± ``error_seconds``."""

    seconds: float
    error_seconds: float


def serve_time(store: KeyValueStore, node: int, now: Clock = time.time) -> None:
    """Answer the requests of ``node``; runs on the first machine. Raises torch's timeout error if none
    arrive.
    """
    for round_index in range(ROUNDS):
        _wait(store, f"clock/{node}/{round_index}/request", ANSWER_SECONDS)
        store.set(f"clock/{node}/{round_index}/time", repr(now()))


def measure_offset(store: KeyValueStore, node: int, now: Clock = time.time) -> ClockOffset:
    """Measure this machine's offset; runs on machine ``node`` while the first machine serves it."""
    offsets = []
    for round_index in range(ROUNDS):
        began = now()
        store.set(f"clock/{node}/{round_index}/request", "")
        _wait(store, f"clock/{node}/{round_index}/time", ANSWER_SECONDS if round_index else TURN_SECONDS)
        ended = now()
        reported = float(store.get(f"clock/{node}/{round_index}/time"))
        offsets.append(ClockOffset((began + ended) / 2 - reported, (ended - began) / 2))
    return min(offsets, key=lambda offset: offset.error_seconds)


def _wait(store: KeyValueStore, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=seconds))
