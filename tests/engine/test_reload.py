"""Load a checkpoint into an engine that has trained on, with a step that was not finite: a rollback.

    pytest tests/engine/test_reload.py             one layout of each kind
    pytest tests/engine/test_reload.py -m full     further precisions and layouts

The engine repeats its steps to the bit. Control: without loading it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.cases import BF16, FP16, OFFLOAD, OFFLOAD_ALL, TENSOR, Cell, cell, make, quick, steps
from tests.engine.test_nonfinite import MEGATRON, MUON, PIPELINE, matrix_of
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.engine.protocol import StepResult
from toolkit.testing.dist import RankPool

SAVED, MORE = 3, 3


@dataclass(frozen=True)
class Repeated:
    """The steps after the save: the first time, without loading, and after loading."""

    first: list[StepResult]
    not_loaded: list[StepResult]
    loaded: list[StepResult]
    skipped: bool


def repeat_steps(rank: int, ranks: int, case: Cell, folder: Path) -> Repeated:
    engine = make(case, rank)
    armed = False
    matrix_of(engine).register_hook(lambda gradient: gradient * math.nan if armed else gradient)
    steps(engine, case, rank, 0, SAVED)
    store = CheckpointStore(folder)
    store.save(
        SAVED, engine.shards(), engine.scalars(), namespace="test/1", rank=rank, ranks=ranks, attempt=1
    ).wait()
    first = steps(engine, case, rank, SAVED, SAVED + MORE)
    armed = True
    (bad,) = steps(engine, case, rank, SAVED + MORE, SAVED + MORE + 1)
    armed = False
    not_loaded = steps(engine, case, rank, SAVED, SAVED + MORE)
    engine.load(open_reader(folder))
    loaded = steps(engine, case, rank, SAVED, SAVED + MORE)
    engine.close()
    return Repeated(first, not_loaded, loaded, bad.skipped)


LAYOUTS = [
    cell(1),
    cell(3, **BF16),
    cell(1, **MEGATRON),
    cell(None, 1),
    cell(None, 1, **FP16),
    cell(0),
    cell(0, **MUON),
    cell(2, **FP16),
    cell(3),
    cell(3, **FP16),
    cell(1, **BF16),
    cell(2, **OFFLOAD),
    cell(3, **OFFLOAD_ALL),
    cell(1, **TENSOR),
    cell(0, **PIPELINE),
    cell(1, **PIPELINE),
    cell(0, **MEGATRON),
    cell(0, **TENSOR, **MEGATRON),
    cell(0, **PIPELINE, **MEGATRON),
    cell(1, **BF16, **MEGATRON),
    cell(0, **FP16, **MEGATRON),
]


@pytest.mark.parametrize("case", quick(LAYOUTS, 2), ids=str)
def test_engine_repeats_its_steps_after_loading(case: Cell, pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(repeat_steps, case, tmp_path, ranks=case.ranks, timeout=300):
        assert found.skipped
        assert found.loaded == found.first
        assert found.not_loaded != found.first, "control"
