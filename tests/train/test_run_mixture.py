"""Whole runs on a mixture of sources, and the mistakes that are refused before a start.

pytest tests/train/test_run_mixture.py
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
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


CONFIGURATION_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"web": {"weight": -1}}, "a weight is a number of at least 0"),
    ({"web": {"weight": "none"}}, "a weight is a number of at least 0"),
    ({"web": {"weights": 1}}, "a source has a path and optionally a weight"),
    ({"web": {"weight": 1e-9}}, "at least one sample in a million"),
    ({"x": 7}, "a source has a path"),
    ({"web": {"path": "s3://me:secret@bucket/web"}}, r"web\.path=s3://\*\*\*@bucket/web"),
    ({"phases": [(5, {"code": 1})]}, "missing: web"),
    ({"phases": [(5, {"code": 1, "web": 1, "x": 1})]}, "unknown: x"),
    ({"phases": [(5, {"code": 0, "web": 0})]}, "all weights are 0"),
    ({"phases": [(-5, {"code": 1, "web": 1})]}, "a whole number of at least 0"),
    ({"phases": [{"from": 5}]}, "a whole number of at least 0"),
    ({"phases": [(5, {"code": 1, "web": 1})] * 2}, "in the order of their steps"),
    ({"phases": [(100, {"code": 1, "web": 1})]}, r"train\.steps=101"),
    ({"name": "stdlib"}, "sources and phases belong to a mixture"),
]


def changed_mixture(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    """``config`` with changes of its sources, or of other keys of ``data``."""
    data = {key: value for key, value in change.items() if key in ("name", "phases")}
    if "phases" in data:
        data["phases"] = [
            dict(zip(("from_step", "weights"), each, strict=True)) if isinstance(each, tuple) else each
            for each in data["phases"]
        ]
    sources = dict(config.data.sources)
    for name in change.keys() - data.keys():
        own = change[name]
        sources[name] = {**sources.get(name, {}), **own} if isinstance(own, dict) else own
    return replace(config, data=replace(config.data, sources=sources, **data))


@pytest.fixture(scope="module")
def composed(folders: dict[str, str]) -> RunConfig:
    return compose_mixture(folders)


@pytest.mark.parametrize(("change", "text"), CONFIGURATION_MISTAKES, ids=lambda value: str(value)[:60])
def test_configuration_mistakes_are_refused(change: dict[str, Any], text: str, composed: RunConfig) -> None:
    with pytest.raises(UserError, match=text):
        make_plan(changed_mixture(composed, change), World(ranks=1, ranks_per_node=1, device=Device.CPU))


def test_mixture_without_sources_is_refused() -> None:
    with pytest.raises(UserError, match="a mixture must have sources"):
        make_plan(compose(["data=mixture"]), World(ranks=1, ranks_per_node=1, device=Device.CPU))


def test_sources_that_do_not_fit_are_refused(folders: dict[str, str], composed: RunConfig) -> None:
    for change, text in (
        ({"other": {"path": folders["other"]}}, "all sources have the same tokenizer"),
        ({"web": {"path": "/nowhere"}}, r"data\.sources\.web\.path"),
    ):
        with pytest.raises(InputError, match=text):
            prepare_data(changed_mixture(composed, change), None, Progress.silent())
    for section, key, value, text in (
        ("train", "sequence_length", 100_000, r"train\.sequence_length"),
        ("eval", "sets", ["validation"], r"eval.sets=\[code/validation,web/validation\]"),
        ("eval", "sets", ["web/test"], "no split test"),
        ("model", "vocab_size", 263, "every token must have a row"),
    ):
        config = deepcopy(composed)
        setattr(getattr(config, section), key, value)
        with pytest.raises(InputError, match=text):
            prepare_data(config, None, Progress.silent())
