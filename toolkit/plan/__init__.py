"""Deciding: a run description and a world in, a frozen plan out. Pure; no torch, no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.config.schema import RunConfig
    from toolkit.plan.types import RunPlan, World


def make_plan(config: RunConfig, world: World) -> RunPlan:
    """``toolkit.plan.make.make_plan``. Imported when called: every part of the toolkit imports ``toolkit.plan.types``, few plan."""
    from toolkit.plan.make import make_plan as decide

    return decide(config, world)


__all__ = ["make_plan"]
