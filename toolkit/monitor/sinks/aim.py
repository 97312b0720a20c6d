"""Aim: ``'+monitor.sinks.aim={}'``, then ``aim up``. The only module that imports aim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.monitor.sink import Kind, Row, Sink, SinkRun
from toolkit.monitor.sinks.columns import metric_columns
from toolkit.monitor.sinks.run_record import RunRecord


class AimSink(Sink):
    """Tracks one Aim run, also when the run is resumed. Rows of steps that it has are not tracked again.

    Args:
        repo: folder or URL of the Aim repository. Null: ``.aim`` in the working folder.
        experiment: Null: Aim's default.
    """

    def __init__(self, repo: str | None = None, experiment: str | None = None) -> None:
        import aim

        self._aim: Any = aim
        self._repo, self._experiment = repo, experiment
        self._run: Any = None

    def open(self, run: SinkRun) -> None:
        self._record = RunRecord(run.folder / "aim.json")
        self._run = self._aim.Run(
            run_hash=self._record.run_id,
            repo=self._repo,
            experiment=self._experiment,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        self._run.name = run.folder.name
        self._run["config"] = dict(run.config)
        self._record.run_id = self._run.hash
        self._record.write()

    def log(self, kind: Kind, row: Row) -> None:
        if not self._record.is_new(kind, row):
            return
        for name, value in metric_columns(kind, row).items():
            self._run.track(float(value), name=name, step=row["step"])
        self._record.logged(kind, row)

    def log_summary(self, name: str, value: str | float) -> None:
        self._run[name] = value

    def log_image(self, name: str, path: Path) -> None:
        self._run.track(self._aim.Image(str(path)), name=name)

    def flush(self) -> None:
        self._record.write()

    def close(self, exit_code: int) -> None:
        self._run["exit_code"] = exit_code
        self._run.close()
        self._record.write()
