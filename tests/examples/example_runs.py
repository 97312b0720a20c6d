"""Run an example on one or several ranks of a pool, as its command does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.train.tiny_run import without_fixed_costs
from toolkit.config.compose import compose
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool
from toolkit.train.run import run
from toolkit.train.user_task import check_user_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Experiment of each folder, and its module.
NAMES: Mapping[str, tuple[str, str]] = {
    "tabular_regression": ("tabular", "tabular"),
    "image_segmentation": ("segmentation", "segmentation"),
    "masked_lm": ("masked_lm", "masked_lm"),
    "preference_optimization": ("dpo", "dpo"),
}
QUIET = (
    "monitor=files",
    "monitor.ledger=false",
    "monitor.probe=false",
    "monitor.system_seconds=0",
    "debug.threads=1",
)


@dataclass(frozen=True)
class ExampleRun:
    """Rows of the metrics, of the evaluations, and of the hooks."""

    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    hooks: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.steps]


def compose_example(name: str, overrides: tuple[str, ...]) -> RunConfig:
    experiment, _ = NAMES[name]
    return compose([f"--config-dir={EXAMPLES / name / 'conf'}", f"+exp={experiment}", *QUIET, *overrides])


def train_on_rank(rank: int, ranks: int, name: str, overrides: tuple[str, ...]) -> int:
    os.chdir(EXAMPLES / name)
    if str(EXAMPLES / name) not in sys.path:
        sys.path.insert(0, str(EXAMPLES / name))
    torch.set_num_threads(1)
    config = compose_example(name, overrides)
    plan = make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True))
    directory = RunDirectory(plan.run_dir)
    attempt = max([0, *directory.attempts()])
    if rank == 0:
        check_user_task(config)
        attempt = directory.begin(config, to_json(plan))
    if ranks > 1:
        torch.distributed.barrier()
        attempt = max(directory.attempts())
    try:
        with without_fixed_costs():
            return int(run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt))
    finally:
        directory.release()


def train_example(name: str, folder: Path, *overrides: str, ranks: int = 1, pool: RankPool) -> ExampleRun:
    """Train with ``engine=local`` on one rank and ``engine=deepspeed`` on several."""
    engine = EngineName.local if ranks == 1 else EngineName.deepspeed
    given = (f"run.dir={folder}", f"engine={engine.value}", *overrides)
    codes = pool.run(train_on_rank, name, given, ranks=ranks)
    assert codes == [ExitCode.DONE] * ranks
    directory = RunDirectory(folder)
    rows = [
        list(read_rows(file)) for file in (directory.metrics_file, directory.eval_file, directory.hooks_file)
    ]
    return ExampleRun(*rows)
