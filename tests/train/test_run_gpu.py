"""Whole runs that are planned for GPUs, on a fake device: monitoring, evaluation, saving and resuming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EvalConfig, RunSection
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.rehearsal import prepare_process

STEPS = 4


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    """Two ranks with a fake GPU each."""
    with rank_pool(2) as pool:
        yield pool


def train(rank: int, ranks: int, plan: RunPlan, attempt: int) -> ExitCode:
    prepare_process(rank)
    from toolkit.train.run import run

    return run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt)


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [deepspeed("llama", 3, data=2), deepspeed("llama", 1, pipeline=2), megatron("llama", tensor=2)],
    ids=str,
)
def test_run_planned_for_gpus_trains_evaluates_and_resumes(
    cell: Cell, gpus: RankPool, data: Path, tmp_path: Path
) -> None:
    config = cell.plan(OptimizerCase.ADAM, Device.CUDA).config
    config.run = RunSection(dir=str(tmp_path))
    config.data = replace(config.data, path=str(data), vocab_size=264)
    config.monitor = MonitorConfig(wandb=WandbMode.disabled, probe=True, replicas_every=2)
    config.eval = EvalConfig(every=2, batches=2)
    config.debug.threads = 1
    directory = RunDirectory(tmp_path)
    for steps in (STEPS, 2 * STEPS):
        config.train.steps = steps
        plan = make_plan(config, World(ranks=2, ranks_per_node=2, device=Device.CUDA, has_compiler=True))
        attempt = directory.begin(config, to_json(plan))
        try:
            codes = gpus.run(train, plan, attempt, timeout=240)
        finally:
            directory.release()
        assert codes == [ExitCode.DONE] * 2
    assert [row["step"] for row in read_rows(directory.metrics_file)] == [*range(1, 2 * STEPS + 1)]
    assert {row["step"] for row in read_rows(directory.eval_file)} == {2, 4, 6, 8}
