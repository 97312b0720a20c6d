"""The files of a sweep: ``sweep.json``, and the claims on its points.

    sweeps/quickstart-1f2e3d4c/
        sweep.json results.csv sweep.png          all points, best first
        claims/                                   one lock per point, held by its processes
        zero-stage1-tensor-2-5a6b7c8d/            run directory of a point; its status.json decides

Several processes may run one sweep; each accesses ``sweep.json`` under a lock. Its states are for the table
only: whether a point is done is read from the point's ``status.json``.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolkit.cluster.sweep.points import SweepPoint
from toolkit.config.schema import RunConfig
from toolkit.config.sweep import SweepSection
from toolkit.errors import ConfigError, ExitCode, Problem
from toolkit.files import write_whole
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.lock import acquire_lock
from toolkit.rundir.status import RunState, Status

FORMAT_VERSION = 1


class PointState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"  # or waiting in the queue of a cluster
    DONE = "done"
    STOPPED = "stopped"  # after saving: the same command resumes it
    FAILED = "failed"
    DIVERGED = "diverged"  # a loss, gradient or weight is infinite or NaN
    REFUSED = "refused"  # by its plan, or when it started


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRow:
    """A point in ``sweep.json``. ``number``: the value for comparison; ``ended``: Unix time of its last
    end.
    """

    name: str
    swept: list[str]
    words: list[str]
    run_dir: str
    state: PointState
    reason: str | None = None
    number: float | None = None
    step: int | None = None
    attempt: int | None = None
    ended: float | None = None


class SweepStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._claims = folder / "claims"

    @property
    def file(self) -> Path:
        return self.folder / "sweep.json"

    # ---- sweep.json

    def check_owner(self, id: str, words: Sequence[str]) -> None:
        """Reject the folder of another sweep. Raises ConfigError."""
        stored = self._read()
        if stored is not None and stored["id"] != id:
            raise ConfigError(
                Problem(
                    "sweep.dir",
                    f"sweep.dir={self.folder}, which contains the sweep: {' '.join(stored['words'])}",
                    "a folder belongs to one sweep",
                    "remove sweep.dir, or choose another folder",
                )
            )

    def initialize(self, id: str, words: Sequence[str], options: SweepSection) -> None:
        self._claims.mkdir(parents=True, exist_ok=True)
        with self._locked():
            rows = (self._read() or {"points": []})["points"]
            self._write(
                {
                    "format_version": FORMAT_VERSION,
                    "id": id,
                    "words": list(words),
                    "metric": options.metric,
                    "maximize": options.maximize,
                    "points": rows,
                }
            )

    def add_points(self, rows: Sequence[PointRow]) -> None:
        """Add the points of a batch, waiting or refused; keep the rows of points that were started, possibly
        on another machine.
        """
        with self._locked():
            known = {row.name: row.state for row in self.rows()}
            self._put(
                row
                for row in rows
                if known.get(row.name) in (None, PointState.REFUSED)
                or (row.state is PointState.REFUSED and known[row.name] is not PointState.DONE)
            )

    def rows(self) -> list[PointRow]:
        """Return the rows in the order in which the points were created."""
        return [
            PointRow(**{**row, "state": PointState(row["state"])})
            for row in (self._read() or {"points": []})["points"]
        ]

    def update(self, *rows: PointRow) -> None:
        """Replace the rows of these points."""
        with self._locked():
            self._put(rows)

    def _put(self, rows: Iterable[PointRow]) -> None:
        stored = self._read()
        assert stored is not None, "initialize() comes first"
        known = {row["name"]: row for row in stored["points"]} | {row.name: asdict(row) for row in rows}
        self._write({**stored, "points": list(known.values())})

    def _read(self) -> dict[str, Any] | None:
        return json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else None

    def _write(self, content: Mapping[str, Any]) -> None:
        write_whole(self.file, json.dumps(content, indent=1) + "\n", durable=False)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        file = os.open(self._claims / "sweep", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    # ---- claims

    def claim(self, name: str) -> int | None:
        """Lock a point and return the descriptor, which child processes inherit; None: another process holds
        it.

        The kernel releases the claim when its last owner dies.
        """
        return acquire_lock(self._claims / f"{name}.lock")[0]


# ---- results


def make_row(
    point: SweepPoint, folder: Path, state: PointState, reason: str | None = None, **more: Any
) -> PointRow:
    return PointRow(
        name=point.name,
        swept=list(point.swept),
        words=list(point.words),
        run_dir=str(folder / point.name),
        state=state,
        reason=reason,
        **more,
    )


def read_result(
    point: SweepPoint,
    folder: Path,
    metric: str | None,
    *,
    before: Status | None = None,
    silent: str | None = None,
    asked: bool = False,
) -> PointRow:
    """Read the result of a point whose process has ended from its files.

    Args:
        before: its status when it was started; if unchanged, the process ended without recording anything.
        silent: description of the end in that case.
        asked: a stop was requested.
    """
    assert point.plan is not None, "it was started"
    directory = RunDirectory(folder / point.name)
    status = directory.status()
    if status is None or (status == before and status.state is not RunState.DONE):
        state, why = (
            (PointState.STOPPED, "stopped before it started") if asked else (PointState.FAILED, silent)
        )
        return make_row(point, folder, state, why, ended=time.time())
    ends = {
        RunState.DONE: PointState.DONE,
        RunState.STOPPED: PointState.STOPPED,
        RunState.REFUSED: PointState.REFUSED,
    }
    diverged = status.exit_code == ExitCode.DIVERGED
    state = PointState.DIVERGED if diverged else ends.get(status.state, PointState.FAILED)
    reason = status.reason or (silent or "it ended without recording a reason" if status.state.live else None)
    number = read_metric(directory, point.plan.config, metric) if state is PointState.DONE else None
    if state is PointState.DONE and number is None:
        reason = f"no {metric or 'loss'} in its eval.jsonl or metrics.jsonl: not compared"
    return make_row(
        point,
        folder,
        state,
        reason,
        number=number,
        step=status.step,
        attempt=status.attempt,
        ended=time.time(),
    )


def is_done(point: SweepPoint) -> bool:
    """Return whether the point is done with all its steps; the experiment's file may have increased them
    since.
    """
    assert point.plan is not None
    status = RunDirectory(point.plan.run_dir).status()
    return (
        status is not None
        and status.state is RunState.DONE
        and (status.step or 0) >= point.plan.config.train.steps
    )


def read_metric(directory: RunDirectory, config: RunConfig, metric: str | None) -> float | None:
    """Return the value by which points are compared; None if it is missing or not finite."""
    evaluated = [row for row in read_rows(directory.eval_file) if "loss" in row]
    steps = list(read_rows(directory.metrics_file))
    name = metric or (config.eval.sets[0] if config.eval.every and config.eval.sets else None)
    losses = [
        row["loss"]
        for row in (evaluated if name is not None else steps)
        if (name is None or row["set"] == name) and "loss" in row
    ]
    if losses:
        value = losses[-1]
    else:
        values = (
            [row[name] for row in steps[min(1, len(steps) - 1) :] if row.get(name) is not None]
            if name is not None
            else []
        )
        value = statistics.median(values) if values else None
    return value if isinstance(value, int | float) and abs(value) < float("inf") else None
