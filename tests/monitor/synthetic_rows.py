"""Simulated rows of a run: four ranks, steps of a second with realistic noise, and faults from a step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.layout.axes import Axes
from toolkit.monitor.alert import Alert
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.ledger_rows import StepVectors, ledger_row, part_names
from toolkit.monitor.recorder import ThreadDelays, step_time
from toolkit.monitor.sink import Kind
from toolkit.step_parts import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    UNEXPLAINED,
    communication,
)

VECTORS = StepVectors(part_names(Axes(data=4)))
RANKS, SAVE, EVAL, GIB = 4, 100, 50, 2**30
STEP_SECONDS = 1.0


@dataclass
class Step:
    """One step, in seconds by rank. A fault changes it before it is converted to rows."""

    number: int
    parts: dict[str, np.ndarray]
    saved: np.ndarray = field(default_factory=lambda: np.zeros(RANKS))
    evaluated: float = 0.0
    gc_seconds: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    host_bytes: int = 0
    device_bytes: int = 0
    eval_loss: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
    starved: np.ndarray = field(default_factory=lambda: np.zeros(RANKS))  # contained in the parts
    stopped: np.ndarray = field(default_factory=lambda: np.zeros(RANKS))
    crowded: float = 0.0
    late: np.ndarray = field(
        default_factory=lambda: np.zeros(RANKS)
    )  # start of the step relative to the first rank

    def rows(self) -> Iterator[tuple[Kind, dict[str, Any]]]:
        """Convert to rows as the ranks' recorders and the ledger do."""
        name = communication("data")
        ready = self.late + sum(self.parts.values())
        parts = {
            **self.parts,
            name: self.parts[name] + ready.max() - ready,
        }  # the others wait for the last one
        step_seconds = float(ready.max() - self.late[0])
        yield (
            Kind.STEP,
            {
                "step": self.number,
                "loss": self.loss,
                "grad_norm": self.grad_norm,
                "lr": 1e-3,
                "tokens": 4096,
                "step_seconds": step_seconds,
                "data_seconds": float(parts[DATA].max()),
                "gc_seconds": self.gc_seconds,
                "host_bytes": self.host_bytes,
                "device_bytes": self.device_bytes,
                "tokens_per_second": 4096 / step_seconds,
                **self.more,
            },
        )
        parts |= {EVALUATION: np.full(RANKS, self.evaluated), CHECKPOINT: self.saved}
        delays = {"starved": self.starved, "stopped": self.stopped, "crowded": np.full(RANKS, self.crowded)}
        table = np.concatenate(
            [
                VECTORS.pack(
                    [
                        step_time(
                            self.number,
                            {part: float(seconds[rank]) for part, seconds in parts.items()},
                            ThreadDelays(
                                **{delay: float(seconds[rank]) for delay, seconds in delays.items()}
                            ),
                        )
                    ],
                    self.number,
                    1,
                )
                for rank in range(RANKS)
            ]
        )
        yield Kind.LEDGER, ledger_row(self.number, table, VECTORS.names)
        if self.evaluated:
            yield (
                Kind.EVAL,
                {
                    "step": self.number,
                    "set": "validation",
                    "loss": self.eval_loss,
                    "tokens": 4096,
                    "seconds": self.evaluated,
                },
            )


Fault = Callable[[Step, np.random.Generator], None]


def simulate_steps(
    seed: int, steps: int, fault: Fault | None = None, since: int = 0, noise: float = 0.08
) -> Iterator[Step]:
    """Simulate a healthy run, with a fault from step ``since`` on.

    Times are lognormal and one step in a hundred takes three times as long. Saves, evaluations and garbage
    collections occur occasionally. The loss falls with noise, gradient norms have a heavy tail. Memory grows
    while caches fill, and jumps with the first save.
    """
    random = np.random.default_rng(seed)
    means = {
        DATA: 0.005,
        FORWARD: 0.25,
        BACKWARD: 0.5,
        OPTIMIZER: 0.08,
        communication("data"): 0.15,
        LOGGING: 0.002,
        UNEXPLAINED: 0.01,
    }
    late = np.zeros(RANKS)
    for number in range(1, steps + 1):
        common = random.lognormal(0, noise) * (3.0 if random.random() < 0.01 else 1.0)
        parts = {
            name: seconds * common * random.lognormal(0, 1.0 if name == DATA else 0.05, RANKS)
            for name, seconds in means.items()
        }
        falling = 3.0 + 4.0 * math.exp(-number / 300)
        step = Step(
            number,
            parts,
            saved=np.full(RANKS, 1.5 * random.lognormal(0, 0.2) if number % SAVE == 0 else 0.0001),
            late=late,
            evaluated=2.0 * random.lognormal(0, 0.1) if number % EVAL == 0 else 0.0,
            gc_seconds=0.04 if number % 100 == 7 else 0.0002,
            loss=falling + random.normal(0, 0.04),
            grad_norm=0.5 * random.lognormal(0, 0.25),
            host_bytes=int(
                4 * GIB
                + 0.3 * GIB * (1 - math.exp(-number / 40))
                + (GIB if number >= SAVE else 0)
                + random.normal(0, 4e6)
            ),
            device_bytes=40 * GIB + (number % 7) * 2**20,
            eval_loss=falling + 0.1 + random.normal(0, 0.01),
        )
        if fault is not None and number >= since:
            fault(step, random)
        late = step.saved - step.saved.min()
        yield step


def alerts_of(detectors: list[Detector], steps: Iterator[Step]) -> list[Alert]:
    """Return all alerts of the detectors, before the rate limit."""
    found: list[Alert] = []
    for step in steps:
        for kind, row in step.rows():
            for detector in detectors:
                if kind in detector.kinds and (alert := detector.check(kind, row)) is not None:
                    found.append(alert)
    return found
