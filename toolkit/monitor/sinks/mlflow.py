"""MLflow: ``'+monitor.sinks.mlflow={}'``. The only module that imports mlflow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from toolkit.errors import ExitCode
from toolkit.monitor.sink import Kind, Row, Sink, SinkRun
from toolkit.monitor.sinks.columns import metric_columns
from toolkit.monitor.sinks.run_record import RunRecord

PARAMETER_CHARACTERS = 6000  # MLflow's limit
PARAMETERS_AT_ONCE = 100  # of one request


class MlflowSink(Sink):
    """Logs to one MLflow run, also when the run is resumed. Rows of steps that it has are not logged again.

    Args:
        tracking_uri: Null: MLFLOW_TRACKING_URI, or MLflow's default.
        experiment: created if it does not exist.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "toolkit") -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment, self._step = experiment, 0

    def open(self, run: SinkRun) -> None:
        client = self._client
        self._record = RunRecord(run.folder / "mlflow.json")
        self._step = run.first_step
        if self._record.run_id is not None:
            client.update_run(self._record.run_id, status="RUNNING")
            return
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self._experiment)
        self._record.run_id = client.create_run(experiment, run_name=run.folder.name).info.run_id
        self._record.write()
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:PARAMETER_CHARACTERS])
            for name, value in _flat(run.config)
        ]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            client.log_batch(self._record.run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])

    def log(self, kind: Kind, row: Row) -> None:
        if not self._record.is_new(kind, row):
            return
        self._step, now = row["step"], int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(name, float(value), now, row["step"])
            for name, value in metric_columns(kind, row).items()
        ]
        self._client.log_batch(self._record.run_id, metrics=metrics)
        self._record.logged(kind, row)

    def log_summary(self, name: str, value: str | float) -> None:
        self._client.set_tag(self._record.run_id, name, value)

    def log_image(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._record.run_id, str(path))

    def flush(self) -> None:
        self._record.write()

    def close(self, exit_code: int) -> None:
        status = {ExitCode.DONE: "FINISHED", ExitCode.STOPPED: "KILLED"}.get(ExitCode(exit_code), "FAILED")
        self._client.set_terminated(self._record.run_id, status=status)
        self._record.write()


def _flat(values: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the configuration's keys, as ``train.steps``, with their values."""
    if not isinstance(values, dict) or not values:
        return [(prefix.removesuffix("."), values)]
    return [item for name, value in values.items() for item in _flat(value, f"{prefix}{name}.")]
