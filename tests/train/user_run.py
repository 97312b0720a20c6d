"""Whole runs on one process of the model, task, data and hooks of ``user_code``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.train.tiny_run import without_fixed_costs
from toolkit.config.data import DataConfig
from toolkit.config.model import ModelConfig
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EngineName, EvalConfig, RunConfig, RunSection, TrainConfig
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.train.run import run

CODE = "tests.train.user_code"
WORLD = World(ranks=1, ranks_per_node=1, device=Device.CPU)


def user_config(folder: Path, *, steps: int = 6, target: str = "Table") -> RunConfig:
    config = RunConfig()
    config.run, config.engine.name = RunSection(dir=str(folder)), EngineName.local
    config.model, config.task.target = ModelConfig(target=f"{CODE}.Linear"), f"{CODE}.Regression"
    config.data = DataConfig(name="custom", target=f"{CODE}.{target}", arguments={"samples": 21})
    config.train = TrainConfig(steps=steps, global_batch=4, micro_batch=2)
    config.optim.lr, config.schedule.decay = 0.05, 100
    config.eval = EvalConfig(every=2, batches=3)
    config.checkpoint.every = "2"
    config.monitor = MonitorConfig(wandb=WandbMode.disabled, probe=False, ledger=False, system_seconds=0)
    config.debug.threads = 1
    return config


class UserRun:
    """One attempt.

    Args:
        stop_after: ask it to stop after so many of its own steps.
    """

    def __init__(
        self,
        folder: Path,
        change: Callable[[RunConfig], object] = lambda config: None,
        *,
        stop_after: int | None = None,
        **settings: Any,
    ) -> None:
        config = user_config(folder, **settings)
        change(config)
        plan = make_plan(config, WORLD)
        self.config, self.directory = config, RunDirectory(folder)
        attempt, steps = self.directory.begin(config, to_json(plan)), 0

        def stop() -> str | None:
            nonlocal steps
            steps += 1
            return "SIGTERM" if stop_after is not None and steps >= stop_after else None

        try:
            with without_fixed_costs():
                self.code = run(plan, rank=0, local_rank=0, stop=stop, attempt=attempt, data="unused")
            if self.code is ExitCode.DONE:  # what the exit handler does
                self.directory.finish(RunState.DONE, 0, None, attempt=attempt)
        finally:
            self.directory.release()
        status = self.directory.status()
        assert status is not None
        self.status = status

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.directory.path / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows("metrics")]

    def checkpoints(self) -> list[int]:
        return sorted(int(folder.name[5:]) for folder in self.directory.checkpoints.glob("step-*"))
