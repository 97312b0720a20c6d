"""Rows as W&B has them: one flat dictionary of numbers, whose names tell what they are of. Pure.

train/loss   eval/validation/loss   ledger/forward   system/node-3/gpu/0/sm_clock_ratio   alerts/data-stall
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.monitor.ledger_rows import flatten_row
from toolkit.monitor.sink import Kind, Row
from toolkit.monitor.system.metrics import without_wandb_metrics

STEP = "step"


def wandb_columns(kind: Kind, row: Row, node: int) -> dict[str, float]:
    """A row's numbers by column, and its step, which is W&B's axis.

    Dictionaries and lists inside a row become longer names. Texts and absent values are left out: nothing can be drawn of them, and the
    files have them. Of a node's figures those are left out that W&B collects by itself. An alert is a 1 at its step.
    """
    if kind is Kind.ALERT:
        return {STEP: row[STEP], f"alerts/{row['name']}": 1}
    if kind is Kind.LEDGER:
        row = flatten_row(row)
    if kind is Kind.SYSTEM:
        row = without_wandb_metrics(row)
    prefix = {
        Kind.STEP: "train",
        Kind.EVAL: f"eval/{row.get('set')}",
        Kind.LEDGER: "ledger",
        Kind.SYSTEM: f"system/node-{node}",
    }[kind]
    return {STEP: row[STEP], **{f"{prefix}/{name}": value for name, value in _numbers(row) if name != STEP}}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, Mapping | list):
            inner = (
                value
                if isinstance(value, Mapping)
                else {str(index): item for index, item in enumerate(value)}
            )
            for rest, number in _numbers(inner):
                yield f"{name}/{rest}", number
