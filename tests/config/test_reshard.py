"""The configuration of launch/reshard.py: typed, explained, and no key where nothing uses it.

pytest tests/config/test_reshard.py
"""

from __future__ import annotations

import re

import pytest

from toolkit.config import keys
from toolkit.config.compose import compose_reshard
from toolkit.config.help import help_text
from toolkit.config.model import ModelConfig
from toolkit.config.reshard import ACTION_KEYS, FORMAT_KEYS, ReshardAction, TargetFormat, TargetZeroStage
from toolkit.config.roots import RESHARD
from toolkit.config.schema import Precision
from toolkit.errors import ConfigError

# what is typed, the key at fault, what the rule says, what the remedy says
MISTAKES = (
    ("sorce=x", "sorce", "there is no key", "write source=x;"),
    ("target.fromat=native", "target.fromat", "target has no key fromat", "target.format"),
    ("zero=stage3", "zero", "there is no key", "write target.zero=stage3;"),
    (
        "parallel.tensor=4",
        "parallel.tensor",
        "there is no section or group parallel",
        "write target.parallel.tensor=4;",
    ),
    ("+exp=quickstart", "exp", "there is no key", "--help"),
    (
        "target.format=safetensors",
        "target.format",
        "one of native, deepspeed, universal, megatron, huggingface",
        "target.format=native",
    ),
    ("action=copy", "action", "one of convert, plan, inspect, verify, diff", "action=convert"),
    ("model=lama", "model", "the options of model are", "write model=llama"),
    ("+workers=3", "workers", "changed without a plus", "write workers=3"),
    ("workers=0", "workers", "at least 1", "workers=1"),
    ("target.parallel.tensor=0", "target.parallel.tensor", "at least 1", "write target.parallel.tensor=1"),
    ("model.target=my.Model", "model.target", "only the names in its checkpoint", "remove it"),
    # keys that nothing uses
    (
        "target.zero=stage3",
        "target.zero",
        "native takes target.precision, target.optimizer",
        "remove it: it has no effect",
    ),
    ("target.zero=stage1", "target.zero", "native takes", "remove it"),  # though it is the default
    ("target.parallel={tensor: 2}", "target.parallel", "native takes", "remove it"),
    ("rate=1.5", "rate", "action=convert uses source, target, workers, examine, model", "another action"),
)


@pytest.mark.parametrize(("typed", "key", "rule", "remedy"), MISTAKES)
def test_mistakes(typed: str, key: str, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_reshard(["source=a", "target=b", typed])
    (problem,) = caught.value.problems
    assert (problem.key, rule in problem.rule, remedy in problem.remedy) == (key, True, True), str(problem)


def test_what_an_action_needs_is_asked_for_and_what_it_does_not_use_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_reshard([])
    assert [problem.key for problem in caught.value.problems] == ["source", "target"]
    compose_reshard(["source=a", "action=plan", "rate=2"])
    compose_reshard(["source=a", "target=b", "action=diff"])
    for action in ("inspect", "verify"):
        compose_reshard(["source=a", f"action={action}"])
        with pytest.raises(ConfigError, match=f"target.path=b with action={action}"):
            compose_reshard(["source=a", "target=b", f"action={action}"])


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_reshard(["target.zero=stage3", "rate=1", "target.parallel.data=2"])
    assert [problem.key for problem in caught.value.problems] == [
        "target.zero",
        "rate",
        "target.parallel.data",
        "source",
        "target",
    ]


def test_words_become_types() -> None:
    config = compose_reshard(
        [
            "source=runs/a",
            "target=out/b",
            "target.format=deepspeed",
            "target.zero=stage3",
            "target.parallel.data=8",
            "target.precision=bf16",
            "target.optimizer=false",
        ]
    )
    assert (config.action, config.source, config.target.path) == (ReshardAction.convert, "runs/a", "out/b")
    assert (config.target.format, config.target.zero, config.target.parallel.data) == (
        TargetFormat.deepspeed,
        TargetZeroStage.stage3,
        8,
    )
    assert (config.target.precision, config.target.optimizer, config.model) == (
        Precision.bf16,
        False,
        ModelConfig(),
    )
    assert compose_reshard(["source=a", "target.path=b"]) == compose_reshard(["source=a", "target=b"])


def test_a_model_is_chosen_as_for_training() -> None:
    config = compose_reshard(["source=a", "action=inspect", "model=qwen3", "model.num_hidden_layers=3"])
    assert (config.model.family, config.model.num_hidden_layers, config.model.head_dim) == ("qwen3", 3, 32)


def test_each_action_and_format_says_what_it_uses() -> None:
    assert ACTION_KEYS.keys() == set(ReshardAction)
    assert FORMAT_KEYS.keys() == set(TargetFormat)
    known = {*keys.keys_by_name(RESHARD), *keys.sections(RESHARD)}
    assert {name for names in ACTION_KEYS.values() for name in names} <= known
    assert {f"target.{name}" for names in FORMAT_KEYS.values() for name in names} <= known


def test_help_has_every_key_and_what_it_means() -> None:
    text = help_text(root=RESHARD)
    for name in keys.keys_by_name(RESHARD):
        found = re.search(rf"^    {re.escape(name)}=(.*?)(?:\n)?\s\s+(\S.*)$", text, re.MULTILINE)
        assert found, name
        assert len(found[2]) > 5, name
    assert re.search(r"^    llama +A tiny Llama", text, re.MULTILINE), (
        "options of the group model, none of which is the default"
    )
    assert "offload" not in text
    assert help_text(["target"], RESHARD).count("target.parallel.") == 4
