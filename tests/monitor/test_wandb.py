"""W&B: runs of two nodes offline, read back from their files, and a missing, failing or hanging W&B.

pytest tests/monitor/test_wandb.py
"""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.monitor.wandb_file import alerts, configuration, exit_code, history, run_record, stats, summary
from tests.monitor.wandb_process import without_network
from toolkit.config.monitor import WandbMode
from toolkit.config.schema import EngineName, RunSection
from toolkit.engine.rank_sync import single_rank_reduce
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.sink import CompositeSink, Kind, Sink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sinks.subprocess_sink import NICE
from toolkit.monitor.sinks.wandb import WandbSink, wandb_run
from toolkit.observe import sinks
from toolkit.observe.context import RankContext
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.tiny import tiny_config

IDENTITY = "1a2b3c4d"
ROOT = Path(__file__).resolve().parents[2]
ALERT = Alert(
    name="straggler",
    level=Level.ERROR,
    step=2,
    cause="Rank 1 is slow.",
    evidence="1.9 s; the others 1.0 s",
    next_step="look at its GPU",
    where="rank 1",
)

# ---- two nodes


def plan_of(folder: Path, *, nodes: int = 2, **monitor: Any) -> RunPlan:
    config = tiny_config(
        engine__name=EngineName.deepspeed, **{f"monitor__{name}": value for name, value in monitor.items()}
    )
    config.run = RunSection(dir=str(folder))
    return make_plan(config, World(ranks=nodes, ranks_per_node=1, device=Device.CPU, has_compiler=True))


def sinks_of(plan: RunPlan, rank: int) -> Sink:
    directory = RunDirectory(plan.run_dir)
    directory.attempt_folder(1).mkdir(parents=True, exist_ok=True)
    context = RankContext(
        plan=plan, directory=directory, rank=rank, attempt=1, all_reduce_flags=single_rank_reduce
    )
    return sinks.open_sinks(context, 0, data={"order": "abc"}, launcher="torchrun")


def wandb_file(folder: Path) -> Path:
    files = list((folder / "wandb").rglob("*.wandb"))
    assert len(files) == 1, files
    return files[0]


def test_offline_nodes_write_separate_runs_of_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "WandbSink", without_network)
    folder = tmp_path / "tiny"
    plan = plan_of(folder, tags=["a", "b"], project="p", entity="us")
    first, second = (sinks_of(plan, rank) for rank in (0, 1))
    for step in (1, 2):
        for sink in (first, second):  # all ranks have the rows of the run
            sink.log(
                Kind.STEP,
                {
                    "step": step,
                    "loss": 1 / step,
                    "tokens": 512,
                    "step_seconds": 0.1,
                    "tokens_per_second": 5120.0,
                },
            )
        first.log(Kind.LEDGER, {"step": step, "parts": {"forward": [0.1, 0.2 * step, 0.9]}})
        for node, sink in enumerate((first, second)):
            sink.log(Kind.SYSTEM, {"step": step, "gpus": [{"watts": 100.0 * node + step}]})
    first.log(Kind.EVAL, {"step": 2, "set": "validation", "loss": 2.5, "tokens": 64, "seconds": 0.1})
    first.log(Kind.ALERT, ALERT.to_row())
    second.log(Kind.ALERT, ALERT.to_row())
    first.log(Kind.EVAL, {"step": 2, "set": "validation", "loss": 3.5, "tokens": 64, "seconds": 0.1})
    first.log_summary("continuation", "def main():")
    first.log_summary("goodput", 0.875)
    first.close(0)
    second.close(75)

    files = wandb_file(folder), wandb_file(folder / "nodes" / "node-1")
    run_id = f"tiny-{plan.identity}"
    seen = [run_record(file) for file in files]
    assert [run.run_id for run in seen] == [run_id, f"{run_id}-node-1"]
    assert [run.display_name for run in seen] == ["tiny", "tiny node 1"]
    assert {(run.run_group, run.project, run.entity, *run.tags) for run in seen} == {
        (run_id, "p", "us", "a", "b")
    }
    assert history(files[0]) == [
        {
            "step": 1,
            "train/loss": 1.0,
            "train/tokens": 512,
            "train/step_seconds": 0.1,
            "train/tokens_per_second": 5120.0,
        },
        {"step": 1, "ledger/forward": 0.2, "ledger/forward/max": 0.9},
        {"step": 1, "system/node-0/gpus/0/watts": 1.0},
        {
            "step": 2,
            "train/loss": 0.5,
            "train/tokens": 512,
            "train/step_seconds": 0.1,
            "train/tokens_per_second": 5120.0,
        },
        {"step": 2, "ledger/forward": 0.4, "ledger/forward/max": 0.9},
        {"step": 2, "system/node-0/gpus/0/watts": 2.0},
        {
            "step": 2,
            "eval/validation/loss": 2.5,
            "eval/validation/tokens": 64,
            "eval/validation/seconds": 0.1,
        },
        {"step": 2, "alerts/straggler": 1},
        {
            "step": 2,
            "eval/validation/loss": 3.5,
            "eval/validation/tokens": 64,
            "eval/validation/seconds": 0.1,
        },
    ]
    assert history(files[1]) == [
        {"step": step, "system/node-1/gpus/0/watts": 100.0 + step} for step in (1, 2)
    ] + [{"step": 2, "alerts/straggler": 1}]
    text = "step 2: Rank 1 is slow.\n\nEvidence: 1.9 s; the others 1.0 s\n\nNext step: look at its GPU"
    assert [alerts(file) for file in files] == [[("straggler (rank 1)", text, "ERROR")]] * 2
    for file in files:
        config = configuration(file)
        assert config["config"]["train"]["sequence_length"] == 32
        assert config["plan"]["batch"]["micro_batch"] == 2
        assert config["data"] == {"order": "abc"}
        assert config["environment"]["launcher"] == "torchrun"
        assert config["environment"]["packages"]["torch"] is not None
        assert config["git"] is None or set(config["git"]) == {"commit", "branch", "dirty"}
    assert summary(files[0])["continuation"] == "def main():"
    values = summary(files[0])
    assert values["goodput"] == 0.875
    assert values["train/loss"] == {"min": 0.5, "last": 0.5}
    assert values["eval/validation/loss"] == {"min": 2.5, "last": 3.5}
    assert [exit_code(file) for file in files] == [0, 75]
    for node, file in enumerate(files):
        assert stats(file)
        assert all(name.endswith(f"/l:node-{node}") for name in stats(file))

    directory = RunDirectory(folder)
    assert [row["step"] for row in read_rows(directory.metrics_file)] == [1, 2]
    assert [row["gpus"][0]["watts"] for row in read_rows(directory.system_file(1))] == [101.0, 102.0]
    assert [row["name"] for node in (0, 1) for row in read_rows(directory.node_alerts_file(node))] == [
        "straggler"
    ] * 2
    assert "launcher" in directory.environment_file(1).read_text()
    assert caplog.messages.count(str(ALERT)) == 2


