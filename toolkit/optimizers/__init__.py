"""The optimizers: one file each. ``custom`` is the user's own class (``optim.target``)."""

from __future__ import annotations

import difflib

from toolkit.errors import PlanError, Problem
from toolkit.optimizers.adafactor import Adafactor
from toolkit.optimizers.adam8bit import Adam8bit
from toolkit.optimizers.adamw import AdamW
from toolkit.optimizers.base import OptimizerSpec
from toolkit.optimizers.custom import Custom
from toolkit.optimizers.lion import Lion
from toolkit.optimizers.muon import Muon
from toolkit.optimizers.schedule_free import ScheduleFree
from toolkit.optimizers.sgd import Sgd

OPTIMIZERS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (AdamW(), Sgd(), Muon(), Lion(), Adafactor(), ScheduleFree(), Adam8bit(), Custom())
}


def get_optimizer(name: str) -> OptimizerSpec:
    """Return the optimizer of ``optim.name``. Raises PlanError."""
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1, cutoff=0.5)
        raise PlanError(
            Problem(
                "optim.name",
                f"optim.name={name}",
                f"the optimizers are {', '.join(OPTIMIZERS)}",
                f"write optim={near[0]}"
                if near
                else "write optim=adamw, or optim=custom optim.target=my.package.Optimizer",
            )
        )
    return OPTIMIZERS[name]
