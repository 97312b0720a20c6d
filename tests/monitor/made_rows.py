"""Rows of a run that never was: four ranks, steps of 0.2 s with the noise of real ones, and faults from a step on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.monitor.alert import Alert
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.parts import BACKWARD, CHECKPOINT, DATA, EVALUATION, FORWARD, LOGGING, OPTIMIZER, UNEXPLAINED, communication
from toolkit.monitor.sink import Kind

RANKS, SAVE, EVAL, GIB = 4, 100, 50, 2**30
STEP_SECONDS = 0.2


@dataclass
class Step:
    """What happened in one step; a fault changes it before rows are made of it. Seconds are by rank."""

    number: int
    parts: dict[str, np.ndarray]
    saved: float = 0.0
    evaluated: float = 0.0
    gc_seconds: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0
    host_bytes: int = 0
    device_bytes: int = 0
    eval_loss: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[Kind, dict[str, Any]]]:
        own = sum(seconds for name, seconds in self.parts.items() if not name.startswith("communication"))
        needed = own + sum(seconds for name, seconds in self.parts.items() if name.startswith("communication"))
        wait = needed.max() - needed  # for the slowest, in the last collective
        name = communication("data")
        parts = {**self.parts, name: self.parts[name] + wait}
        busy = own - parts[DATA]
        step_seconds = float(needed.max())
        yield Kind.STEP, {
            "step": self.number, "loss": self.loss, "grad_norm": self.grad_norm, "lr": 1e-3, "tokens": 4096, "step_seconds": step_seconds,
            "data_seconds": float(parts[DATA].max()), "gc_seconds": self.gc_seconds, "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes, "tokens_per_second": 4096 / step_seconds, **self.more}
        around = {EVALUATION: self.evaluated, CHECKPOINT: self.saved}
        parts |= {name: np.full(RANKS, seconds) for name, seconds in around.items() if seconds}
        yield Kind.LEDGER, {
            "step": self.number, "ranks": RANKS, "wall_seconds": step_seconds + sum(around.values()),
            "parts": {name: [float(of.min()), float(np.median(of)), float(of.max())] for name, of in parts.items()},
            "slowest_rank": int(busy.argmax()), "slowest_busy_seconds": float(busy.max()), "median_busy_seconds": float(np.median(busy)),
            "data_rank": int(parts[DATA].argmax()), "unexplained_share": 0.01}
        if self.evaluated:
            yield Kind.EVAL, {"step": self.number, "set": "validation", "loss": self.eval_loss, "tokens": 4096, "seconds": self.evaluated}


Fault = Callable[[Step, np.random.Generator], None]


def steps_of(seed: int, steps: int, fault: Fault | None = None, since: int = 0, noise: float = 0.08) -> Iterator[Step]:
    """Lognormal times; one step in a hundred takes three times as long; saves, evaluations, collections of garbage now and then; the
    loss falls and scatters, gradient norms have a heavy tail; memory grows while caches fill, and jumps with the first save."""
    random = np.random.default_rng(seed)
    means = {DATA: 0.001, FORWARD: 0.05, BACKWARD: 0.1, OPTIMIZER: 0.015, communication("data"): 0.03, LOGGING: 0.0005, UNEXPLAINED: 0.002}
    for number in range(1, steps + 1):
        common = random.lognormal(0, noise) * (3.0 if random.random() < 0.01 else 1.0)
        parts = {name: seconds * common * random.lognormal(0, 1.0 if name == DATA else 0.05, RANKS) for name, seconds in means.items()}
        falling = 3.0 + 4.0 * math.exp(-number / 300)
        step = Step(
            number, parts,
            saved=1.5 * random.lognormal(0, 0.2) if number % SAVE == 0 else 0.0001,
            evaluated=2.0 * random.lognormal(0, 0.1) if number % EVAL == 0 else 0.0,
            gc_seconds=0.04 if number % 100 == 7 else 0.0002,
            loss=falling + random.normal(0, 0.04), grad_norm=0.5 * random.lognormal(0, 0.25),
            host_bytes=int(4 * GIB + 0.3 * GIB * (1 - math.exp(-number / 40)) + (GIB if number >= SAVE else 0) + random.normal(0, 4e6)),
            device_bytes=40 * GIB + (number % 7) * 2**20,
            eval_loss=falling + 0.1 + random.normal(0, 0.01))
        if fault is not None and number >= since:
            fault(step, random)
        yield step


def alerts_of(detectors: list[Detector], steps: Iterator[Step]) -> list[Alert]:
    """All that the detectors say, before anybody limits how often."""
    found: list[Alert] = []
    for step in steps:
        for kind, row in step.rows():
            for detector in detectors:
                if kind in detector.kinds and (alert := detector.see(kind, row)) is not None:
                    found.append(alert)
    return found
