"""How far the machines' clocks are apart, asked through the store in which the ranks meet.

Cristian's algorithm: the first machine tells its time between two readings of the asking one's clock; it was told about half-way, and
half of the way there and back bounds the error. Of several rounds the fastest one counts (Cristian, Distributed Computing 3, 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

ROUNDS = 5
ANSWER_SECONDS = 60.0  # both are there, with nothing else to do
TURN_SECONDS = 300.0  # the first machine hears of all others before, also of one that starts late; and they have their turns

Clock = Callable[[], float]


class KeyValueStore(Protocol):
    """Of torch.distributed's stores, what is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """``seconds``: this machine's clock less the first one's, give or take ``error_seconds``."""

    seconds: float
    error_seconds: float


def serve_time(store: KeyValueStore, node: int, now: Clock = time.time) -> None:
    """On the first machine: answer ``node``'s questions. Raises torch's error of a time-out where it does not ask."""
    for turn in range(ROUNDS):
        _wait(store, f"clock/{node}/{turn}/asked", ANSWER_SECONDS)
        store.set(f"clock/{node}/{turn}/told", repr(now()))


def measure_offset(store: KeyValueStore, node: int, now: Clock = time.time) -> ClockOffset:
    """On machine ``node``, at the same time."""
    found = []
    for turn in range(ROUNDS):
        began = now()
        store.set(f"clock/{node}/{turn}/asked", "")
        _wait(store, f"clock/{node}/{turn}/told", ANSWER_SECONDS if turn else TURN_SECONDS)
        ended = now()
        told = float(store.get(f"clock/{node}/{turn}/told"))
        found.append(ClockOffset((began + ended) / 2 - told, (ended - began) / 2))
    return min(found, key=lambda offset: offset.error_seconds)


def _wait(store: KeyValueStore, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=seconds))
