"""Read the files of a run's directory for the report.

The run may be in progress, failed, of an older version, or lack any file: missing data is empty or None, and
malformed data is ignored. Only downsampled data is stored, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError, Problem
from toolkit.goodput import SAVES, TIMES, AttemptTimes, read_times
from toolkit.monitor.report.curve_reader import (
    Advance,
    batch_progress,
    ignore_progress,
    is_number,
    read_curves,
    rows_with,
    step_bucket_width,
)
from toolkit.monitor.report.downsample import Curves, RunningStats, bucket_width, downsample
from toolkit.monitor.report.node_samples import NodeSamples, node_number, read_node
from toolkit.monitor.step_parts import BACKWARD, BUBBLE, FORWARD
from toolkit.paths import UnsafePath, check_links
from toolkit.progress import Progress
from toolkit.rows import float_of, read_rows

MAX_ALERTS = 200  # the newest of each file
NODE_POINTS = 2400  # of a metric, over all nodes together
LEAST_NODE_POINTS = 60
NODE_ROWS = 400_000  # samples to read of all nodes together, which takes a minute
LOG_BYTES = 4000  # at the end of a log
HANG_BYTES = 256_000  # of a hang report, which contains all ranks' stacks
# Folders that the report ignores. W&B's contain links to its cache: ``wandb``, and of other nodes
# ``nodes/*/wandb``.
NOT_READ = ("checkpoints", "export", "plots", "jobs", "wandb", "nodes")

# The keys of step rows, from ``observe/reporting.py: Metrics``; those of sources start with EPOCHS.
STEP_METRICS = frozenset(
    (
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "images",
        "step_seconds",
        "data_seconds",
        "tokens_per_second",
        "images_per_second",
        "samples_per_second",
        "tokens_per_second_per_gpu",
        "images_per_second_per_gpu",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "mfu",
        "hfu",
        "elapsed_seconds",
        "eta_seconds",
        "gpu_hours",
        "cost",
        "loss_scale",
        "skipped",
        "gc_seconds",
        "host_bytes",
        "device_bytes",
        "dropped_rows",
    )
)
EPOCHS = "epochs/"
PLANNED = frozenset(
    ("tokens", "images", "step_seconds", "device_bytes", "host_bytes", FORWARD, BACKWARD, BUBBLE)
)
ATTEMPT_SAMPLE = 4096  # values of one metric of one attempt from which the median is computed
RowMetrics = Callable[[Mapping[str, Any]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class LedgerCurves:
    """Attributes:
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
    """Attributes:
    began, ended: Unix times recorded by the attempt, or else the files' times, of which the last is that
        of the log.
    end: how it ended; empty if not recorded.
    start_seconds: from its start to the end of its first step.
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
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Attributes:
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
        return "images" if "images" in self.steps.totals else "tokens"

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


def read_run(
    folder: Path, progress: Progress, *, nodes: Sequence[Path] = (), now: Callable[[], float] = time.time
) -> ReportData:
    """Read a run's directory.

    Args:
        nodes: directories of the same run on disks of other nodes, of which only ``system/`` and ``alerts/``
            are read.

    Raises:
        InputError: a file is a link out of the run's directory, so the page would show another file's text.
    """
    for one in (folder, *nodes):
        _check_links(one)
    files = [folder / name for name in ("metrics.jsonl", "eval.jsonl", "ledger.jsonl", "alerts.jsonl")]
    system = {
        node_number(path): path
        for one in (folder, *nodes)
        for path in sorted((one / "system").glob("node-*.jsonl"))
    }
    size = sum(path.stat().st_size for path in (*files, *system.values()) if path.exists())
    status_file = folder / "status.json"
    attempts = tuple(_attempts(folder))
    attempt_stats = _AttemptStats(attempts)
    with (
        progress.task("reading the run's rows", total=size, unit="B") as task,
        batch_progress(task.advance) as advance,
    ):
        steps = read_curves(
            files[0], "step", attempt_stats.wrap(step_metrics), advance, width=step_bucket_width
        )
        evals = _evals(files[1], advance)
        ledger = _ledger(files[2], advance, attempt_stats)
        alerts = _alerts(
            [
                files[3],
                *(path for one in (folder, *nodes) for path in sorted((one / "alerts").glob("node-*.jsonl"))),
            ],
            advance,
        )
        points, rows = (
            max(LEAST_NODE_POINTS, limit // max(1, len(system))) for limit in (NODE_POINTS, NODE_ROWS)
        )
        measured = {
            number: read_node(path, advance, points=points, rows=rows)
            for number, path in sorted(system.items())
        }
    text = _text(folder / "config.yaml")
    return ReportData(
        folder=folder,
        read_at=now(),
        config_text=text,
        config=_yaml(text),
        plan=_object(folder / "plan.json"),
        status=_object(status_file),
        status_age=max(0.0, now() - status_file.stat().st_mtime) if status_file.exists() else None,
        steps=steps,
        evals=evals,
        ledger=ledger,
        alerts=alerts,
        nodes=measured,
        attempts=attempts,
        measured=attempt_stats.totals,
    )


def _check_links(folder: Path) -> None:
    try:
        check_links(folder, skip=NOT_READ)
    except UnsafePath as error:
        raise InputError(
            Problem(
                "run",
                f"{folder}: {error}",
                "a report reads the files of the run's own directory",
                "replace the link by the file itself",
            )
        ) from error


def mapping_at(mapping: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the nested mapping at ``keys``; empty if there is none."""
    for key in keys:
        value = mapping.get(key)
        if not isinstance(value, Mapping):
            return {}
        mapping = value
    return mapping


