"""W&B offline: one run, read back from its file; missing, failing or hanging it is told once and training goes on.

    pytest tests/monitor/test_wandb.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.monitor.wandb_file import history, records
from toolkit.config.schema import WandbMode
from toolkit.monitor.sink import CompositeSink, Kind
from toolkit.monitor.wandb import WandbSink, run_id
from toolkit.testing.tiny import tiny_plan
from toolkit.train.sinks import described

IDENTITY = "1a2b3c4d"
# In a process of its own, without a network: a service of W&B lives as long as the process that started it.
WRITE = """
import json, socket, sys
from pathlib import Path

def refuse(self, address, *rest):
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1"), f"network: {address}"
    return connect(self, address, *rest)

connect, socket.socket.connect = socket.socket.connect, refuse
from toolkit.config.schema import WandbMode
from toolkit.monitor.sink import Kind
from toolkit.monitor.wandb import WandbSink

run, config = Path(sys.argv[1]), json.loads(sys.argv[2])
sink = WandbSink(run_dir=run, identity="1a2b3c4d", project="toolkit", mode=WandbMode.offline, config=config)
for step in (1, 2):
    sink.log(Kind.STEP, {"step": step, "loss": 1 / step, "tokens": 512})
sink.log(Kind.EVAL, {"step": 2, "set": "validation", "loss": 2.5, "tokens": 64, "seconds": 0.1})
sink.log_text("continuation", "def main():")
sink.close(75)
"""


def test_an_offline_run_is_written_and_read_back(tmp_path: Path) -> None:
    run = tmp_path / f"tiny-{IDENTITY}"
    run.mkdir()
    config = described(tiny_plan())
    command = [sys.executable, "-c", WRITE, str(run), json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    files = list(run.rglob("*.wandb"))
    assert [file.parent.parent for file in files] == [run / "wandb"]
    assert history(files[0]) == [
        {"step": 1, "train/loss": 1.0, "train/tokens": 512}, {"step": 2, "train/loss": 0.5, "train/tokens": 512},
        {"step": 2, "eval/validation/loss": 2.5}]
    found: dict[str, Any] = {record.WhichOneof("record_type"): record for record in records(files[0])}
    opened = next(record.run for record in records(files[0]) if record.WhichOneof("record_type") == "run")
    assert (opened.run_id, opened.project, opened.display_name) == (f"tiny-{IDENTITY}", "toolkit", run.name)
    recorded = {update.key: json.loads(update.value_json) for update in opened.config.update}
    assert recorded["config"]["train"]["sequence_length"] == 32
    assert recorded["config"]["engine"]["name"] == "local"
    assert recorded["plan"]["batch"]["micro_batch"] == 2
    assert found["exit"].exit.exit_code == 75
    assert any(record.WhichOneof("record_type") == "summary" and any("def main" in update.value_json for update in record.summary.update)
               for record in records(files[0]))


@pytest.mark.parametrize(("run_dir", "expected"), [
    ("runs/quickstart-1a2b3c4d", "quickstart-1a2b3c4d"), ("/data/my run: 7", "my-run-7-1a2b3c4d")])
def test_a_runs_id_follows_from_its_directory_and_identity(run_dir: str, expected: str) -> None:
    assert run_id(run_dir, IDENTITY) == expected


def sink_of(tmp_path: Path, **seconds: float) -> WandbSink:
    return WandbSink(run_dir=tmp_path, identity=IDENTITY, project="p", mode=WandbMode.offline, config={}, **seconds)


def used(sink: WandbSink) -> tuple[list[str], float]:
    """What is told when ``sink`` is used for a while, and the longest call."""
    told: list[str] = []
    composite = CompositeSink([sink], told.append)
    longest = 0.0
    for step in range(1, 31):
        began = time.monotonic()
        composite.log(Kind.STEP, {"step": step, "loss": 1.0})
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.01)
    composite.close(0)
    return told, longest


def fake(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    module: Any = types.ModuleType("wandb")
    module.Settings, module.init, module.teardown = type("Settings", (SimpleNamespace,), {"model_fields": {}}), init, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)


class Run:
    """W&B's, which takes everything and does not end."""

    def define_metric(self, *names: str, **more: str) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        time.sleep(60)


def test_missing_wandb_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    told, _ = used(sink_of(tmp_path))
    assert len(told) == 1
    assert told[0].startswith("WandbSink failed and gets nothing more: ModuleNotFoundError")


def test_a_wandb_that_does_not_start_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, lambda **settings: time.sleep(60))
    told, longest = used(sink_of(tmp_path, start_seconds=0.1))
    assert told == ["WandbSink failed and gets nothing more: TimeoutError: W&B did not start within 0.1 s"]
    assert longest < 0.5


def test_a_wandb_that_does_not_finish_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, lambda **settings: Run())
    told, _ = used(sink_of(tmp_path, close_seconds=0.2))
    assert told == ["WandbSink failed and gets nothing more: TimeoutError: W&B did not finish within 0.2 s"]


# W&B's process is ended (as DeepSpeed's launcher does with every process below it), or stopped.
SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from toolkit.config.schema import WandbMode
from toolkit.monitor.sink import CompositeSink, Kind
from toolkit.monitor.wandb import WandbSink

sink = WandbSink(run_dir=Path(sys.argv[1]), identity="1a2b3c4d", project="p", mode=WandbMode.offline, config={}, close_seconds=2.0)
composite = CompositeSink([sink])
composite.log(Kind.STEP, {"step": 1, "loss": 1.0})
while not any(b"train/loss" in file.read_bytes() for file in Path(sys.argv[1]).rglob("*.wandb")):  # each second it is written out
    time.sleep(0.1)
children = [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
for pid in children:
    os.kill(pid, signal.Signals[sys.argv[2]])
time.sleep(0.5)
composite.log(Kind.STEP, {"step": 2, "loss": 1.0})
composite.close(75)
"""


@pytest.mark.parametrize(("name", "said"), [("SIGTERM", "ConnectionResetError"), ("SIGSTOP", "W&B did not finish within 2 s")])
def test_without_its_process_w_and_b_is_told_once_and_the_run_ends(tmp_path: Path, name: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED, str(tmp_path), name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr.count("WandbSink failed") == 1
    assert said in done.stderr
    assert [row["step"] for row in history(next(tmp_path.rglob("*.wandb")))] == [1]
    if name == "SIGTERM":
        assert "Traceback" not in done.stderr
