"""What no comparison of copies can see is said with the plan.

pytest tests/plan/test_replica_check_gaps.py
"""

from __future__ import annotations

import pytest

from toolkit.plan.replica_check_gaps import replica_check_gaps
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.tiny import tiny_plan


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (deepspeed("llama", 3, data=2), "weights: each data rank has a range of its own"),
        (deepspeed("llama", 1, data=2), "optimizer state: each data rank"),
        (megatron("llama", data=2, zero=1), "optimizer state: each data rank"),
        (deepspeed("llama", 2, data=2), "mended before a comparison"),
        (megatron("llama", tensor=2), "what the tensor axis cuts"),
        (deepspeed("llama", 1, pipeline=2), "what stages have for themselves"),
        (megatron("mixtral", data=2, expert=2), "experts: there is one copy"),
    ],
    ids=lambda value: value.name if isinstance(value, Cell) else "",
)
def test_what_a_layout_cannot_see(cell: Cell, said: str) -> None:
    assert said in "; ".join(replica_check_gaps(cell.plan(OptimizerCase.ADAM)))


def test_where_all_is_held_by_all_little_is_left() -> None:
    for cell in (megatron("llama", data=2), deepspeed("llama", 0, data=2)):
        assert replica_check_gaps(cell.plan(OptimizerCase.ADAM)) == [
            "gradients and activations, which are not kept",
            "buffers that are not trained",
        ]
    assert replica_check_gaps(tiny_plan()) == ["one rank: there are no copies"]
    assert replica_check_gaps(tiny_plan(ranks=2, monitor__replicas_every=0)) == [
        "anything: monitor.replicas_every=0"
    ]
