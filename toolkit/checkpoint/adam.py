"""What a vendor's own loader takes over with Adam's state from a checkpoint, whatever the run says: settings and a count of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.checkpoint.scalars import OPTIM, OPTIM_SETTINGS, OPTIMIZER_STEP
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT
from toolkit.checkpoint.source import Source
from toolkit.config.reshard import TargetConfig
from toolkit.errors import Problem

ADAM = (EXP_AVG, EXP_AVG_SQ)


def moments(source: Source, config: TargetConfig) -> tuple[str, ...]:
    """States of the optimizer that the target has: those of the source, if they are wanted."""
    there = dict.fromkeys(key.state for key in source.catalog.tensors if key.state not in (WEIGHT, MASTER))
    return () if config.optimizer is False else tuple(there)


def settings(source: Source, config: TargetConfig) -> dict[str, Any]:
    """Of the optimizer: as the user says, else as the source does. What neither says is not there."""
    said = source.catalog.scalars.get(OPTIM)
    found = dict(said) if isinstance(said, dict) else {}
    found |= {name: value for name in OPTIM_SETTINGS if (value := getattr(config.optim, name)) is not None}
    return {name: found[name] for name in OPTIM_SETTINGS if name in found}


def steps(source: Source) -> int | None:
    """That Adam has taken."""
    found = source.catalog.scalars.get(OPTIMIZER_STEP, source.step)
    return found if isinstance(found, int) else None


def problems(source: Source, config: TargetConfig, vendor: str) -> Iterator[Problem]:
    """Why a checkpoint that ``vendor`` loads itself cannot be written with the source's optimizer state."""
    kept = moments(source, config)
    if not kept:
        return
    if set(kept) != set(ADAM):
        yield Problem("source", f"{source.folder} has the optimizer's states {', '.join(kept)}", "the state of Adam is written",
                      "write target.optimizer=false, or target.format=native, which takes every state")
    if steps(source) is None:
        yield Problem("source", f"{source.folder} has an optimizer's state and no {OPTIMIZER_STEP}",
                      "Adam corrects by the number of its steps", "take another checkpoint, or write target.optimizer=false")
    yield from settings_problems(source, config, vendor)


def settings_problems(source: Source, config: TargetConfig, vendor: str) -> Iterator[Problem]:
    """The settings that nobody says."""
    missing = [f"target.optim.{name}" for name in OPTIM_SETTINGS if name not in settings(source, config)]
    if missing:
        yield Problem(missing[0], f"{source.folder} does not say {', '.join(missing)}",
                      f"{vendor} takes the optimizer's settings over from the checkpoint, whatever the run's are",
                      f"write {' '.join(f'{name}=...' for name in missing)}, as in the run that goes on")
