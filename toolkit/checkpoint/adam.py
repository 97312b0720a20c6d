"""What a vendor's own loader takes over with Adam's state from a checkpoint, whatever the run says: settings and a count of steps."""

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
    """States of the optimizer that the target has: those of the source, if they are wanted."""
    there = dict.fromkeys(key.state for key in source.catalog.tensors if key.state not in (WEIGHT, MASTER))
    return () if config.optimizer is False else tuple(there)


def settings(source: CheckpointSource, config: TargetConfig) -> dict[str, Any]:
    """Of the optimizer: as the user says, else as the source does. What neither says is not there."""
    said = source.catalog.scalars.get(OPTIM)
    found = dict(said) if isinstance(said, dict) else {}
    found |= {name: value for name in OPTIM_SETTINGS if (value := getattr(config.optim, name)) is not None}
    return {name: found[name] for name in OPTIM_SETTINGS if name in found}


def step_count(source: CheckpointSource) -> int | None:
    """That Adam has taken."""
    found = source.catalog.scalars.get(OPTIMIZER_STEP, source.step)
    return found if isinstance(found, int) else None


def find_problems(source: CheckpointSource, config: TargetConfig, vendor: str) -> Iterator[Problem]:
    """Why a checkpoint that ``vendor`` loads itself cannot be written with the source's optimizer state."""
    kept = moment_states(source, config)
    if not kept:
        return
    yield from find_state_problems(source, kept)
    yield from find_settings_problems(source, config, vendor)


def find_state_problems(
    source: CheckpointSource, kept: Collection[str], without: str = "target.optimizer=false"
) -> Iterator[Problem]:
    """Why ``kept``, the states of the source's optimizer, are not Adam's state of every parameter.

    Args:
        without: what to write to get the weights alone.
    """
    remedy = (
        f"write {without} for the weights alone, or target.format=native, which takes every state as it is"
    )
    if set(kept) != set(ADAM):
        seen = f"has the optimizer's states {', '.join(sorted(kept))}" if kept else "has no optimizer state"
        yield Problem(
            "source",
            f"{source.folder} {seen}",
            f"this format holds the state of Adam: {' and '.join(ADAM)}",
            remedy,
        )
    there = source.catalog.tensors
    names = dict.fromkeys(key.name for key in there)
    frozen = [name for name in names if any(TensorKey(state, name) not in there for state in kept)]
    if frozen:
        listed = ", ".join(frozen[:3]) + (f" and {len(frozen) - 3} more" if len(frozen) > 3 else "")
        yield Problem(
            "source",
            f"{source.folder} has no optimizer state of {listed}: {len(frozen)} of {len(names)} parameters were frozen",
            "this format holds the optimizer's state of every parameter or of none",
            remedy,
        )
    if step_count(source) is None:
        yield Problem(
            "source",
            f"{source.folder} has an optimizer's state and no {OPTIMIZER_STEP}",
            "Adam corrects by the number of its steps",
            f"take another checkpoint, or write {without}",
        )


def describe_parameter_groups(
    settings: Mapping[str, Any], parameters: Sequence[ParameterSpec], vendor: str
) -> str:
    """For a person whose program loads the checkpoint with ``vendor``: the optimizer's parameter groups, which must be the program's."""
    decaying = sum(spec.decays for spec in parameters)
    both = [
        (decaying, "of more than one dim", settings["weight_decay"]),
        (len(parameters) - decaying, "of one dim", 0.0),
    ]
    groups = [f"{count} tensors {which} with weight_decay={decay:g}" for count, which, decay in both if count]
    common = " ".join(
        f"{name}={settings[name]}" for name in OPTIM_SETTINGS if name in settings and name != "weight_decay"
    )
    return (
        f"the optimizer has {len(groups)} parameter groups, each in the model's order: {', then '.join(groups)}; {common}. A program "
        f"that loads it with {vendor} must make the same groups in the same order"
    )


def find_settings_problems(source: CheckpointSource, config: TargetConfig, vendor: str) -> Iterator[Problem]:
    """The settings that nobody says."""
    missing = [f"target.optim.{name}" for name in OPTIM_SETTINGS if name not in settings(source, config)]
    if missing:
        yield Problem(
            missing[0],
            f"{source.folder} does not say {', '.join(missing)}",
            f"{vendor} takes the optimizer's settings over from the checkpoint, whatever the run's are",
            f"write {' '.join(f'{name}=...' for name in missing)}, as in the run that goes on",
        )
