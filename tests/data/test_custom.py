"""Datasets of the user's own code: order, elasticity, resume, worker processes and mistakes.

pytest tests/data/test_custom.py
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train import user_code
from toolkit.config.data import DataConfig
from toolkit.config.schema import OnSpike, RunConfig
from toolkit.data.custom.samples import DatasetError
from toolkit.data.registry import RunData, open_data, prepare_data
from toolkit.errors import CheckpointError, ConfigError
from toolkit.plan.types import BatchPlan, RampStage
from toolkit.progress import Progress

GLOBAL_BATCH, SAMPLES = 8, 21


def config_of(
    target: str, *, module: str = "tests.train.user_code", workers: int = 0, **arguments: Any
) -> RunConfig:
    config = RunConfig()
    arguments = {"samples": SAMPLES} | arguments if module == "tests.train.user_code" else arguments
    config.data = DataConfig(name="custom", target=f"{module}.{target}", arguments=arguments, workers=workers)
    config.train.global_batch, config.eval.every, config.eval.batches = GLOBAL_BATCH, 1, 4
    return config


def opened(config: RunConfig, data_rank: int = 0, ranks: int = 1) -> RunData:
    batch = BatchPlan(
        micro_batch=2,
        global_batch=GLOBAL_BATCH,
        data_parallel=ranks,
        stages=(RampStage(GLOBAL_BATCH, 0, 0, None),),
    )
    return open_data(config, batch, data_rank, "unused")


def global_batches(
    config: RunConfig, ranks: int, first: int = 0, steps: int = 4
) -> list[list[tuple[int, float]]]:
    """Return number and target of each sample of the global batches, ordered as in the run."""
    streams = [opened(config, rank, ranks).stream for rank in range(ranks)]
    iterators = [stream.steps(first) for stream in streams]
    found = []
    for _ in range(steps):
        by_rank = [next(iterator) for iterator in iterators]
        micro_batches = itertools.chain.from_iterable(zip(*by_rank, strict=True))
        found.append([(int(s["number"]), float(s["y"])) for samples in micro_batches for s in samples])
    for stream in streams:
        stream.close()
    return found


# ---- map-style


@pytest.mark.parametrize("ranks", [2, 4])
def test_map_style_batches_are_the_same_for_any_number_of_ranks_and_from_any_step(ranks: int) -> None:
    """With noise that each sample draws from the global generators."""
    config = config_of("Table")
    reference = global_batches(config, 1, steps=6)
    assert global_batches(config, ranks, steps=6) == reference
    assert global_batches(config, ranks, first=3, steps=3) == reference[3:]
    config.data.shuffle_seed = 1
    assert global_batches(config, ranks, steps=6) != reference, "the comparison can fail"


def test_every_epoch_has_each_sample_once_in_another_order() -> None:
    samples = list(
        itertools.chain(*global_batches(config_of("Table"), 1, steps=2 * SAMPLES // GLOBAL_BATCH + 1))
    )
    numbers, targets = zip(*samples, strict=True)
    first, second = numbers[:SAMPLES], numbers[SAMPLES : 2 * SAMPLES]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    by_number = dict(zip(first, targets[:SAMPLES], strict=True))
    drawn = [by_number[number] != target for number, target in samples[SAMPLES : 2 * SAMPLES]]
    assert all(drawn), "a sample draws other noise in the next epoch"


def test_reading_does_not_change_the_global_generators() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index,union-attr]
    global_batches(config_of("Table"), 1)
    global_batches(config_of("Rows"), 1)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_workers_give_the_same_samples_and_name_the_line_that_raises(workers: int) -> None:
    expected = global_batches(config_of("Table", bad=17), 1, steps=1)
    data = opened(config_of("Table", workers=workers, bad=17))
    steps = data.stream.steps(0)
    assert [(int(s["number"]), float(s["y"])) for samples in next(steps) for s in samples] == expected[0]
    with pytest.raises(DatasetError) as caught:
        list(itertools.islice(steps, 4))
    data.stream.close()
    message, line = str(caught.value), line_of(user_code, "raise OSError")
    assert "data.target=tests.train.user_code.Table" in message
    assert f"raised OSError in {user_code.__file__}:{line} when reading sample 17: unreadable" in message
    if workers:
        assert "Traceback in the dataset" in caught.value.__notes__[0]
    else:
        assert isinstance(caught.value.__cause__, OSError)
    assert not [thread for thread in threading.enumerate() if thread.name == "data-stream"]


def line_of(module: Any, text: str) -> int:
    lines = Path(module.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


# ---- iterable-style


@pytest.mark.parametrize("target", ["Rows", "StatefulRows"])
def test_iterable_batches_are_the_same_for_any_number_of_ranks(target: str) -> None:
    reference = global_batches(config_of(target), 1)
    assert [number for number, _ in reference[0]] == list(range(8))
    assert global_batches(config_of(target), 2) == reference


@pytest.mark.parametrize("target", ["Rows", "StatefulRows", "Shares"])
def test_iterable_resumes_in_the_middle_of_its_second_epoch(target: str) -> None:
    config = config_of(target)
    whole, before = opened(config).stream, opened(config).stream
    expected = list(itertools.islice(whole.steps(0), 6))
    list(itertools.islice(before.steps(0), 4))  # 32 samples of 21
    state = json.loads(json.dumps(before.state(4)))
    after = opened(config).stream
    after.check_fingerprint(before.fingerprint())
    after.restore(state)
    steps = after.steps(4)
    for reference, resumed in zip(expected[4:], steps, strict=False):
        assert [float(s["y"]) for samples in reference for s in samples] == [
            float(s["y"]) for samples in resumed for s in samples
        ]
    if target == "StatefulRows":
        assert after._dataset.read == 16, "its state replaces reading what came before"  # type: ignore[attr-defined]


def test_shares_are_disjoint_and_another_number_of_ranks_is_refused() -> None:
    config = config_of("Shares")
    streams = [opened(config, rank, 2).stream for rank in range(2)]
    numbers = [[int(s["number"]) for samples in next(stream.steps(0)) for s in samples] for stream in streams]
    assert numbers == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(
        CheckpointError, match=r"shares=1, the checkpoint has shares=2\n.*\n.*with 2 data ranks"
    ):
        opened(config).stream.check_fingerprint(streams[0].fingerprint())


# ---- evaluation


@pytest.mark.parametrize("target", ["Table", "Rows", "Shares"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_counts_each_sample_once_in_micro_batches_of_one_size(target: str, ranks: int) -> None:
    numbers: list[int] = []
    counts = set()
    for rank in range(ranks):
        batches = list(opened(config_of(target), rank, ranks).sets["validation"].batches())
        counts.add(tuple(len(step) for step in batches))
        for samples in itertools.chain.from_iterable(batches):
            assert len(samples) == 2
            numbers += [int(sample["number"]) for sample in samples[: samples.real]]
    assert sorted(numbers) == list(range(SAMPLES))
    assert len(counts) == 1, "all ranks have the same number of micro-batches"


# ---- mistakes


class Plain:
    def __init__(self, length: int = 40, split: str = "train") -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        return number


class NoSplit:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> int:
        return number


class Unpicklable(Plain):
    def __init__(self, split: str = "train") -> None:
        super().__init__()
        self.lock = threading.Lock()


class Grows(Plain):
    def __getitem__(self, number: int) -> int:
        self.length += 1
        return number


class Counts(Plain):
    calls = 0

    def __getitem__(self, number: int) -> int:
        self.calls += 1
        return self.calls


class Neither:
    pass


class Empty(torch.utils.data.IterableDataset[int]):
    def __init__(self, split: str = "train") -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(())


class BadState(user_code.Rows):
    def state_dict(self) -> dict[str, Any]:
        return {"position": {1, 2}}


def unannotated(split: str = "train"):  # type: ignore[no-untyped-def]
    return Plain()


def annotated(split: str = "train") -> Plain:
    return Plain()


def prepared(config: RunConfig) -> str:
    return prepare_data(config, None, Progress.silent())


def with_rollbacks(config: RunConfig) -> RunConfig:
    config.train.on_spike = OnSpike.rollback
    return config


MISTAKES: dict[str, tuple[RunConfig, str]] = {
    "no split": (config_of("NoSplit", module=__name__), "no argument split.*\n.*\n.*add the argument split"),
    "unknown argument": (config_of("Plain", module=__name__, width=3), "width"),
    "split given": (config_of("Plain", module=__name__, split="x"), "leave out data.arguments.split"),
    "too short": (config_of("Plain", module=__name__, length=7), "7 samples.*\n.*\n.*train.global_batch=7"),
    "neither style": (config_of("Neither", module=__name__), "the class Neither has neither"),
    "not annotated": (config_of("unannotated", module=__name__), "is not annotated to return a dataset"),
    "unpicklable": (
        config_of("Unpicklable", module=__name__, workers=1),
        r"test_custom.py:\d+ cannot be pickled: TypeError.*\n.*\n.*data.workers=0",
    ),
    "workers of an iterable": (config_of("Rows", workers=1), "write data.workers=0"),
    "rollbacks with an iterable": (
        with_rollbacks(config_of("Rows")),
        "train.on_spike=rollback, and it is iterable-style.*\\n.*\\n.*write train.on_spike=ignore",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_before_training(case: str) -> None:
    config, text = MISTAKES[case]
    with pytest.raises(ConfigError, match=text) as caught:
        prepared(config)
    assert caught.value.problems[0].remedy


def test_valid_datasets_are_accepted() -> None:
    for config in (
        config_of("annotated", module=__name__),
        with_rollbacks(config_of("Plain", module=__name__)),
        config_of("Unpicklable", module=__name__),
        config_of("Rows"),
        config_of("Shares"),
    ):
        assert prepared(config) == config.data.target


def test_dataset_without_split_is_accepted_without_evaluation() -> None:
    config = config_of("NoSplit", module=__name__)
    config.eval.every = 0
    prepared(config)


def test_nondeterministic_samples_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    prepared(config_of("Counts", module=__name__))
    assert "sample 0, read twice, has two values" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        prepared(config_of("Table"))  # draws from the global generators
    assert not caplog.text


def failure(config: RunConfig, act: Callable[[RunData], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        act(opened(config))
    return str(caught.value)


def test_failures_during_training_are_named() -> None:
    def take(data: RunData) -> object:
        return list(itertools.islice(data.stream.steps(0), 20))

    grown = failure(config_of("Grows", module=__name__), take, DatasetError)
    assert "had 40 samples when the run started, and has 42 now" in grown
    config = config_of("Empty", module=__name__)
    assert "yields no sample in epoch 0" in failure(config, take, ConfigError)

    def state(data: RunData) -> object:
        next(iter(data.stream.steps(0)))
        return data.stream.state(1)

    bad = config_of("BadState", module=__name__, samples=SAMPLES)
    assert "state_dict() returns what JSON cannot store" in failure(bad, state, ConfigError)


def test_another_length_at_the_next_start_is_refused() -> None:
    saved = opened(config_of("Table")).stream.fingerprint()
    with pytest.raises(
        CheckpointError, match=r"length=20, the checkpoint has length=21\n.*\n.*the 21 samples"
    ):
        opened(config_of("Table", samples=20)).stream.check_fingerprint(saved)
