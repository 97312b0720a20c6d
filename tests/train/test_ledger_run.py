"""Runs on two ranks with ledger, communication benchmark and profiler, which change no loss.

pytest tests/train/test_ledger_run.py
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.dataset_files import Corpus, config_of, make_corpus
from tests.train.tiny_run import without_fixed_costs
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import EngineName, EvalConfig, RunConfig, RunSection
from toolkit.data.registry import prepare_data
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.layout.axes import Axes
from toolkit.monitor.ledger_rows import part_names
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.progress import Progress
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.step_parts import (
    BACKWARD,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    TRANSFER,
    communication,
)
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.tiny import tiny_config
from toolkit.train.run import run

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_corpus(tmp_path_factory.mktemp("corpus"), patch)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as ranks:
        yield ranks


def plan_of(config: RunConfig) -> RunPlan:
    return make_plan(config, World(ranks=2, ranks_per_node=2, device=Device.CPU, has_compiler=True))


def train_on_rank(
    rank: int, ranks: int, config: RunConfig, attempt: int, data: str, stop_after: int | None
) -> int:
    steps = 0

    def stop() -> str | None:
        nonlocal steps
        steps += 1
        return "SIGTERM" if stop_after is not None and steps >= stop_after else None

    with without_fixed_costs():
        return int(run(plan_of(config), rank=rank, local_rank=rank, stop=stop, attempt=attempt, data=data))


def run_training(
    pool: RankPool, corpus: Corpus, folder: Path, stop_after: int | None = None, **monitor: Any
) -> RunDirectory:
    config = tiny_config(
        "llama",
        engine__name=EngineName.deepspeed,
        zero__stage=1,
        train__steps=STEPS,
        train__micro_batch=2,
        train__sequence_length=32,
        model__vocab_size=320,
        checkpoint__every="never",
    )
    config.data = config_of(corpus, validation=0.2).data
    config.run = RunSection(dir=str(folder))
    config.monitor = MonitorConfig(
        wandb=WandbMode.disabled, system_seconds=0, replicas_every=0, hang_seconds=0, **monitor
    )
    config.debug.threads, config.eval = 1, EvalConfig(every=3, batches=2)
    directory = RunDirectory(folder)
    data = prepare_data(config, None, Progress.silent())
    attempt = directory.begin(config, to_json(plan_of(config)))
    try:
        codes = pool.run(train_on_rank, config, attempt, data, stop_after)
    finally:
        directory.release()
    assert codes == [ExitCode.STOPPED if stop_after else ExitCode.DONE] * 2
    return directory


def test_ledger_benchmark_and_trace_cover_the_run_without_changing_losses(
    pool: RankPool, corpus: Corpus, tmp_path: Path
) -> None:
    bare = run_training(pool, corpus, tmp_path / "bare", ledger=False, probe=False)
    observed = run_training(pool, corpus, tmp_path / "watched", profile_step=4, profile_steps=2)
    losses = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(one.metrics_file)]
        for one in (bare, observed)
    ]
    assert losses[0] == losses[1]
    assert not bare.ledger_file.exists() or not list(read_rows(bare.ledger_file))
    rows = list(read_rows(observed.ledger_file))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    seconds = {row["step"]: row["step_seconds"] for row in read_rows(observed.metrics_file)}
    names = set(part_names(Axes(data=2)))
    for row in rows:
        assert row["ranks"] == 2
        assert row["slowest_rank"] in (0, 1)
        assert set(row["parts"]) <= names
        assert {DATA, TRANSFER, FORWARD, BACKWARD, OPTIMIZER, LOGGING, communication("data")} <= set(
            row["parts"]
        )
        assert (EVALUATION in row["parts"]) == (row["step"] % 3 == 0)
        assert row["wall_seconds"] > 0.9 * seconds[row["step"]]
        for low, middle, high in row["parts"].values():
            assert 0 <= low <= middle <= high <= 2 * row["wall_seconds"]
    folder = observed.attempt_folder(1)
    (axis,) = json.loads((folder / "probe.json").read_text())["axes"]
    assert (axis["axis"], axis["ranks"], axis["operation"]) == ("data", 2, "all_reduce")
    assert not (bare.attempt_folder(1) / "probe.json").exists()
    events = json.loads(gzip.decompress((folder / "trace-rank-0.json.gz").read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if str(event.get("name", "")).startswith("step ")} == {
        "step 4",
        "step 5",
    }
    assert [file.name for file in folder.glob("trace*")] == ["trace-rank-0.json.gz"]


@pytest.mark.full
def test_resumed_run_has_one_ledger_row_per_step(pool: RankPool, corpus: Corpus, tmp_path: Path) -> None:
    run_training(pool, corpus, tmp_path / "run", stop_after=4)
    directory = run_training(pool, corpus, tmp_path / "run")
    assert [row["step"] for row in read_rows(directory.ledger_file)] == list(range(1, STEPS + 1))
