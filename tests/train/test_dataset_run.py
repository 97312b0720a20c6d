"""Runs on a JSONL file with two CPU ranks and ZeRO-2 see the same samples when they are resumed.

pytest tests/train/test_dataset_run.py
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.dataset_files import Corpus, config_of, make_corpus
from tests.train.tiny_run import without_fixed_costs
from toolkit.checkpoint import open_reader
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, EvalConfig, RunConfig, RunSection
from toolkit.data.dataset.stream import DatasetStream
from toolkit.data.manifest import find_generation
from toolkit.data.registry import prepare_data
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.progress import Progress
from toolkit.rundir.directory import RunDirectory
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
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


def on_a_rank(
    rank: int, ranks: int, config: RunConfig, attempt: int, data: str, stop_after: int | None, forget: bool
) -> int:
    """Train on one rank; with ``forget``, the control, the stream is not restored."""
    steps = 0

    def stop() -> str | None:
        nonlocal steps
        steps += 1
        return "SIGTERM" if stop_after is not None and steps >= stop_after else None

    with without_fixed_costs(), pytest.MonkeyPatch.context() as patch:
        if forget:
            patch.setattr(DatasetStream, "restore", lambda self, state: None)
        plan = make_plan(
            config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True)
        )
        return int(run(plan, rank=rank, local_rank=rank, stop=stop, attempt=attempt, data=data))


class DatasetRun:
    """One attempt of a run in ``folder``."""

    def __init__(
        self,
        pool: RankPool,
        corpus: Corpus,
        folder: Path,
        *,
        ranks: int = 2,
        stop_after: int | None = None,
        forget: bool = False,
        **dataset: Any,
    ) -> None:
        config = tiny_config(
            "llama",
            engine__name=EngineName.deepspeed,
            zero__stage=2,
            train__steps=STEPS,
            train__micro_batch=2,
            train__sequence_length=32,
            model__vocab_size=320,
            checkpoint__every="never",
            checkpoint__export=True,
            optim__kernel=OptimizerKernel.torch,
        )
        config.data = config_of(corpus, validation=0.2, **dataset).data
        config.run, config.monitor = RunSection(dir=str(folder)), MonitorConfig(wandb=WandbMode.disabled)
        config.debug.threads, config.eval = 1, EvalConfig(every=3, batches=2)
        plan = make_plan(
            config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True)
        )
        self.directory = RunDirectory(folder)
        self.data = prepare_data(config, None, Progress.silent())
        attempt = self.directory.begin(config, to_json(plan))
        try:
            codes = pool.run(on_a_rank, config, attempt, self.data, stop_after, forget, ranks=ranks)
        finally:
            self.directory.release()
        assert codes == [ExitCode.STOPPED if stop_after else ExitCode.DONE] * ranks

    def losses(self) -> list[float]:
        rows = [json.loads(line) for line in self.directory.metrics_file.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["loss"] for row in rows]

    def evals(self) -> list[tuple[int, str, float]]:
        rows = [json.loads(line) for line in self.directory.eval_file.read_text().splitlines()]
        return [(row["step"], row["set"], row["loss"]) for row in rows]


@pytest.fixture(scope="module")
def whole(pool: RankPool, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> DatasetRun:
    """A run that was never stopped."""
    return DatasetRun(pool, corpus, tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def stopped(pool: RankPool, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    start = DatasetRun(pool, corpus, tmp_path_factory.mktemp("runs") / "stopped", stop_after=3)
    assert len(start.losses()) == 3
    return start.directory.path


def test_resumed_run_equals_an_unstopped_run(
    pool: RankPool, corpus: Corpus, whole: DatasetRun, stopped: Path, tmp_path: Path
) -> None:
    state = open_reader(stopped).scalars["data_state"]
    assert isinstance(state, dict)
    assert len(state["documents"]) == len(state["offsets"]) == 8
    assert max(state["documents"]) > 0
    resumed = DatasetRun(pool, corpus, Path(shutil.copytree(stopped, tmp_path / "run")), workers=1)
    assert resumed.losses() == whole.losses()
    assert resumed.evals() == whole.evals()
    assert [(step, name) for step, name, _ in whole.evals()] == [(3, "validation"), (6, "validation")]


def test_run_resumed_on_one_rank_sees_the_same_samples(
    pool: RankPool, corpus: Corpus, whole: DatasetRun, stopped: Path, tmp_path: Path
) -> None:
    resumed = DatasetRun(pool, corpus, Path(shutil.copytree(stopped, tmp_path / "run")), ranks=1)
    assert resumed.losses() == pytest.approx(whole.losses(), rel=1e-5)


def test_resuming_without_stream_state_changes_the_losses(
    pool: RankPool, corpus: Corpus, whole: DatasetRun, stopped: Path, tmp_path: Path
) -> None:
    control = DatasetRun(pool, corpus, Path(shutil.copytree(stopped, tmp_path / "run")), forget=True)
    assert control.losses()[:3] == whole.losses()[:3]
    assert abs(control.losses()[3] - whole.losses()[3]) > 1e-4


def test_resume_on_a_changed_file_is_refused(
    pool: RankPool, corpus: Corpus, stopped: Path, tmp_path: Path
) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes((corpus.folder / "corpus.jsonl").read_bytes().replace(b"word1", b"word2"))
    with pytest.raises(RanksFailed, match=r"(?s)CheckpointError.*data=.*corpus\.jsonl was"):
        DatasetRun(pool, corpus, Path(shutil.copytree(stopped, tmp_path / "run")), path=str(file))


def test_export_and_generation_find_the_tokenizer(corpus: Corpus, whole: DatasetRun) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(whole.directory.export)
    assert tokenizer.decode(tokenizer("word1 word2").input_ids) == "word1 word2"
    data = open_reader(whole.directory.path).scalars["data"]
    assert isinstance(data, dict)
    assert find_generation(corpus.folder / "data", data["tokenizer"]).tokenizer.hash == data["tokenizer"]
