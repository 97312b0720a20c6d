"""The data of a run from which the sections of the report are built. ``run_reader.py`` reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.monitor.report.downsample import Curves, RunningStats
from toolkit.monitor.report.node_samples import NodeSamples

MAX_ALERTS = 200  # the newest of each file


@dataclass(frozen=True, slots=True)
class LedgerCurves:
    """The ledger of a run as curves, and which ranks the others waited for.

    Attributes:
        curves: ``wall_seconds``, and of each part ``NAME`` (the median rank's seconds), ``NAME min`` and
            ``NAME max``.
        ranks: the maximal number of ranks that sent their times.
        slowest: how often each rank was the slowest one.
        starved: how often each rank waited longest for its samples.
        excess_seconds: how much longer the slowest rank was busy than the median rank, over all steps.
    """

    curves: Curves
    ranks: int
    slowest: Counter[int]
    starved: Counter[int]
    excess_seconds: float

    @property
    def parts(self) -> list[str]:
        """The parts that took time, by total time."""
        known = (name for name in self.curves.totals if f"{name} max" in self.curves.totals)
        return sorted(known, key=lambda name: -self.curves.total(name).sum)

    def share(self, part: str) -> float:
        """Return the median rank's share of the part in the time of all steps."""
        wall = self.curves.total("wall_seconds").sum
        return self.curves.total(part).sum / wall if wall else 0.0


@dataclass(frozen=True, slots=True)
class AlertRows:
    """The newest alerts as rows, and the number of alerts by (level, name)."""

    rows: list[dict[str, Any]]
    counts: Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """The records in the files of one attempt.

    Attributes:
        began, ended: Unix times recorded by the attempt, or else the files' times, of which the last is that
            of the log.
        end: how it ended; empty if not recorded.
        start_seconds: from its start to the end of its first step.
        restart: the phases of the restart that started it, in one line; None if a user started it.
        first: completed steps when it began to train.
        repeated: its steps that a later attempt repeated.
        plan, config: as resolved at its start.
        files: other files of the attempt, relative to the run's directory.
    """

    number: int
    began: float | None
    ended: float | None
    end: str
    start_seconds: float | None
    log_end: str
    first: int | None
    repeated: int
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    probe: Mapping[str, Any]
    hang: str
    restart: str | None
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything that the report shows of one run.

    Attributes:
        status_age: seconds since ``status.json`` was written; None if there is none.
        evals: curves of ``loss``, ``accuracy`` and ``seconds`` by set.
        nodes: by number.
        measured: by attempt, over its steps that were not repeated: the metrics of steps, and the median
            rank's seconds of each part of the ledger.
    """

    folder: Path
    read_at: float
    config_text: str
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    status: Mapping[str, Any]
    status_age: float | None
    steps: Curves
    evals: dict[str, Curves]
    ledger: LedgerCurves
    alerts: AlertRows
    nodes: dict[int, NodeSamples]
    attempts: tuple[AttemptRecord, ...]
    measured: Mapping[int, Mapping[str, RunningStats]]

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def unit(self) -> str:
        """The unit of throughput."""
        return next((unit for unit in ("tokens", "images") if unit in self.steps.totals), "samples")

    @property
    def step(self) -> int:
        """Completed steps, by rows or status, whichever is newer."""
        last = int(self.steps.total("step").last or 0)
        reported = self.status.get("step")
        return max(last, reported) if isinstance(reported, int) else last

    @property
    def planned_steps(self) -> int | None:
        steps = mapping_at(self.config, "train").get("steps")
        return steps if isinstance(steps, int) else None


def effective_attempts(attempts: Sequence[AttemptRecord]) -> list[tuple[AttemptRecord, int]]:
    """Return the attempts with steps that were not repeated, and the completed steps when each began."""
    effective: list[tuple[AttemptRecord, int]] = []
    for attempt in attempts:
        if attempt.first is not None:
            effective = [
                *((attempt_before, first) for attempt_before, first in effective if first < attempt.first),
                (attempt, attempt.first),
            ]
    return effective


def mapping_at(mapping: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the nested mapping at ``keys``; empty if there is none."""
    for key in keys:
        value = mapping.get(key)
        if not isinstance(value, Mapping):
            return {}
        mapping = value
    return mapping
