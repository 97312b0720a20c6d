"""Sinks of the configuration: TensorBoard, MLflow, Aim and classes of the user's own.

pytest tests/monitor/test_user_sinks.py            with packages that record the calls
pytest tests/monitor/test_user_sinks.py -m full    with the packages themselves, if they are installed
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.train.user_run import CODE, UserRun
from toolkit import Sink
from toolkit.config.monitor import MonitorConfig
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.monitor.sink import Kind, Row, SinkRun
from toolkit.monitor.sinks.aim import AimSink
from toolkit.monitor.sinks.mlflow import MlflowSink
from toolkit.monitor.sinks.run_record import RunRecord
from toolkit.monitor.sinks.tensorboard import TensorBoardSink
from toolkit.observe.sinks import check_user_sinks
from toolkit.user_code import check_user_code, describe_source

CONFIG = {"train": {"steps": 4, "seed": 0}, "hooks": {}}
STEP_COLUMNS = {"train/loss", "train/lr"}


def log_steps(sink: Sink, folder: Path, first: int, last: int) -> None:
    """One start of a run: it logs the steps after ``first``."""
    sink.open(SinkRun(folder, first, CONFIG))
    for step in range(first + 1, last + 1):
        sink.log(Kind.STEP, {"step": step, "loss": 1 / step, "lr": 0.1, "text": "dropped"})
        sink.flush()
    sink.log(Kind.EVAL, {"step": last, "set": "validation", "loss": 0.5})
    sink.log(Kind.HOOK, {"step": last, "hook": "mine", "norm": 2.0})
    sink.log_summary("goodput", 0.9)
    sink.flush()
    sink.close(0)


# ---- packages that record the calls


class FakeWriter:
    made: list[FakeWriter]

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars: dict[str, list[int]] = defaultdict(list)
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name].append(step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_tensorboard_replaces_the_rows_of_repeated_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWriter.made = []
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", _module("tensorboard", SummaryWriter=FakeWriter)
    )
    log_steps(TensorBoardSink(), tmp_path, 0, 4)
    log_steps(TensorBoardSink(), tmp_path, 2, 5)
    first, second = FakeWriter.made
    assert (first.log_dir, first.purge_step, second.purge_step) == (str(tmp_path / "tensorboard"), 1, 3)
    assert second.scalars["train/loss"] == [3, 4, 5]
    assert first.scalars.keys() == {*STEP_COLUMNS, "eval/validation/loss", "hooks/mine/norm", "goodput"}


class FakeMlflow:
    """A tracking server with one experiment."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, list[int]]] = {}
        self.parameters: dict[str, str] = {}
        self.status: list[str] = []

    def module(self) -> ModuleType:
        entities = SimpleNamespace(
            Param=lambda key, value: (key, value), Metric=lambda key, value, time, step: (key, value, step)
        )
        return _module("mlflow", MlflowClient=lambda tracking_uri: self, entities=entities)

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        run = f"run-{len(self.runs)}"
        self.runs[run] = defaultdict(list)
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None:
        self.status.append(status)

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        self.parameters |= dict(params)
        for name, _, step in metrics:
            self.runs[run][name].append(step)

    def set_tag(self, run: str, name: str, value: Any) -> None:
        pass

    def set_terminated(self, run: str, status: str) -> None:
        self.status.append(status)


def test_mlflow_continues_its_run_and_logs_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", server.module())
    log_steps(MlflowSink(), tmp_path, 0, 4)
    log_steps(MlflowSink(), tmp_path, 2, 6)
    assert list(server.runs) == ["run-0"]
    assert server.runs["run-0"]["train/loss"] == [1, 2, 3, 4, 5, 6]
    assert server.runs["run-0"]["eval/validation/loss"] == [4, 6]
    assert server.parameters == {"train.steps": "4", "train.seed": "0", "hooks": "{}"}
    assert server.status == ["FINISHED", "RUNNING", "FINISHED"]
    (tmp_path / "mlflow.json").unlink()  # the control: without the record rows are logged again
    log_steps(MlflowSink(), tmp_path, 2, 4)
    assert server.runs["run-1"]["train/loss"] == [3, 4]


