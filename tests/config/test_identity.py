"""Run identity: equal for every layout and process, different for another model.

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
from toolkit.config.model import ModelConfig
from toolkit.config.optim import OptimConfig
from toolkit.config.schema import RunConfig

BASE = compose(["+exp=quickstart"])

EXECUTION = (
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
    "train.activation_checkpointing=selective",
    "offload.activations=cpu",
    "checkpoint.staging_gib=4",
    "checkpoint.url=s3://bucket/mine",
    "train.loss_kernel=fused",
    "train.loss_chunk=512",
    "train.on_nonfinite=skip",
    "train.on_spike=rollback",
    "train.rollback.window=2",
    "optim.kernel=torch",
    "data.path=/elsewhere",
    "+engine.deepspeed.dump_state=true",
)
TRAINING = (
    "model.hidden_size=128",
    "model=gpt2",
    "optim=sgd",
    "schedule=wsd",
    "train.batch_ramp.start=4",
    "+model.arguments.width=3",
)


def test_execution_keys_do_not_change_the_identity() -> None:
    config = compose(["+exp=quickstart", *EXECUTION])
    changed = {name for name, value in keys.flatten(config).items() if keys.flatten(BASE).get(name) != value}
    assert len(changed) > len(EXECUTION)
    assert identity(config) == identity(BASE)
    assert identity_differences(BASE, config) == []


@pytest.mark.parametrize("word", TRAINING)
def test_training_keys_change_the_identity(word: str) -> None:
    config = compose(["+exp=quickstart", word])
    assert identity(config) != identity(BASE)
    assert identity_differences(BASE, config)


def test_every_key_of_the_sections_changes_the_identity() -> None:
    """Each key of the five sections, except execution keys, changes the identity."""
    seen = {identity(RunConfig())}
    for name, key in keys.keys_by_name().items():
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


def test_identity_does_not_depend_on_process_or_order() -> None:
    words = ["+exp=quickstart", "+model.arguments.b=2", "+model.arguments.a=1"]
    config = compose(words)
    reordered = replace(
        config, model=replace(config.model, arguments=dict(reversed(config.model.arguments.items())))
    )
    assert list(reordered.model.arguments) != list(config.model.arguments)
    assert identity(reordered) == identity(config) == identity(from_yaml(to_yaml(config)))
    code = (
        "from toolkit.config.compose import compose; from toolkit.config.identity import identity; "
        f"print(identity(compose({words})))"
    )
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


def test_identities_of_existing_runs_do_not_change() -> None:
    """Run directories are named after it: a change would orphan existing runs."""
    assert identity(RunConfig()) == "44136fa3"
    assert (
        identity(RunConfig(model=ModelConfig(family="llama", hidden_size=64), optim=OptimConfig(lr=1e-3)))
        == "a29caf6b"
    )


def test_integers_equal_floats() -> None:
    assert identity(RunConfig(optim=OptimConfig(clip=2))) == identity(RunConfig(optim=OptimConfig(clip=2.0)))


def test_mixture_identity_ignores_paths_and_order() -> None:
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


def test_differences_list_keys_and_values() -> None:
    other = compose(
        ["+exp=quickstart", "model.hidden_size=128", "optim=sgd", "+model.arguments.width=3", "zero=stage0"]
    )
    differences = identity_differences(BASE, other)
    assert "model.hidden_size: 192 -> 128" in differences
    assert "optim.name: adamw -> sgd" in differences
    assert "model.arguments.width: absent -> 3" in differences
    assert not any("zero" in line for line in differences)
    assert identity_differences(BASE, BASE) == []
