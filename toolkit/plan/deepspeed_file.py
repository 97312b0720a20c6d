"""The keys of ``+engine.deepspeed=FILE.json``: those that the plan derives must agree with the run.

A key typed alone is refused if the plan derives it. A file is written for other tools and has such keys
always: those with the value that the run has anyway are accepted, and so is ``auto``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from toolkit.commands import command_line
from toolkit.config.engine_keys import AUTO, DEEPSPEED
from toolkit.config.keys import flatten, format_value
from toolkit.config.schema import RunConfig
from toolkit.errors import Problem
from toolkit.plan.deepspeed import derived_settings
from toolkit.plan.types import BatchPlan, World

# Values of the optimizer that name the same algorithm, and keys that choose only its implementation.
SAME_OPTIMIZER = {"adam": "adamw"}
KERNEL_KEYS = ("optimizer.params.torch_adam", "optimizer.params.fused", "optimizer.params.adam_w_mode")
OFF: tuple[Any, ...] = (None, False, 0, "none", "None", (), [], {})


def accept_file_keys(
    config: RunConfig, world: World, batch: BatchPlan | None
) -> tuple[RunConfig, list[Problem]]:
    """``config`` without the derived keys of its file, and a problem for each one that differs."""
    if config.engine.deepspeed_file is None or batch is None:
        return config, []
    derived: dict[str, Any] = {
        "train_batch_size": batch.global_batch,
        **flatten(derived_settings(config, world, batch)),
    }
    own, kept, problems = flatten(config), dict[str, Any](), []
    for name, value in flatten(config.engine.deepspeed).items() if config.engine.deepspeed else ():
        if value == AUTO or name in KERNEL_KEYS:
            continue
        if not DEEPSPEED.is_derived(name):
            kept[name] = value
        elif not _agrees(value, _value_here(name, own, derived)):
            problems.append(_problem(config.engine.deepspeed_file, name, value))
    engine = replace(config.engine, deepspeed=_nested(kept))
    return replace(config, engine=engine), problems


def _value_here(name: str, own: Mapping[str, Any], derived: Mapping[str, Any]) -> Any:
    """Return the run's value, from DeepSpeed's dictionary or its own key of the same meaning, or None."""
    return derived[name] if name in derived else own.get(DEEPSPEED.run_keys.get(name, ""))


def _agrees(value: Any, here: Any) -> bool:
    here = here.value if isinstance(here, Enum) else here
    if value in OFF and here in OFF:
        return True
    if isinstance(value, list) and isinstance(here, list):
        return len(value) == len(here) and all(map(_agrees, value, here))
    if isinstance(value, int | float) and isinstance(here, int | float):
        return isinstance(value, bool) == isinstance(here, bool) and math.isclose(value, here, rel_tol=1e-9)
    if isinstance(value, str) and isinstance(here, str):
        return SAME_OPTIMIZER.get(value.lower(), value.lower()) == here.lower()
    return bool(value == here)


def _problem(file: str, name: str, value: Any) -> Problem:
    typed = next(DEEPSPEED.find_problems(_nested({name: value}), DEEPSPEED.known()))
    remedy = f"{typed.remedy}, or adopt the file: {command_line('adopt', file)} maps every key"
    return Problem(f"{DEEPSPEED.root}.{name}", f"{name}={format_value(value)} in {file}", typed.rule, remedy)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree
