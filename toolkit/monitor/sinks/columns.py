"""The columns of a row in services that store numbers by name and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.monitor.ledger_rows import flatten_row
from toolkit.monitor.sink import Kind, Row


def metric_columns(kind: Kind, row: Row, node: int = 0) -> dict[str, float]:
    """Return a row's numbers by name, such as ``train/loss`` and ``eval/validation/loss``, without its step.

    Nested dictionaries and lists become longer names. Texts and absent values are dropped. An alert is a 1.
    """
    if kind is Kind.ALERT:
        return {f"alerts/{row['name']}": 1}
    if kind is Kind.LEDGER:
        row = flatten_row(row)
    prefix = {
        Kind.STEP: "train",
        Kind.EVAL: f"eval/{row.get('set')}",
        Kind.LEDGER: "ledger",
        Kind.SYSTEM: f"system/node-{node}",
        Kind.HOOK: f"hooks/{row.get('hook')}",
    }[kind]
    return {f"{prefix}/{name}": value for name, value in _numbers(row) if name != "step"}


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
