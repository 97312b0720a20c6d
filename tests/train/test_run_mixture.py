"""Whole runs on a mixture of sources, and the mistakes that are refused before a start.

pytest tests/train/test_run_mixture.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.data_folders import documents, make_folder
from tests.train.tiny_run import TinyRun, equal_tensors, read_jsonl
from toolkit.config.compose import compose
from toolkit.config.schema import EvalConfig, RunConfig
from toolkit.data.registry import prepare_data
from toolkit.errors import ExitCode, InputError, UserError
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.progress import Progress

PHASES = [{"from_step": 3, "weights": {"code": 1, "web": 0}}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("sources")
    for number, name in enumerate(("code", "web")):
        make_folder(
            root / name,
            {split: documents(40, 260, seed=number) for split in ("train", "validation")},
            vocab_size=264,
        )
    make_folder(root / "other", {"train": documents(40, 260)}, vocab_size=264, tokenizer="{ }")
    return {name: str(root / name) for name in ("code", "web", "other")}


def sources(folders: dict[str, str]) -> dict[str, Any]:
    return {"web": {"path": folders["web"], "weight": 3}, "code": {"path": folders["code"]}}


def mixture_of(folders: dict[str, str], phases: list[Any] = PHASES) -> Callable[[RunConfig], None]:
    def change(config: RunConfig) -> None:
        config.data.name, config.data.sources, config.data.phases = "mixture", sources(folders), phases
        config.eval = EvalConfig(every=3, batches=1, sets=["web/validation", "code/validation"])

    return change


def test_mixture_weights_change_at_a_phase_and_the_run_resumes(
    folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(folders["code"])
    whole = TinyRun(tmp_path / "whole", path, config=mixture_of(folders))
    rows = read_jsonl(whole.directory.metrics_file)
    assert all(0 < row["epochs/web"] < row["epochs/code"] * 4 for row in rows[2:])
    assert rows[5]["epochs/web"] == rows[2]["epochs/web"], "its weight is 0 from the fourth step"
    assert [name for _, name, _ in whole.evals()] == ["web/validation", "code/validation"] * 2
    assert sum(message.startswith("step 3: samples taken: code ") for message in caplog.messages) == 1
    assert "; samples: code " in caplog.text

    assert (
        TinyRun(tmp_path / "parts", path, stop_after=2, config=mixture_of(folders)).code is ExitCode.STOPPED
    )
    resumed = TinyRun(tmp_path / "parts", path, config=mixture_of(folders))
    assert resumed.rows() == whole.rows()
    assert equal_tensors(resumed.state(), whole.state())

    with pytest.raises(UserError, match=r"contains another run \(data\.phases: "):
        TinyRun(tmp_path / "parts", path, config=mixture_of(folders, []))


def compose_mixture(folders: dict[str, str], *overrides: str) -> RunConfig:
    return compose(
        [
            "model=llama",
            "model.vocab_size=264",
            "data=mixture",
            "eval.every=1",
            "eval.sets=[web/validation]",
            *(f"+data.sources.{name}.path={folders[name]}" for name in ("code", "web")),
            *overrides,
        ]
    )


def test_overrides_define_a_mixture(folders: dict[str, str]) -> None:
    config = compose_mixture(
        folders,
        "+data.sources.web.weight=0.7",
        "data.phases=[{from_step: 10, weights: {code: 0.5, web: 0.5}}]",
    )
    assert config.data.sources == {
        "code": {"path": folders["code"]},
        "web": {"path": folders["web"], "weight": 0.7},
    }
    assert config.data.phases == [{"from_step": 10, "weights": {"code": 0.5, "web": 0.5}}]
    assert prepare_data(config, None, Progress.silent()) == folders["code"]


CONFIGURATION_MISTAKES = {
    "+data.sources.web.weight=-1": "a weight is a number of at least 0",
    "+data.sources.web.weight=none": "a weight is a number of at least 0",
    "+data.sources.web.weights=1": "a source has a path and optionally a weight",
    "+data.sources.web.weight=1e-9": "at least one sample in a million",
    "+data.sources.x=7": "a source has a path",
    "+data.sources.web.path=s3://me:secret@bucket/web": r"web\.path=s3://\*\*\*@bucket/web",
    "data.phases=[{from_step: 5, weights: {code: 1}}]": "missing: web",
    "data.phases=[{from_step: 5, weights: {code: 1, web: 1, x: 1}}]": "unknown: x",
    "data.phases=[{from_step: 5, weights: {code: 0, web: 0}}]": "all weights are 0",
    "data.phases=[{from_step: -5, weights: {code: 1, web: 1}}]": "a whole number of at least 0",
    "data.phases=[{from: 5}]": "a whole number of at least 0",
    "data.phases=[{from_step: 5, weights: {code: 1, web: 1}}, {from_step: 5, weights: {code: 1, web: 1}}]": (
        "in the order of their steps"
    ),
    "data.phases=[{from_step: 100, weights: {code: 1, web: 1}}]": "train.steps=101",
    "data.name=stdlib": "sources and phases belong to a mixture",
}


@pytest.mark.parametrize("override", CONFIGURATION_MISTAKES)
def test_configuration_mistakes_are_refused(override: str, folders: dict[str, str]) -> None:
    with pytest.raises(UserError, match=CONFIGURATION_MISTAKES[override]):
        make_plan(compose_mixture(folders, override), World(ranks=1, ranks_per_node=1, device=Device.CPU))


def test_mixture_without_sources_is_refused() -> None:
    with pytest.raises(UserError, match="a mixture must have sources"):
        make_plan(compose(["data=mixture"]), World(ranks=1, ranks_per_node=1, device=Device.CPU))


DATA_MISTAKES = {
    "+data.sources.other.path={other}": "all sources have the same tokenizer",
    "+data.sources.web.path=/nowhere": "data.sources.web.path",
    "train.sequence_length=100000": "train.sequence_length",
    "eval.sets=[validation]": r"eval.sets=\[code/validation,web/validation\]",
    "eval.sets=[web/test]": "no split test",
    "model.vocab_size=263": "every token must have a row",
}


@pytest.mark.parametrize("override", DATA_MISTAKES)
def test_sources_that_do_not_fit_are_refused(override: str, folders: dict[str, str]) -> None:
    config = compose_mixture(folders, override.format(**folders))
    with pytest.raises(InputError, match=DATA_MISTAKES[override]):
        prepare_data(config, None, Progress.silent())
