"""Turn a run description and a world into a frozen plan.

Pure functions; neither torch nor an engine is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.callable_package import make_callable

if TYPE_CHECKING:
    from toolkit.config.schema import RunConfig
    from toolkit.plan.trace import ModuleTrace, NotTraced
    from toolkit.plan.types import RunPlan, World


def make_plan(config: RunConfig, world: World, trace: ModuleTrace | NotTraced | None = None) -> RunPlan:
    """See ``toolkit.plan.make.make_plan``, which is imported when called: most modules need only
    ``toolkit.plan.types``.
    """
    from toolkit.plan import make

    return make.make_plan(config, world, trace)


make_callable(__name__)

__all__ = ["make_plan"]
