"""Read the files of a run's directory for the report.

The run may be in progress, failed, of an older version, or lack any file: missing data is empty or None, and
malformed data is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError, Problem
from toolkit.goodput import SAVES, TIMES, AttemptTimes, read_times
from toolkit.monitor.report.curve_reader import (
    batch_progress,
    ignore_progress,
    read_curves,
    step_bucket_width,
)
from toolkit.monitor.report.node_samples import node_number, read_node
from toolkit.monitor.report.run_curves import (
    AttemptStats,
    read_alerts,
    read_eval_curves,
    read_ledger_curves,
    step_metrics,
)
from toolkit.monitor.report.run_data import AttemptRecord, ReportData
from toolkit.paths import UnsafePath, check_links
from toolkit.progress import Progress
from toolkit.restart_phases import RESTART, read_restart

NODE_POINTS = 2400  # of a metric, over all nodes together
LEAST_NODE_POINTS = 60
NODE_ROWS = 400_000  # samples to read of all nodes together, which takes a minute
LOG_BYTES = 4000  # at the end of a log
HANG_BYTES = 256_000  # of a hang report, which contains all ranks' stacks
# Folders that the report ignores. W&B's contain links to its cache: ``wandb``, and of other nodes
# ``nodes/*/wandb``.
NOT_READ = ("checkpoints", "export", "plots", "jobs", "wandb", "nodes")


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
    for root in (folder, *nodes):
        _check_links(root)
    files = [folder / name for name in ("metrics.jsonl", "eval.jsonl", "ledger.jsonl", "alerts.jsonl")]
    system = {
        node_number(path): path
        for root in (folder, *nodes)
        for path in sorted((root / "system").glob("node-*.jsonl"))
    }
    size = sum(path.stat().st_size for path in (*files, *system.values()) if path.exists())
    status_file = folder / "status.json"
    attempts = tuple(_read_attempts(folder))
    attempt_stats = AttemptStats(attempts)
    with (
        progress.task("reading the run's rows", total=size, unit="B") as task,
        batch_progress(task.advance) as advance,
    ):
        steps = read_curves(
            files[0], "step", attempt_stats.wrap(step_metrics), advance, width=step_bucket_width
        )
        evals = read_eval_curves(files[1], advance)
        ledger = read_ledger_curves(files[2], advance, attempt_stats)
        alerts = read_alerts(
            [
                files[3],
                *(
                    path
                    for root in (folder, *nodes)
                    for path in sorted((root / "alerts").glob("node-*.jsonl"))
                ),
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
    text = _read_text(folder / "config.yaml")
    return ReportData(
        folder=folder,
        read_at=now(),
        config_text=text,
        config=_parse_yaml(text),
        plan=_read_json(folder / "plan.json"),
        status=_read_json(status_file),
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


def _read_attempts(folder: Path) -> Iterator[AttemptRecord]:
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
        RESTART,
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
            began=times.began if times is not None else _modification_time(attempt_folder / "config.yaml"),
            ended=times.end if times is not None else _modification_time(log),
            end=_describe_end(times),
            log_end=_read_text(log, LOG_BYTES),
            repeated=repeated,
            first=times.first if times is not None else None,
            plan=_read_json(attempt_folder / "plan.json"),
            config=_parse_yaml(_read_text(attempt_folder / "config.yaml")),
            start_seconds=times.start_seconds if times is not None else None,
            environment=_read_json(attempt_folder / "environment.json"),
            probe=_read_json(attempt_folder / "probe.json"),
            hang=_read_text(attempt_folder / "hang.txt", HANG_BYTES),
            restart=None if (phases := read_restart(attempt_folder)) is None else phases.describe(),
            files=tuple(
                sorted(
                    path.relative_to(folder).as_posix()
                    for path in attempt_folder.glob("*")
                    if path.name not in known
                )
            ),
        )


def _describe_end(times: AttemptTimes | None) -> str:
    if times is None or times.state is None:
        return ""
    return f"{times.state}: {times.reason}" if times.reason else str(times.state)


def _modification_time(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _read_text(path: Path, last_bytes: int | None = None) -> str:
    """Return the file's text, or the whole lines at its end; empty if there is no file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        skipped = max(0, path.stat().st_size - last_bytes) if last_bytes is not None else 0
        file.seek(skipped)
        text = file.read().decode("utf-8", errors="replace")
    return text.partition("\n")[2] if skipped else text


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or truncated."""
    try:
        value = json.loads(_read_text(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _parse_yaml(text: str) -> Mapping[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
