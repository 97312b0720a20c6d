"""The plan's bytes against DeepSpeed's own tensors: parameters, gradients, optimizer states, on each rank, within 1%.

    pytest tests/engine/test_memory.py
    pytest tests/engine/test_memory.py -m full

What each figure counts is said at the top of toolkit/plan/memory.py. Storages are counted once, however many views they have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.cases import Cell, make, steps
from tests.engine.pool import Pool
from toolkit.engine.deepspeed import DeepSpeedEngine
from toolkit.engine.deepspeed_load import base

# 1.6 M parameters: with fewer, padding and what is kept whole would be the most of it.
SIZES = (("hidden_size", 128), ("intermediate_size", 352), ("num_hidden_layers", 6), ("vocab_size", 1501))


@dataclass
class Bytes:
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by address of every storage."""
    found = {}
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.numel():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def weights(engine: DeepSpeedEngine) -> dict[int, int]:
    parameters = list(engine._ds.module.parameters())
    return storages([*(p.data for p in parameters), *(getattr(p, "ds_tensor", None) for p in parameters)])


def gradients(engine: DeepSpeedEngine) -> dict[int, int]:
    optimizer: Any = engine._ds.optimizer
    held: list[Any] = []
    for parameter in engine._ds.module.parameters():
        held += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for lists in ("averaged_gradients", "all_grad_tensors"):
        held += [gradient for some in (getattr(optimizer, lists, None) or {}).values() for gradient in some or ()]
    held += [getattr(optimizer, "grad_partitions_flat_buffer", None), *getattr(optimizer, "fp32_groups_gradients_flat", ())]
    # A gradient on its way lies in a bucket, which is a buffer.
    buckets = storages(buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()
                       for buffer in (bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]))
    return {address: size for address, size in storages(held).items() if address not in buckets}


def states(engine: DeepSpeedEngine) -> dict[int, int]:
    """Master weights and the optimizer's tensors of parameter shape; in stage 0 the weights are the masters."""
    every = [tensor for state in base(engine._ds.optimizer).state.values() for tensor in state.values()]
    held = [tensor for tensor in every if torch.is_tensor(tensor) and tensor.dim()]  # not the step count
    held += [partition.master for partition in engine._partitions()]
    return storages(held)


def measure(rank: int, ranks: int, cell: Cell) -> tuple[Bytes, Any]:
    engine = make(cell, rank)
    assert isinstance(engine, DeepSpeedEngine)
    most = 0
    after_backward = engine._ds._backward_epilogue

    def look() -> None:
        nonlocal most
        most = max(most, sum(gradients(engine).values()))
        after_backward()  # reduces; ZeRO 2 keeps its part of the gradients from here on
        most = max(most, sum(gradients(engine).values()))

    engine._ds._backward_epilogue = look
    steps(engine, cell, rank, 0, 2)
    held = weights(engine)
    found = Bytes(sum(held.values()), most, sum(size for address, size in states(engine).items() if address not in held))
    engine.close()
    return found, cell.plan().memory


CORE = [Cell(stage=stage, ranks=2, precision=precision, sizes=SIZES) for stage, precision in itertools.product(range(4), ("fp32", "bf16"))
        if stage or precision == "fp32"]
FULL = [Cell(stage=stage, ranks=ranks, precision=precision, accumulation=accumulation, sizes=SIZES)
        for stage, ranks, precision, accumulation in itertools.product(range(4), (1, 2, 4), ("fp32", "bf16"), (1, 2))
        if stage or precision == "fp32"]


@pytest.mark.parametrize("cell", CORE, ids=str)
def test_two_ranks(cell: Cell, pool: Pool) -> None:
    check(cell, pool)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in FULL if cell not in CORE], ids=str)
def test_every_layout(cell: Cell, pool: Pool) -> None:
    check(cell, pool)


def check(cell: Cell, pool: Pool) -> None:
    """The plan is of the fullest rank."""
    measured = pool.run(cell.ranks, measure, cell)
    plan = measured[0][1]
    for name in ("parameters", "gradients", "optimizer"):
        most = max(getattr(found, name) for found, _ in measured)
        assert most == pytest.approx(getattr(plan, name), rel=0.01), f"{name}: measured {most}, planned {getattr(plan, name)}"
