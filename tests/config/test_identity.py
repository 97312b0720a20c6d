"""Run identity: the same for every layout and every process, another for another model.

pytest tests/config/test_identity.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from toolkit.config import keys
from toolkit.config.compose import compose, from_yaml, to_yaml
from toolkit.config.identity import EXECUTION_KEYS, SECTIONS, identity, identity_differences
from toolkit.config.schema import ModelConfig, OptimConfig, RunConfig

BASE = compose(["+exp=quickstart"])

CARRIED = (
    "zero=stage3",
    "engine=local",
    "precision=bf16",
    "parallel.tensor=2",
    "offload=cpu",
    "cluster.nodes=4",
    "monitor=online",
    "resume=never",
    "checkpoint=minutes",
    "run.name=other",
    "run.dir=/tmp/x",
    "eval.every=7",
    "debug=deterministic",
    "train.steps=9999",
    "train.micro_batch=1",
    "train.activation_checkpointing=true",
    "train.on_nonfinite=continue",
    "optim.kernel=torch",
    "data.path=/elsewhere",
    "+engine.deepspeed.dump_state=true",
)
DECISIVE = (
    "model.hidden_size=128",
    "model=gpt2",
    "optim=sgd",
    "schedule=wsd",
    "train.batch_ramp.start=4",
    "+model.arguments.width=3",
)


def test_how_a_run_is_carried_out_is_not_in_it() -> None:
    config = compose(["+exp=quickstart", *CARRIED])
    changed = {name for name, value in keys.flatten(config).items() if keys.flatten(BASE).get(name) != value}
    assert len(changed) > len(CARRIED)
    assert identity(config) == identity(BASE)
    assert identity_differences(BASE, config) == []


@pytest.mark.parametrize("word", DECISIVE)
def test_what_decides_samples_and_losses_is(word: str) -> None:
    config = compose(["+exp=quickstart", word])
    assert identity(config) != identity(BASE)
    assert identity_differences(BASE, config)


def test_every_decisive_key_changes_it() -> None:
    """Each key of the five sections, but for carriage, makes another run."""
    seen = {identity(RunConfig())}
    for name, key in keys.table().items():
        section, _, rest = name.partition(".")
        if section not in SECTIONS or "." in rest:
            continue
        text = {int: "977", float: "0.5", bool: "true", str: "other"}.get(key.kinds[0])
        value: object = {
            int: 977,
            float: 0.5,
            bool: True,
            str: "prepared" if name == "data.name" else text,
        }.get(key.kinds[0], ["x"])
        if key.choices:
            value = next(choice for choice in key.kinds[0] if choice is not key.default)
        if name == "optim.betas":
            value = [0.5, 0.5]
        config = RunConfig()
        setattr(getattr(config, section), rest, value)
        changed = identity(config) not in seen
        assert changed == (name not in EXECUTION_KEYS), name
        seen.add(identity(config))


def test_it_is_the_same_in_every_process_and_order() -> None:
    words = ["+exp=quickstart", "+model.arguments.b=2", "+model.arguments.a=1"]
    config = compose(words)
    turned = replace(
        config, model=replace(config.model, arguments=dict(reversed(config.model.arguments.items())))
    )
    assert list(turned.model.arguments) != list(config.model.arguments)
    assert identity(turned) == identity(config) == identity(from_yaml(to_yaml(config)))
    code = f"from toolkit.config.compose import compose; from toolkit.config.identity import identity; print(identity(compose({words})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1234"},
    )
    assert done.stdout.strip() == identity(config)
    assert len(identity(config)) == 8
    assert set(identity(config)) <= set("0123456789abcdef")


def test_it_stays_what_it_was() -> None:
    """Run directories bear it: a change here orphans every run that users have."""
    assert identity(RunConfig()) == "44136fa3"
    assert (
        identity(RunConfig(model=ModelConfig(family="llama", hidden_size=64), optim=OptimConfig(lr=1e-3)))
        == "a29caf6b"
    )


def test_a_whole_number_is_the_same_number() -> None:
    assert identity(RunConfig(optim=OptimConfig(clip=2))) == identity(RunConfig(optim=OptimConfig(clip=2.0)))


def test_a_mixture_is_its_names_weights_and_phases_and_not_their_places() -> None:
    words = [
        "data=mixture",
        "+data.sources.web={path: a, weight: 0.7}",
        "+data.sources.code={path: b, weight: 0.3}",
    ]
    mixed = identity(compose(words))
    assert mixed == identity(compose([words[0], words[2].replace("path: b", "path: c"), words[1]]))
    for other in (
        [*words[:2], words[2].replace("0.3", "0.4")],
        [*words[:2], words[2].replace("code", "maths")],
        [*words, "data.phases=[{from_step: 9, weights: {web: 0, code: 1}}]"],
    ):
        assert identity(compose(other)) != mixed


def test_differences_are_named() -> None:
    other = compose(
        ["+exp=quickstart", "model.hidden_size=128", "optim=sgd", "+model.arguments.width=3", "zero=stage0"]
    )
    differences = identity_differences(BASE, other)
    assert "model.hidden_size: 192 -> 128" in differences
    assert "optim.name: adamw -> sgd" in differences
    assert "model.arguments.width: absent -> 3" in differences
    assert not any("zero" in line for line in differences)
    assert identity_differences(BASE, BASE) == []
