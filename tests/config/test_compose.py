"""Groups, experiments and overrides compose to a typed configuration, which YAML preserves.

pytest tests/config/test_compose.py
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from toolkit.config import engine_keys, search_path
from toolkit.config.checkpoint import CheckpointConfig
from toolkit.config.compose import compose, from_yaml, to_yaml
from toolkit.config.model import ModelConfig
from toolkit.config.monitor import MonitorConfig
from toolkit.config.optim import OptimConfig
from toolkit.config.overrides import parse_overrides
from toolkit.config.schema import EngineConfig, EngineName, Precision, RunConfig, TrainConfig
from toolkit.errors import ConfigError

FOLDERS = search_path.folders(None)
EXPERIMENTS = search_path.options(FOLDERS, "exp")
GROUPS = [group for group in search_path.groups(FOLDERS) if group != "exp"]
# Options of different groups are independent, so one composition tests one option of each group.
ROUNDS = [
    [word for word in words if word]
    for words in zip_longest(
        *([f"{group}={option}" for option in search_path.options(FOLDERS, group)] for group in GROUPS)
    )
]
# Required keys of some options.
GIVEN = {
    "model=custom": "model.target=my.Model",
    "optim=custom": "optim.target=my.Optimizer",
    "schedule=custom": "schedule.target=my.factor",
    "model=pretrained": "model.pretrained=folder",
    "data=prepared": "data.path=folder",
    "data=arrays": "data.path=folder",
    "data=dataset": "data.dataset.path=corpus.jsonl data.dataset.tokenizer=folder",
    "data=custom": "data.target=my.Dataset",
    "offload=nvme": "offload.nvme_path=/disk",
}


def plain(value: Any) -> bool:
    """Whether no part of ``value`` is an OmegaConf object."""
    if is_dataclass(value):
        return all(plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return all(plain(inner) for inner in value.values())
    if isinstance(value, list):
        return all(plain(inner) for inner in value)
    return not OmegaConf.is_config(value)


@pytest.mark.parametrize("options", ROUNDS, ids=lambda options: " ".join(options))
def test_every_option_composes(options: list[str]) -> None:
    config = compose(
        [*options, *(word for option, given in GIVEN.items() if option in options for word in given.split())]
    )
    assert plain(config)
    assert from_yaml(to_yaml(config)) == config
    assert not engine_keys.problems(config)


def test_required_keys_of_an_option_are_reported() -> None:
    rounds = [[option for option in words if option in GIVEN] for words in ROUNDS]
    assert sorted(option for words in rounds for option in words) == sorted(GIVEN)
    for words in filter(None, rounds):
        with pytest.raises(ConfigError) as caught:
            compose(words)
        for option in words:
            assert any(problem.key == GIVEN[option].partition("=")[0] for problem in caught.value.problems)


def test_every_option_has_a_comment() -> None:
    for group in GROUPS:
        for option in search_path.options(FOLDERS, group):
            assert (FOLDERS[0] / group / f"{option}.yaml").read_text().startswith("# "), f"{group}={option}"


def test_experiments_select_the_layout_by_groups() -> None:
    for name in EXPERIMENTS:
        written = yaml.safe_load((FOLDERS[0] / "exp" / f"{name}.yaml").read_text())
        assert written["run"]["name"] == name
        assert not written.keys() & {"zero", "offload", "parallel", "engine", "precision", "cluster"}, (
            "an override of a group could not change these"
        )
        chosen = {
            key.removeprefix("override /"): value
            for entry in written["defaults"]
            if isinstance(entry, dict)
            for key, value in entry.items()
        }
        assert chosen.get("zero") == "stage3" or "zero3" not in name
        assert chosen.get("offload") == ("cpu" if "offload" in name else None)
        assert "parallel" not in chosen


def test_defaults_of_groups_equal_the_schema() -> None:
    config = compose([])
    assert (config.engine.name, config.zero.stage, config.precision.name) == (
        EngineName.deepspeed,
        0,
        Precision.fp32,
    )
    assert config.model.family == "llama"
    assert config.optim == OptimConfig(), "conf/optim/adamw.yaml equals the schema"
    assert config.checkpoint == CheckpointConfig()


def test_overrides_win_over_experiments_and_experiments_over_defaults() -> None:
    words = [
        "+exp=quickstart",
        "zero=stage3",
        "optim=muon",
        "train.steps=7",
        "model.hidden_size=128",
        "+engine.deepspeed.dump_state=true",
    ]
    config = compose(words)
    assert (config.zero.stage, config.train.steps, config.model.hidden_size) == (3, 7, 128)
    assert config.model.num_hidden_layers == 4
    assert (config.optim.name, config.optim.lr) == ("muon", 2e-3)
    assert config.engine.deepspeed == {"dump_state": True}
    assert config == compose([words[0], *reversed(words[1:])]), "the order of overrides does not matter"


def test_values_keep_their_types() -> None:
    config = compose(
        [
            "run.name=007",
            "optim.lr=1e-3",
            "checkpoint.every=500",
            "train.micro_batch=null",
            "optim.betas=[0,0.5]",
            "monitor.prompt='def f(x, y):  # ${a}'".replace("${", "\\${"),
            "model=custom",
            "model.target=a.B",
            "+model.arguments.sizes=[1,2]",
            "+model.arguments.inner.name=x",
        ]
    )
    assert config.run.name == "007"
    assert config.optim.lr == 1e-3
    assert config.checkpoint.every == "500"
    assert config.optim.betas == [0.0, 0.5]
    assert config.monitor.prompt == "def f(x, y):  # ${a}"
    assert config.model.arguments == {"sizes": [1, 2], "inner": {"name": "x"}}
    assert from_yaml(to_yaml(config)) == config


def test_values_may_refer_to_other_keys() -> None:
    assert compose(["schedule.warmup=${train.steps}", "train.steps=12"]).schedule.warmup == 12


def test_config_dir_adds_groups_and_experiments(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "wide.yaml").write_text("# Wide.\nfamily: gpt2\nhidden_size: 512\n")
    (tmp_path / "exp" / "mine.yaml").write_text(
        "# @package _global_\n# mine\ndefaults:\n  - override /model: wide\n  - _self_\ntrain:\n  steps: 3\n"
        "engine:\n  deepspeed:\n    dump_state: true\n"
    )
    mine = ["+exp=mine", f"--config-dir={tmp_path}"]
    config = compose(mine)
    assert (config.model.hidden_size, config.train.steps) == (512, 3)
    for option in (["--config-dir", str(tmp_path)], ["-cd", str(tmp_path)]):
        assert parse_overrides(["+exp=mine", *option]) == parse_overrides(mine)
    # A setting from a file may be changed without a plus and with it, and deleted.
    assert compose([*mine, "engine.deepspeed.dump_state=false"]).engine.deepspeed == {"dump_state": False}
    assert compose([*mine, "+engine.deepspeed.dump_state=false"]).engine.deepspeed == {"dump_state": False}
    assert compose([*mine, "~engine.deepspeed.dump_state"]).engine.deepspeed == {}


@pytest.mark.parametrize("option", [["--num_gpus", "2"], ["--num_gpus=2"]])
def test_option_of_a_launcher_behind_the_script_is_named(option: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+exp=quickstart", *option])
    (problem,) = caught.value.problems
    assert "stand before the script" in problem.rule
    assert "deepspeed --num_gpus 2 " in problem.remedy


FILE_MISTAKES = {
    "an unknown key": ("# @package _global_\ntrain:\n  stepz: 3\n", "train.stepz", "train.steps"),
    "a wrong type": ("# @package _global_\ntrain:\n  steps: many\n", "train.steps", "whole number"),
    "no package": ("train:\n  steps: 3\n", "exp", "@package _global_"),
    "no package, with defaults": ("defaults:\n  - override /zero: stage1\n", "exp", "@package _global_"),
    "no YAML": ("# @package _global_\ntrain: [\n", "mine.yaml", "YAML"),
    "an unknown option": (
        "# @package _global_\ndefaults:\n  - override /zero: stage7\n",
        "zero: stage7",
        "stage3",
    ),
    "an unknown group": ("# @package _global_\ndefaults:\n  - override /zeros: stage1\n", "zeros", "zero"),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_mistakes_in_user_files_are_reported(name: str, tmp_path: Path) -> None:
    text, shown, also = FILE_MISTAKES[name]
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["+exp=mine", f"--config-dir={tmp_path}"])
    assert shown in str(caught.value)
    assert also in str(caught.value)


def test_files_with_names_of_conf_are_refused(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "quickstart.yaml").write_text("# @package _global_\n")
    with pytest.raises(ConfigError, match="file names are unique"):
        compose([f"--config-dir={tmp_path}"])


def test_compose_writes_no_files_and_changes_no_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    compose(["+exp=quickstart"])
    assert not list(tmp_path.iterdir())
    assert (logging.getLogger().handlers, logging.getLogger().level) == (handlers, level)


def test_compose_is_fast_and_does_not_import_torch() -> None:
    """Measured 0.25 s with the imports. CPU time does not depend on other processes."""
    code = (
        "import time; began = time.process_time()\n"
        "from toolkit.config.compose import compose\n"
        "compose(['+exp=quickstart', 'zero=stage3'])\n"
        "import sys; print(time.process_time() - began, 'torch' in sys.modules, 'deepspeed' in sys.modules)"
    )
    best = 9.0
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=os.environ,
        )
        seconds, *heavy = done.stdout.split()
        assert heavy == ["False", "False"]
        best = min(best, float(seconds))
        if best < 1.5:
            break
    assert best < 1.5


# -- text

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    [
        "${a}",
        "\\${a}",
        "\\\\${",
        "a\\",
        "$",
        "1e3",
        "007",
        "null",
        "true",
        "on",
        "1_000",
        "a: b",
        "# c",
        "'",
        '"',
        " x ",
        "\u2028",
        "\x85",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | TEXT.filter(lambda text: text != "???"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc_", min_size=1, max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
NUMBERS = st.floats(min_value=0, allow_nan=False)


@settings(max_examples=10, deadline=None)
@given(
    prompt=TEXT.filter(lambda text: text != "???"),
    lr=NUMBERS,
    eps=NUMBERS,
    seed=st.integers(0, 2**63),
    given_keys=st.dictionaries(st.text("abc_", min_size=1, max_size=6), VALUES, max_size=3),
)
def test_yaml_round_trip_is_exact(
    prompt: str, lr: float, eps: float, seed: int, given_keys: dict[str, Any]
) -> None:
    config = RunConfig(
        monitor=MonitorConfig(prompt=prompt),
        optim=OptimConfig(lr=lr, eps=eps, betas=[0.1, 0.2]),
        train=TrainConfig(seed=seed),
        engine=EngineConfig(deepspeed=given_keys),
        model=ModelConfig(family="llama", arguments=given_keys),
    )
    restored = from_yaml(to_yaml(config))
    assert restored == config
    assert to_yaml(restored) == to_yaml(config)
    assert plain(restored)


def test_missing_keys_have_their_defaults() -> None:
    assert from_yaml("run: {name: a}") == RunConfig(run=compose(["run.name=a"]).run)
    for text in ("train: {stepz: 3}", "train: {steps: many}", "a: [", "- a"):
        with pytest.raises(ConfigError):
            from_yaml(text)


def test_activation_checkpointing_has_modes_numbers_and_the_booleans_of_older_runs() -> None:
    name = "train.activation_checkpointing"
    for typed, mode, every in (
        *(("none", "none", 1), ("false", "none", 1), ("selective", "selective", 1)),
        *(("full", "full", 1), ("true", "full", 1), ("1", "full", 1), ("3", "full", 3)),
    ):
        configs = [from_yaml(f"train: {{activation_checkpointing: {typed}}}")]
        if typed in ("selective", "true", "3"):  # text, a boolean and a number in Hydra's grammar
            composed = compose([f"{name}={typed}"])
            configs += [composed, from_yaml(to_yaml(composed))]
        for config in configs:
            recomputation = config.train.recomputation
            assert (recomputation.mode.name, recomputation.every) == (mode, every)
            assert config.train.activation_checkpointing not in ("true", "false")


@pytest.mark.parametrize("typed", ["some", "0", "-1", "2.5"])
def test_other_values_of_activation_checkpointing_are_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.activation_checkpointing=none"):
        from_yaml(f"train: {{activation_checkpointing: {typed}}}")


EVALUATED = {
    "environment": "data: {path: 'http://host/${oc.env:TOOLKIT_SECRET}'}",
    "environment in a list": "eval: {sets: [validation, '${oc.env:TOOLKIT_SECRET}']}",
    "environment below an open key": "engine: {deepspeed: {wandb: {project: '${oc.env:TOOLKIT_SECRET}'}}}",
    "after an escaped backslash": "data: {path: '\\\\${oc.env:TOOLKIT_SECRET}'}",
    "inside an escaped one": "data: {path: '\\${a:${oc.env:TOOLKIT_SECRET}}'}",
    "whole section": "data: '${oc.create:{path: x}}'",
    "another key": "train: {steps: '${eval.every}'}",
    "decoded": "data: {path: '${oc.decode:\"${oc.env:TOOLKIT_SECRET}\"}'}",
}


@pytest.mark.parametrize("kind", EVALUATED)
def test_interpolations_in_yaml_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_SECRET", "key-of-mine")
    with pytest.raises(ConfigError, match="is not evaluated") as caught:
        from_yaml(EVALUATED[kind])
    assert "key-of-mine" not in str(caught.value)


def test_escaped_interpolations_are_read_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_SECRET", "key-of-mine")
    assert from_yaml("data: {path: 'a\\${oc.env:TOOLKIT_SECRET}'}").data.path == "a${oc.env:TOOLKIT_SECRET}"


def test_yaml_aliases_are_refused() -> None:
    """Nine nested aliases of nine references each would be a list of 387 million strings."""
    with pytest.raises(ConfigError, match="refers to another value"):
        from_yaml("eval: {sets: &a [x, x]}\ndata: {dataset: {text: *a}}")