# ---- rows


class _AttemptStats:
    """Collects the planned metrics by attempt, over the steps of each. A run of one attempt needs no separate
    statistics.
    """

    def __init__(self, attempts: Sequence[AttemptRecord]) -> None:
        standing = effective_attempts(attempts)
        self._numbers = [attempt.number for attempt, _ in standing]
        self._firsts = [first for _, first in standing]
        self.totals: dict[int, dict[str, RunningStats]] = (
            {number: {} for number in self._numbers} if len(standing) > 1 else {}
        )

    def wrap(self, metrics: RowMetrics) -> RowMetrics:
        """Wrap ``metrics`` so that the planned ones are also added to the attempt of the row's step."""
        if not self.totals:
            return metrics

        def added(row: Mapping[str, Any]) -> Mapping[str, float]:
            found = metrics(row)
            index = bisect_left(self._firsts, row["step"]) - 1
            if index >= 0:
                totals = self.totals[self._numbers[index]]
                for name in PLANNED & found.keys():
                    totals.setdefault(name, RunningStats(ATTEMPT_SAMPLE)).add([found[name]])
            return found

        return added


def effective_attempts(attempts: Sequence[AttemptRecord]) -> list[tuple[AttemptRecord, int]]:
    """Return the attempts with steps that were not repeated, and the completed steps when each began."""
    found: list[tuple[AttemptRecord, int]] = []
    for attempt in attempts:
        if attempt.first is not None:
            found = [
                *((one, first) for one, first in found if first < attempt.first),
                (attempt, attempt.first),
            ]
    return found


def step_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    metrics = {
        name: float_of(value)
        for name, value in row.items()
        if (name in STEP_METRICS or name.startswith(EPOCHS))
        and (value is None or isinstance(value, int | float))
    }
    return {**metrics, "step": row["step"]}


def ledger_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    metrics = {"wall_seconds": row["wall_seconds"]} if is_number(row.get("wall_seconds")) else {}
    for name, spread in mapping_at(row, "parts").items():
        if isinstance(spread, list) and len(spread) == 3 and all(map(is_number, spread)):
            metrics |= {f"{name} min": spread[0], name: spread[1], f"{name} max": spread[2]}
    return metrics


def _evals(path: Path, advance: Advance) -> dict[str, Curves]:
    sets: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for row in rows_with(path, "step", advance):
        metrics: dict[str, float] = {
            name: float_of(row[name])
            for name in ("loss", "accuracy", "seconds")
            if name in row and (row[name] is None or is_number(row[name]))
        }
        sets.setdefault(str(row.get("set")), []).append((row["step"], metrics))
    return {
        name: downsample(rows, rows[0][0], bucket_width(rows[0][0], max(rows[0][0], rows[-1][0])))
        for name, rows in sorted(sets.items())
    }