def test_aim_continues_its_run_and_tracks_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, FakeAimRun] = {}

    class FakeAimRun(dict[str, Any]):
        def __new__(cls, run_hash: str | None, **settings: Any) -> FakeAimRun:
            return runs.setdefault(run_hash or f"hash-{len(runs)}", super().__new__(cls))

        def __init__(self, run_hash: str | None, **settings: Any) -> None:
            self.hash = next(name for name, run in runs.items() if run is self)
            if run_hash is None:
                self.steps: dict[str, list[int]] = defaultdict(list)

        def track(self, value: float, *, name: str, step: int) -> None:
            self.steps[name].append(step)

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "aim", _module("aim", Run=FakeAimRun))
    log_steps(AimSink(), tmp_path, 0, 4)
    log_steps(AimSink(), tmp_path, 2, 6)
    (run,) = runs.values()
    assert run.steps["train/loss"] == [1, 2, 3, 4, 5, 6]
    assert run["config"] == CONFIG


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


# ---- the configuration


def sinks_config(**sinks: Any) -> RunConfig:
    return RunConfig(monitor=MonitorConfig(sinks=sinks))


def test_missing_package_is_reported_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else find(name))
    with pytest.raises(ConfigError, match=r"pip install mlflow, or leave out monitor\.sinks\.mlflow"):
        check_user_code(sinks_config(mlflow={}))


def test_class_that_is_no_sink_is_refused() -> None:
    with pytest.raises(ConfigError, match="the class Linear is not derived from Sink"):
        check_user_sinks(sinks_config(mine={"target": f"{CODE}.Linear"}))


class Collects(Sink):
    rows: list[tuple[Kind, int]]
    run: SinkRun

    def open(self, run: SinkRun) -> None:
        Collects.run, Collects.rows = run, []

    def log(self, kind: Kind, row: Row) -> None:
        time.sleep(0.01)
        Collects.rows.append((kind, row["step"]))


class Breaks(Sink):
    def open(self, run: SinkRun) -> None:
        raise ConnectionError("no server")


def test_sinks_receive_every_row_and_a_broken_one_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(config: RunConfig) -> None:
        config.monitor.sinks = {
            "collects": {"target": f"{__name__}.Collects"},
            "breaks": {"target": f"{__name__}.Breaks"},
        }

    run = UserRun(tmp_path, change, steps=4)
    assert [step for kind, step in Collects.rows if kind is Kind.STEP] == [1, 2, 3, 4]
    assert [step for kind, step in Collects.rows if kind is Kind.EVAL] == [2, 4]
    assert Collects.run.folder == tmp_path
    assert Collects.run.config["train"]["steps"] == 4
    assert "monitor.sinks.breaks failed and receives no more rows: ConnectionError: no server" in caplog.text
    assert run.losses() == UserRun(tmp_path / "without", steps=4).losses()


def test_checked_target_is_loaded_without_parsing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that parse at once fail in CPython 3.11, and sinks have a thread each."""
    config = RunConfig()
    config.monitor.sinks = {"collects": {"target": f"{__name__}.Collects"}}
    check_user_sinks(config)
    monkeypatch.setattr(ast, "parse", None)
    check_user_sinks(config)


def test_describing_a_class_does_not_parse_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [f"{__file__}:{inspect.getsourcelines(each)[1]}" for each in (Collects, Breaks, FakeWriter)]
    monkeypatch.setattr(ast, "parse", None)
    assert [describe_source(each) for each in (Collects, Breaks, FakeWriter)] == expected


# ---- the packages themselves


@pytest.mark.full
def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(TensorBoardSink(), tmp_path, 0, 4)
    log_steps(TensorBoardSink(), tmp_path, 2, 5)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.full
def test_mlflow_stores_each_step_once(tmp_path: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    log_steps(MlflowSink(uri), tmp_path, 0, 4)
    log_steps(MlflowSink(uri), tmp_path, 2, 6)
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("toolkit").experiment_id])
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert run.data.params["train.steps"] == "4"


@pytest.mark.full
def test_aim_stores_each_step_once(tmp_path: Path) -> None:
    aim: Any = pytest.importorskip("aim")
    log_steps(AimSink(str(tmp_path)), tmp_path, 0, 4)
    log_steps(AimSink(str(tmp_path)), tmp_path, 2, 6)
    run_hash = RunRecord(tmp_path / "aim.json").run_id
    run = aim.Run(run_hash, repo=str(tmp_path), system_tracking_interval=None, capture_terminal_logs=False)
    (metric,) = [metric for metric in run.metrics() if metric.name == "train/loss"]
    _, values = metric.values.sparse_numpy()
    assert sorted(values.tolist()) == sorted(1 / step for step in range(1, 7))
    run.close()
