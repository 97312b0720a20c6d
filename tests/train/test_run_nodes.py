"""Runs on two simulated nodes write to one W&B run, and each node writes its own files.

pytest tests/train/test_run_nodes.py -m full
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.monitor.wandb_file import configuration, exit_code, history, run_record
from tests.monitor.wandb_process import without_network
from toolkit.config.monitor import WandbMode
from toolkit.config.schema import EngineName, EvalConfig, RunConfig, RunSection
from toolkit.data.tokens.stdlib import ensure_stdlib
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import run_ranks
from toolkit.testing.tiny import tiny_config

WORLD = World(ranks=2, ranks_per_node=1, device=Device.CPU, has_compiler=True)
STEPS = 4


def config_of(folder: str, data: str, mode: WandbMode) -> RunConfig:
    config = tiny_config(
        "gpt2",
        train__steps=STEPS,
        engine__name=EngineName.deepspeed,
        monitor__wandb=mode,
        monitor__system_seconds=0.2,
    )
    config.run, config.eval = RunSection(dir=folder), EvalConfig(every=2, batches=2)
    config.data.path, config.data.vocab_size = data, 264
    config.debug.threads = 1
    return config


def train_on_node(rank: int, ranks: int, folder: str, data: str, mode: WandbMode) -> int:
    from toolkit.observe import sinks
    from toolkit.train.run import run

    sinks.WandbSink = without_network  # type: ignore[assignment,misc]
    plan = make_plan(config_of(folder, data, mode), WORLD)
    return int(run(plan, rank=rank, local_rank=0, stop=lambda: None, attempt=1, launcher="torchrun"))


def trained(folder: Path, data: Path, mode: WandbMode) -> list[dict[str, Any]]:
    config = config_of(str(folder), str(data), mode)
    directory = RunDirectory(folder)
    assert directory.begin(config, to_json(make_plan(config, WORLD))) == 1
    assert run_ranks(train_on_node, 2, str(folder), str(data), mode) == [ExitCode.DONE] * 2
    directory.release()
    return list(read_rows(directory.metrics_file))


@pytest.mark.full
def test_two_nodes_write_one_wandb_run_without_changing_losses(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ensure_stdlib(data, 264, root=Path(__file__).resolve().parents[2] / "toolkit" / "monitor")
    rows = trained(tmp_path / "run", data, WandbMode.offline)
    without = trained(tmp_path / "without", data, WandbMode.disabled)
    assert [row["loss"] for row in rows] == [row["loss"] for row in without]
    first, second = (
        next((tmp_path / "run" / folder).rglob("*.wandb")) for folder in ("wandb", "nodes/node-1")
    )
    assert run_record(first).run_group == run_record(second).run_group == run_record(first).run_id
    assert configuration(first)["plan"] == configuration(second)["plan"]
    assert [row["train/loss"] for row in history(first) if "train/loss" in row] == [
        row["loss"] for row in rows
    ]
    assert [row["step"] for row in history(first) if "eval/validation/loss" in row] == [2, 4]
    assert not any(
        name.startswith(("train/", "eval/", "system/node-0")) for row in history(second) for name in row
    )
    assert (exit_code(first), exit_code(second)) == (0, 0)
    directory = RunDirectory(tmp_path / "run")
    assert directory.environment_file(1).exists()
    assert directory.system_file(1).exists()
