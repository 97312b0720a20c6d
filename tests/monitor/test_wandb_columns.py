"""Columns of rows in W&B: separate by node and set, nested values flattened, with the step in every row.

pytest tests/monitor/test_wandb_columns.py
"""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.monitor.sink import Kind
from toolkit.monitor.sinks.wandb import wandb_columns


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        (
            Kind.STEP,
            {"step": 3, "loss": 2.5, "skipped": True, "epochs/web": 0.5},
            {"step": 3, "train/loss": 2.5, "train/skipped": True, "train/epochs/web": 0.5},
        ),
        (Kind.EVAL, {"step": 4, "set": "validation", "loss": 2.0}, {"step": 4, "eval/validation/loss": 2.0}),
        (
            Kind.LEDGER,
            {"step": 5, "parts": {"forward": [0.1, 0.2, 0.4]}, "slowest_rank": 3, "host": "a"},
            {"step": 5, "ledger/forward": 0.2, "ledger/forward/max": 0.4, "ledger/slowest_rank": 3},
        ),
        (
            Kind.SYSTEM,
            {"step": 6, "gpus": [{"watts": 1.5, "xid": None}, {"watts": 2.5}]},
            {"step": 6, "system/node-2/gpus/0/watts": 1.5, "system/node-2/gpus/1/watts": 2.5},
        ),
        (Kind.ALERT, {"step": 7, "name": "data-stall", "cause": "slow"}, {"step": 7, "alerts/data-stall": 1}),
    ],
)
def test_row_is_flattened_to_numbers(kind: Kind, row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert wandb_columns(kind, row, node=2) == expected


def test_nodes_have_separate_columns() -> None:
    row = {"step": 1, "gpus": [{"watts": 1.0}], "cpu": 0.5}
    first, second = (wandb_columns(Kind.SYSTEM, row, node) for node in (0, 1))
    assert first.keys() & second.keys() == {"step"}
