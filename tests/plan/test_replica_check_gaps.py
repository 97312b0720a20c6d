"""The plan lists the errors that comparing replicas cannot detect.

pytest tests/plan/test_replica_check_gaps.py
"""

from __future__ import annotations

import pytest

from toolkit.plan.replica_check_gaps import replica_check_gaps
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.tiny import tiny_plan


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (deepspeed("llama", 3, data=2), "weights: each data rank has its own range"),
        (deepspeed("llama", 1, data=2), "optimizer state: each data rank"),
        (megatron("llama", data=2, zero=1), "optimizer state: each data rank"),
        (deepspeed("llama", 2, data=2), "overwrites before a comparison"),
        (megatron("llama", tensor=2), "tensor-parallel shards"),
        (deepspeed("llama", 1, pipeline=2), "parameters of a single pipeline stage"),
        (megatron("mixtral", data=2, expert=2), "experts: there is one copy"),
    ],
    ids=lambda value: value.name if isinstance(value, Cell) else "",
)
def test_layouts_list_their_gaps(cell: Cell, expected: str) -> None:
    assert expected in "; ".join(replica_check_gaps(cell.plan(OptimizerCase.ADAM)))


def test_replicated_layouts_have_few_gaps() -> None:
    for cell in (megatron("llama", data=2), deepspeed("llama", 0, data=2)):
        assert replica_check_gaps(cell.plan(OptimizerCase.ADAM)) == [
            "gradients and activations, which are freed in each step",
            "buffers that are not trained",
        ]
    assert replica_check_gaps(tiny_plan()) == ["one rank: there are no replicas"]
    assert replica_check_gaps(tiny_plan(ranks=2, monitor__replicas_every=0)) == [
        "anything: monitor.replicas_every=0"
    ]


def test_checks_of_the_computation_narrow_the_gaps() -> None:
    def gaps(ranks: int, **changes: int) -> str:
        return "; ".join(replica_check_gaps(tiny_plan(ranks=ranks, monitor__computation_every=10, **changes)))

    assert "gradients, and activations other than those of the sampled micro-batches" in gaps(2)
    assert "there is one data rank" in gaps(2, parallel__tensor=2)
    assert gaps(2, monitor__replicas_every=0).startswith("weights and states: monitor.replicas_every=0; grad")
