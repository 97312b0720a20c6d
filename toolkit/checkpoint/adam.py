"""Adam's state and settings in a target: which states are written, and whether the source has what a
vendor's loader needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from toolkit.checkpoint.scalars import OPTIM, OPTIM_SETTINGS, OPTIMIZER_STEP
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource
from toolkit.config.reshard import TargetConfig
from toolkit.errors import Problem
from toolkit.families.base import ParameterSpec

ADAM = (EXP_AVG, EXP_AVG_SQ)


def moment_states(source: CheckpointSource, config: TargetConfig) -> tuple[str, ...]:
    """Return the optimizer states to write: those of the source, or none if ``target.optimizer`` is false."""
    stored = dict.fromkeys(key.state for key in source.catalog.tensors if key.state not in (WEIGHT, MASTER))
    return () if config.optimizer is False else tuple(stored)


def settings(source: CheckpointSource, config: TargetConfig) -> dict[str, Any]:
    """Return the optimizer's settings: the user's values, else those of the source. Unknown settings are
    left out.
    """
    recorded = source.catalog.scalars.get(OPTIM)
    found = dict(recorded) if isinstance(recorded, dict) else {}
    found |= {name: value for name in OPTIM_SETTINGS if (value := getattr(config.optim, name)) is not None}
    return {name: found[name] for name in OPTIM_SETTINGS if name in found}


def step_count(source: CheckpointSource) -> int | None:
    """Return the number of steps that Adam has taken, or None if the source does not record it."""
    found = source.catalog.scalars.get(OPTIMIZER_STEP, source.step)
    return found if isinstance(found, int) else None


def find_problems(source: CheckpointSource, config: TargetConfig, vendor: str) -> Iterator[Problem]:
    """Yield the reasons why the source's optimizer state cannot be written for ``vendor``'s own loader."""
    moments = moment_states(source, config)
    if not moments:
        return
    yield from find_state_problems(source, moments)
    yield from find_settings_problems(source, config, vendor)


def find_state_problems(
    source: CheckpointSource, moments: Collection[str], without: str = "target.optimizer=false"
) -> Iterator[Problem]:
    """Yield the reasons why ``moments`` are not the complete Adam state of every parameter.

    Args:
        moments: States of the source's optimizer.
        without: The option that makes the conversion write weights only, for the remedy.
    """
    remedy = (
        f"write {without} for the weights alone, or target.format=native, which takes every state as it is"
    )
    if set(moments) != set(ADAM):
        seen = (
            f"has the optimizer's states {', '.join(sorted(moments))}"
            if moments
            else "has no optimizer state"
        )
        yield Problem(
            "source",
            f"{source.folder} {seen}",
            f"this format stores Adam's state: {' and '.join(ADAM)}",
            remedy,
        )
    tensors = source.catalog.tensors
    names = dict.fromkeys(key.name for key in tensors)
    frozen = [name for name in names if any(TensorKey(state, name) not in tensors for state in moments)]
    if frozen:
        listed = ", ".join(frozen[:3]) + (f" and {len(frozen) - 3} more" if len(frozen) > 3 else "")
        yield Problem(
            "source",
            f"{source.folder} has no optimizer state of {listed}: {len(frozen)} of {len(names)} parameters "
            "were frozen",
            "this format stores optimizer state for every parameter or for none",
            remedy,
        )
    if step_count(source) is None:
        yield Problem(
            "source",
            f"{source.folder} has optimizer state but no {OPTIMIZER_STEP}",
            "Adam's bias correction needs the number of steps",
            f"take another checkpoint, or write {without}",
        )


def describe_parameter_groups(
    settings: Mapping[str, Any], parameters: Sequence[ParameterSpec], vendor: str
) -> str:
    """Describe the parameter groups that a program must create before it loads the checkpoint with
    ``vendor``.
    """
    decaying = sum(spec.decays for spec in parameters)
    rows = [
        (decaying, "of more than one dim", settings["weight_decay"]),
        (len(parameters) - decaying, "of one dim", 0.0),
    ]
    groups = [f"{count} tensors {which} with weight_decay={decay:g}" for count, which, decay in rows if count]
    common = " ".join(
        f"{name}={settings[name]}" for name in OPTIM_SETTINGS if name in settings and name != "weight_decay"
    )
    return (
        f"the optimizer has {len(groups)} parameter groups, each in the model's order: "
        f"{', then '.join(groups)}; {common}. A program "
        f"that loads it with {vendor} must make the same groups in the same order"
    )


def find_settings_problems(source: CheckpointSource, config: TargetConfig, vendor: str) -> Iterator[Problem]:
    """Yield a problem if neither the user nor the source gives a required setting."""
    missing = [f"target.optim.{name}" for name in OPTIM_SETTINGS if name not in settings(source, config)]
    if missing:
        yield Problem(
            missing[0],
            f"{source.folder} does not record {', '.join(missing)}",
            f"{vendor} loads the optimizer's settings from the checkpoint and ignores those of the run",
            f"write {' '.join(f'{name}=...' for name in missing)} with the values of the run that continues",
        )
