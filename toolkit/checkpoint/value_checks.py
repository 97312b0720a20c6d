"""Detect values that no correct run has, without a reference. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import DTYPES
from toolkit.checkpoint.shard import EXP_AVG_SQ

MASTER_RULE = "a weight is its master weight, cast"


def find_value_faults(state: str, values: Any) -> Iterator[tuple[str, str]]:
    """Yield (what was found, the rule it breaks) for an array of any shape."""
    if not DTYPES[str(values.dtype)].is_float or not values.size:
        return
    # A sum is finite only if all its terms are, so one reduction replaces the full check.
    with np.errstate(all="ignore"):
        suspect = not np.isfinite(np.add.reduce(values.reshape(-1), dtype=np.float32))
    nonfinite = int(np.count_nonzero(~np.isfinite(values))) if suspect else 0
    if nonfinite:
        yield f"{nonfinite} values are not finite", "weights and the optimizer's state are finite"
    # min() of values with NaN is NaN
    if state == EXP_AVG_SQ and bool(np.any(values < 0) if nonfinite else values.min() < 0):
        yield "an average of squares is negative", "second moments are averages of squares"


def differs_from_cast(master: Any, weight: Any) -> Any:
    """Return a boolean array: where ``weight`` is not ``master`` cast to its dtype."""
    with np.errstate(over="ignore"):
        return master.astype(weight.dtype) != weight
