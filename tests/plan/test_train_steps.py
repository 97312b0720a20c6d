"""The number of training steps, in the units that people write: 10k steps, 10B tokens, 3 epochs.

pytest tests/plan/test_train_steps.py
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from tests.data.data_folders import documents, make_folder
from tests.plan.cases import CPU, run_config
from toolkit.cluster.jobs.job import resolve_from_files
from toolkit.config.compose import compose, from_yaml, to_yaml
from toolkit.config.numbers import parse_count, parse_percent
from toolkit.config.schema import BatchRampConfig, TrainConfig
from toolkit.data.size import samples_per_epoch
from toolkit.errors import ConfigError, InputError, PlanError, UserError
from toolkit.plan.make import make_plan
from toolkit.plan.train_steps import first_step_after, resolve_epochs, samples_after

BASE = ("+exp=quickstart",)  # 300 steps of 16 x 128 tokens, 30 steps of warm-up


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10k", 10_000),
        ("10B", 10**10),
        ("500M", 5 * 10**8),
        ("1e9", 10**9),
        ("1.5M", 1_500_000),
        ("2_000", 2000),
        ("1.5", None),
        ("1e-3", None),
        ("k", None),
        ("10kk", None),
        ("1e99", None),
        ("ten", None),
    ],
)
def test_counts(text: str, count: int | None) -> None:
    assert parse_count(text) == count


def test_percentages() -> None:
    assert parse_percent("3%") == Fraction(3, 100)
    assert [parse_percent(text) for text in ("101%", "-1%", "3", "%")] == [None] * 4


@pytest.mark.parametrize(
    "words",
    [
        ("train.steps=3e2",),
        ("train.steps=0.3k",),
        ("train.tokens=614400",),
        ("train.tokens=614.4k",),
        ("schedule.warmup=10%",),
        ("train.tokens=0.6144M", "schedule.warmup=10%"),
        ("train.steps=300", "schedule.warmup=3e1"),
    ],
    ids=" ".join,
)
def test_two_spellings_of_a_run_give_the_same_plan(words: tuple[str, ...]) -> None:
    plain = make_plan(compose(BASE), CPU)
    config = compose([*BASE, *words])
    assert from_yaml(to_yaml(config)) == config
    plan = make_plan(config, CPU)
    assert plan == plain
    assert plan.identity == plain.identity == "1635fc16", "run directories of earlier versions are found"


def test_another_length_gives_another_plan() -> None:
    """The control of the test above."""
    plain = make_plan(compose(BASE), CPU)
    assert make_plan(compose([*BASE, "train.tokens=616448"]), CPU) != plain
    assert make_plan(compose([*BASE, "schedule.warmup=11%"]), CPU).identity != plain.identity


def test_tokens_between_two_steps_are_refused_with_both_neighbours() -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(compose([*BASE, "train.tokens=1M"]), CPU)
    (problem,) = refused.value.problems
    assert "train.tokens=999424 or train.tokens=1001472" in problem.remedy
    assert make_plan(compose([*BASE, "train.tokens=999424"]), CPU).config.train.steps == 488
    assert make_plan(compose([*BASE, "train.tokens=1001472"]), CPU).config.train.steps == 489


def test_train_steps_follow_the_batch_ramp() -> None:
    train = TrainConfig(global_batch=16, batch_ramp=BatchRampConfig(start=4, increment=4, samples=60))
    starts = [samples_after(train, step) for step in range(40)]
    assert starts[:6] == [0, 4, 8, 12, 16, 20]
    assert starts[-1] - starts[-2] == 16
    for samples in range(1, starts[-1]):
        step = first_step_after(train, samples)
        assert starts[step - 1] < samples <= starts[step]


def test_epochs_become_steps_that_read_every_sample() -> None:
    config = run_config(train__epochs=1.5, train__global_batch=8)
    resolved = resolve_epochs(config, samples=101)
    assert (resolved.train.steps, resolved.train.epochs) == (19, None)  # 151.5 samples of 8
    with pytest.raises(PlanError, match=r"write train\.steps=100"):
        make_plan(config, CPU)


def test_epochs_count_the_samples_of_the_data(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path / "data", {"train": documents(60, 300)})
    tokens = manifest.split("train").tokens
    config = run_config(train__epochs=2, data__path=str(tmp_path / "data"), data__name="prepared")
    assert samples_per_epoch(config) == tokens // 32
    resolved = resolve_from_files(config).train
    assert (resolved.steps, resolved.epochs) == (-(-2 * (tokens // 32) // 8), None)
    limited = replace(config, data=replace(config.data, max_samples=12))
    assert resolve_from_files(limited).train.steps == 3
    with pytest.raises(InputError, match=r"train\.epochs=null train\.steps=100"):
        resolve_from_files(replace(config, data=replace(config.data, name="mixture")))


def test_a_typed_length_wins_over_the_length_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "long.yaml").write_text("# @package _global_\ntrain:\n  tokens: 10M\n")
    words = [f"--config-dir={tmp_path}", "+exp=long"]
    assert compose(words).train.tokens == "10M"
    typed = compose([*words, "train.steps=7"]).train
    assert (typed.steps, typed.tokens) == (7, None)
    typed = compose([*words, "train.epochs=2"]).train
    assert (typed.epochs, typed.tokens) == (2.0, None)
    with pytest.raises(ConfigError, match=r"write only train\.steps=7"):
        compose([*words, "train.steps=7", "train.tokens=1M"])


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("train.tokens=5%", "train.tokens=500M"),
        ("train.epochs=0", "train.epochs=1"),
        ("schedule.warmup=200%", "schedule.warmup=3%"),
        ("schedule.warmup=soon", "schedule.warmup=3%"),
        ("data.max_samples=0", "data.max_samples=1"),
        ("train.sequence_length=4k", "train.sequence_length=128"),
    ],
)
def test_wrong_lengths_are_refused(word: str, remedy: str) -> None:
    with pytest.raises(UserError) as refused:
        compose([word])
    assert remedy in refused.value.problems[0].remedy


def test_a_number_in_a_file_is_written_out_in_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "many.yaml").write_text("# @package _global_\ntrain:\n  steps: 10k\n")
    with pytest.raises(ConfigError, match=r"write train\.steps=10000"):
        compose([f"--config-dir={tmp_path}", "+exp=many"])


def test_warmup_of_a_longer_run_is_rounded_up_as_in_transformers() -> None:
    config = replace(run_config(train__steps=101), schedule=replace(run_config().schedule, warmup="3%"))
    assert make_plan(config, CPU).config.schedule.warmup == 4