def _ledger(path: Path, advance: Advance, attempt_stats: _AttemptStats) -> LedgerCurves:
    counters: dict[str, Counter[int]] = {"slowest_rank": Counter(), "data_rank": Counter()}
    excess, ranks = 0.0, 0

    def metrics(row: Mapping[str, Any]) -> dict[str, float]:
        nonlocal excess, ranks
        if isinstance(row.get("ranks"), int):
            ranks = max(ranks, row["ranks"])
        for key, counter in counters.items():
            if isinstance(row.get(key), int):
                counter[row[key]] += 1
        if is_number(row.get("slowest_busy_seconds")) and is_number(row.get("median_busy_seconds")):
            excess += row["slowest_busy_seconds"] - row["median_busy_seconds"]
        return ledger_metrics(row)

    curves = read_curves(path, "step", attempt_stats.wrap(metrics), advance, width=step_bucket_width)
    return LedgerCurves(curves, ranks, counters["slowest_rank"], counters["data_rank"], excess)


def _alerts(paths: Sequence[Path], advance: Advance) -> AlertRows:
    counts: Counter[tuple[str, str]] = Counter()
    newest: list[dict[str, Any]] = []
    for path in paths:
        last_rows: deque[dict[str, Any]] = deque(maxlen=MAX_ALERTS)
        for row in read_rows(path, advance):
            counts[str(row.get("level", "warning")), str(row.get("name", "unnamed"))] += 1
            last_rows.append(row)
        newest += last_rows
    return AlertRows(
        sorted(newest, key=lambda row: row["step"] if is_number(row.get("step")) else 0)[-MAX_ALERTS:], counts
    )


# ---- single files


def _attempts(folder: Path) -> Iterator[AttemptRecord]:
    root = folder / "attempts"
    numbers = (
        sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit()) if root.is_dir() else []
    )
    known = {
        "config.yaml",
        "plan.json",
        "log.txt",
        "handover.json",
        "environment.json",
        "probe.json",
        TIMES,
        SAVES,
    }
    for number in numbers:
        attempt_folder = root / f"{number:03d}"
        log = attempt_folder / "log.txt"
        repeated = read_curves(
            attempt_folder / "metrics.jsonl",
            "step",
            lambda row: {},
            ignore_progress,
            width=step_bucket_width,
            points=1,
        ).rows
        times = read_times(attempt_folder)
        yield AttemptRecord(
            number=number,
            began=times.began if times is not None else _modified(attempt_folder / "config.yaml"),
            ended=times.end if times is not None else _modified(log),
            end=_end(times),
            log_end=_text(log, LOG_BYTES),
            repeated=repeated,
            first=times.first if times is not None else None,
            plan=_object(attempt_folder / "plan.json"),
            config=_yaml(_text(attempt_folder / "config.yaml")),
            start_seconds=times.start_seconds if times is not None else None,
            environment=_object(attempt_folder / "environment.json"),
            probe=_object(attempt_folder / "probe.json"),
            hang=_text(attempt_folder / "hang.txt", HANG_BYTES),
            files=tuple(
                sorted(
                    path.relative_to(folder).as_posix()
                    for path in attempt_folder.glob("*")
                    if path.name not in known
                )
            ),
        )


def _end(times: AttemptTimes | None) -> str:
    if times is None or times.state is None:
        return ""
    return f"{times.state}: {times.reason}" if times.reason else str(times.state)


def _modified(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _text(path: Path, last_bytes: int | None = None) -> str:
    """Return the file's text, or the whole lines at its end; empty if there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - last_bytes) if last_bytes is not None else 0
        file.seek(skipped)
        text = file.read().decode("utf-8", errors="replace")
    return text.partition("\n")[2] if skipped else text


def _object(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or truncated."""
    try:
        value = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _yaml(text: str) -> Mapping[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
