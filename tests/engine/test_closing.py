"""A closed engine leaves no threads, of which gloo has several per process group."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine.cases import quick
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, select_cells
from toolkit.testing.parity import trace_on_rank

CELLS = select_cells(
    (
        "deepspeed/llama/dp2-zero2",
        "deepspeed/llama/dp2-zero3",
        "deepspeed/llama/tp2-zero3",
        "deepspeed/llama/pp2-zero1",
        "megatron/llama/tp2-sp",
        "megatron/llama/pp2-vpp2",
        "megatron/mixtral/ep2-dp2-zero1",
    )
)


def threads(rank: int, ranks: int) -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("cell", quick(CELLS, 1, 4), ids=lambda cell: cell.name)
def test_close_ends_all_threads(cell: Cell, pool: RankPool) -> None:
    found = []
    for _ in range(3):  # the first engine may create threads that stay
        pool.run(partial(trace_on_rank, steps=1), cell.plan(OptimizerCase.ADAM), ranks=2)
        found.append(pool.run(threads, ranks=2))
    assert found[1] == found[2], f"threads after each engine: {found}"