@pytest.mark.parametrize(
    ("run_dir", "expected"),
    [("runs/quickstart-1a2b3c4d", "quickstart-1a2b3c4d"), ("/data/my run: 7", "my-run-7-1a2b3c4d")],
)
def test_run_id_follows_from_directory_and_identity(run_dir: str, expected: str) -> None:
    assert wandb_run(run_dir, IDENTITY, WandbMode.offline, 0, 1).run_id == expected


def test_online_nodes_write_one_shared_run() -> None:
    parts = [wandb_run("runs/a", IDENTITY, WandbMode.online, node, 3) for node in range(3)]
    assert {(one.run_id, one.name, one.shared) for one in parts} == {(f"a-{IDENTITY}-shared", "a", True)}
    assert len({one.folder for one in parts}) == 3
    alone = wandb_run("runs/a", IDENTITY, WandbMode.online, 0, 1)
    assert (alone.run_id, alone.shared) == (f"a-{IDENTITY}", False), (
        "W&B loses rows of a run that is written in both modes"
    )


def test_shared_run_config_has_every_node(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, wandb=WandbMode.online, group="sweep")
    known = {"git": None, "environment": {"host": "here"}, "data": {}}
    first, second = (sinks.wandb_arguments(plan, known, node) for node in (0, 1))
    assert first["config"].keys() == {"config", "plan", "data", "git", "environment"}
    assert second["config"].keys() == {"config", "plan", "data", "node-1"}
    assert second["config"]["node-1"] == {"git": None, "environment": {"host": "here"}}
    assert first["group"] == second["group"] == "sweep"
    for mode in WandbMode.offline, WandbMode.online:
        groups = {
            str(sinks.wandb_arguments(plan_of(tmp_path, nodes=nodes, wandb=mode), known, node)["group"])
            for nodes in (1, 2)
            for node in range(nodes)
        }
        assert groups == {f"{tmp_path.name}-{plan.identity}"}, "whatever the number of nodes"


# ---- calls of W&B, recorded by a fake module


class Run:
    """A fake of W&B's run that records its calls."""

    def __init__(self, finish_seconds: float = 0.0) -> None:
        self.asked: list[Any] = []
        self._finish_seconds = finish_seconds

    def define_metric(self, *names: str, **more: str) -> None:
        self.asked.append((*names, more))

    def log(self, row: dict[str, Any]) -> None:
        self.asked.append(row)

    def mark_preempting(self) -> None:
        self.asked.append("preempting")

    def finish(self, exit_code: int) -> None:
        time.sleep(self._finish_seconds)
        self.asked.append(exit_code)


WANTED = ("x_primary", "x_update_finish_state", "x_label", "x_stats_pid", "init_timeout")


