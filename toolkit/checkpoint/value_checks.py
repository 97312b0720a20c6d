"""What is wrong with values, known without a reference: what no sound run has. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import DTYPES
from toolkit.checkpoint.shard import EXP_AVG_SQ

MASTER_RULE = "a weight is its master weight, cast"


def find_value_faults(state: str, values: Any) -> Iterator[tuple[str, str]]:
    """(What is seen, the rule that it breaks) of an array of any shape; nothing where the values can be."""
    if not DTYPES[str(values.dtype)].is_float or not values.size:
        return
    with np.errstate(
        all="ignore"
    ):  # a sum is finite only where all of its terms are, so it spares the longer look
        suspect = not np.isfinite(np.add.reduce(values.reshape(-1), dtype=np.float32))
    strange = int(np.count_nonzero(~np.isfinite(values))) if suspect else 0
    if strange:
        yield f"{strange} values are not finite", "weights and the optimizer's state are finite"
    if state == EXP_AVG_SQ and bool(
        np.any(values < 0) if strange else values.min() < 0
    ):  # the least of values that are no numbers is none
        yield "an average of squares is negative", "second moments are averages of squares"


def differs_from_cast(master: Any, weight: Any) -> Any:
    """Where the values of ``weight`` are not those of ``master``, cast to its dtype: booleans."""
    with np.errstate(over="ignore"):
        return master.astype(weight.dtype) != weight
