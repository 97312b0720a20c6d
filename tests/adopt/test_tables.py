"""The tables account for every key of the installed tools.

pytest tests/adopt/test_tables.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from toolkit.adopt import accelerate, deepspeed, megatron, trainer
from toolkit.adopt.types import Context, Decision, Format, Outcome
from toolkit.config.keys import is_open, keys_by_name
from toolkit.config.roots import RUN
from toolkit.config.search_path import folders, groups, options
from toolkit.config.vendors.installed import DEEPSPEED, MEGATRON, load_schema
from toolkit.config.vendors.key_schema import KeySchema

UNKNOWN = ("no key", "neither this toolkit", "unknown field", "unknown accelerate key")
EXAMPLES = {"bool": True, "int": 2, "float": 0.5, "str": "text", "list": [1], "dict": {"a": 1}, "null": None}


def leaves(schema: KeySchema, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with a value that its schema accepts."""
    for name, node in (schema.fields or {}).items():
        if node.fields:
            yield from leaves(node, f"{above}{name}.")
        else:
            value = node.choices[-1] if node.choices else EXAMPLES[node.types[0]] if node.types else "text"
            yield f"{above}{name}", value


def context(keys: dict[str, Any], format: Format) -> Context:
    return Context(
        keys=keys,
        formats=frozenset([format]),
        ranks=2,
        micro_batch=2,
        accumulation=1,
        global_batch=4,
        steps=100,
    )


def check(name: str, decision: Decision) -> None:
    assert not any(word in decision.note for word in UNKNOWN), (name, decision)
    if decision.outcome in (Outcome.REFUSED, Outcome.CHANGED):
        assert decision.note, name
    if decision.outcome is Outcome.EXACT:
        assert decision.targets or decision.note, name
    for target, value in decision.targets:
        if target in groups(folders(None)):
            assert value in options(folders(None), target), (name, decision)
        else:
            assert target in keys_by_name(RUN) or is_open(target, RUN), (name, decision)


def test_every_key_of_deepspeed() -> None:
    keys = list(leaves(load_schema(DEEPSPEED)))
    assert len(keys) > 150
    for name, value in keys:
        for given in (value, "auto"):
            check(name, deepspeed.decide(name, given, context({name: given}, Format.DEEPSPEED)))


def test_every_setting_of_megatron_core() -> None:
    names = [
        (name, value)
        for section in (load_schema(MEGATRON).fields or {}).values()
        for name, value in leaves(section)
    ]
    assert len(names) > 200
    for name, value in names:
        check(name, megatron.decide(name, value, context({name: value}, Format.MEGATRON)))


def test_every_field_of_training_arguments() -> None:
    from transformers import TrainingArguments

    defaults = {field.name: field.default for field in fields(TrainingArguments)}
    assert len(defaults) > 100
    refused = []
    for name, value in defaults.items():
        plain = value if isinstance(value, str | int | float | list | None) else None
        decision = trainer.decide(name, plain, context({name: plain}, Format.TRAINER))
        check(name, decision)
        refused += [name] if decision.outcome is Outcome.REFUSED else []
    assert not refused, "the Trainer's defaults can be adopted"


def test_unknown_keys_are_refused() -> None:
    """The control: the tests above would notice a key that no table has."""
    for decide, format in (
        (deepspeed.decide, Format.DEEPSPEED),
        (trainer.decide, Format.TRAINER),
        (accelerate.decide, Format.ACCELERATE),
        (megatron.decide, Format.MEGATRON),
    ):
        decision = decide("no_such_thing", 3, context({"no_such_thing": 3}, format))
        assert decision.outcome is Outcome.REFUSED
        with pytest.raises(AssertionError):
            check("no_such_thing", decision)