def fake(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    module: Any = types.ModuleType("wandb")
    module.Settings, module.init, module.teardown = (
        type("Settings", (SimpleNamespace,), {"model_fields": WANTED}),
        init,
        lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)


def sink_of(folder: Path, mode: WandbMode = WandbMode.offline, node: int = 0, nodes: int = 1) -> WandbSink:
    return WandbSink(
        wandb_run(folder, IDENTITY, mode, node, nodes),
        mode=mode,
        project="p",
        entity=None,
        group="g",
        tags=[],
        config={},
        trainer=7,
        command=sys.argv,
    )


@pytest.mark.parametrize(
    ("mode", "node", "nodes", "asked", "settings"),
    [
        (WandbMode.offline, 1, 2, ("offline", None), {}),
        (WandbMode.online, 0, 1, ("online", "allow"), {}),
        (WandbMode.online, 0, 2, ("shared", "allow"), {"x_primary": True, "x_update_finish_state": True}),
        (WandbMode.online, 1, 2, ("shared", "allow"), {"x_primary": False, "x_update_finish_state": False}),
    ],
)
def test_wandb_settings_of_each_node(
    mode: WandbMode,
    node: int,
    nodes: int,
    asked: tuple[str, str | None],
    settings: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def init(**arguments: Any) -> Run:
        given.update(arguments)
        return run

    run = Run()
    fake(monkeypatch, init)
    sink = sink_of(tmp_path, mode, node, nodes)
    sink.close(75)
    assert (given["mode"], given["resume"]) == asked
    assert vars(given["settings"]) == {
        "init_timeout": 90.0,
        "x_stats_pid": 7,
        "x_label": f"node-{node}",
        **settings,
    }
    assert run.asked == [("step", {}), ("*", {"step_metric": "step"}), "preempting", 75]


# ---- failures


def longest_call(sink: Sink) -> float:
    """Log for a while; return the seconds of the longest call."""
    composite = CompositeSink([sink])
    longest = 0.0
    for step in range(1, 31):
        began = time.monotonic()
        composite.log(Kind.STEP, {"step": step, "loss": 1.0})
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.01)
    composite.close(0)
    return longest


def test_missing_wandb_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    longest_call(QueuedSink(lambda: sink_of(tmp_path), "W&B"))
    (message,) = caplog.messages
    assert message.startswith("W&B failed and receives no more rows: ModuleNotFoundError")


@pytest.mark.parametrize("where", ["start", "finish"])
def test_hanging_wandb_is_abandoned_at_close(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake(
        monkeypatch,
        (lambda **settings: time.sleep(60))
        if where == "start"
        else lambda **settings: Run(finish_seconds=60.0),
    )
    longest = longest_call(QueuedSink(lambda: sink_of(tmp_path), "W&B", close_seconds=0.2))
    rows = 30 if where == "start" else 0
    assert caplog.messages == [
        f"W&B failed and receives no more rows: TimeoutError: it did not finish within 0.2 s, and {rows} "
        "rows wait"
    ]
    assert longest < 0.1


# W&B's service is terminated or stopped.
SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
import psutil
from tests.monitor.wandb_process import without_network
from toolkit.config.monitor import WandbMode
from toolkit.monitor.sinks.subprocess_sink import SubprocessSink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sink import CompositeSink, Kind
from toolkit.monitor.sinks.wandb import wandb_run

folder = Path(sys.argv[1])
arguments = dict(
    wandb_run=wandb_run(folder, "1a2b3c4d", WandbMode.offline, 0, 1), mode=WandbMode.offline, project="p",
    entity=None, group="g", tags=[], config={}, trainer=os.getpid(), command=["train.py"],
)
made = []
def make():
    made.append(SubprocessSink(without_network, arguments, "W&B", close_seconds=2.0))
    return made[0]
sink = CompositeSink([QueuedSink(make, "W&B")])
sink.log(Kind.STEP, {"step": 1, "loss": 1.0})
while not any(b"train/loss" in file.read_bytes() for file in folder.rglob("*.wandb")):
    time.sleep(0.1)
children = psutil.Process(made[0]._process.pid).children()
(core,) = [process for process in children if process.name() == "wandb-core"]
priorities = {os.getpriority(os.PRIO_PROCESS, thread.id) for thread in core.threads()}
core.send_signal(signal.Signals[sys.argv[2]])
time.sleep(0.5)
sink.log(Kind.STEP, {"step": 2, "loss": 1.0})
sink.close(75)
for _ in range(500):
    gone = not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    if gone:
        break
    time.sleep(0.01)
print("core is gone", gone, "priorities", priorities)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "message"), [("SIGTERM", "ProcessEnded"), ("SIGSTOP", "did not finish within 2 s")]
)
def test_dead_or_stopped_wandb_service_is_reported_once(tmp_path: Path, name: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(tmp_path), name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("W&B failed") == 1
    assert message in done.stderr
    assert f"core is gone True priorities {{{NICE}}}" in done.stdout
    assert [row["step"] for row in history(next(tmp_path.rglob("*.wandb")))] == [1]
    assert "Traceback" not in done.stderr
