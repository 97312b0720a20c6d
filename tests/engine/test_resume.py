"""A resumed run continues as if it had not stopped: bitwise in the same layout, within 1e-5 of the loss in
others.

    pytest tests/engine/test_resume.py             two ranks
    pytest tests/engine/test_resume.py -m full     into each of {local, ZeRO 0-3} x {1, 2, 4 ranks}

Checkpoints on disk are written and read by every rank. Each pair is compared with the run that continued in
the layout of the checkpoint, for 3 steps; a resume with zeroed moments must leave the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import (
    BF16,
    CHECKPOINTING,
    DROPOUT,
    FP16,
    OFFLOAD,
    OFFLOAD_ALL,
    SGD,
    Cell,
    cell,
    make,
    quick,
)
from tests.engine.resuming import (
    STOP,
    TOLERANCE,
    Saved,
    State,
    check_pairs,
    check_same,
    name,
    neighbours,
    resume,
)
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.errors import CheckpointError
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import gather_tensors

GLOBAL = 4  # micro-batches of a step, in every layout


def layout(stage: int | None, ranks: int, **more: Any) -> Cell:
    return cell(stage, ranks, GLOBAL // ranks, "gpt2", **more)  # it has dropout


LAYOUTS = [layout(None, 1), *(layout(stage, ranks) for ranks in (2, 4, 1) for stage in range(4))]
PAIRS = [(layout(3, 2), [layout(None, 1), layout(2, 2), layout(3, 2)]), *neighbours(LAYOUTS)]


@pytest.mark.parametrize(
    ("target", "sources"),
    quick(PAIRS, 0, unpack=True),
    ids=lambda part: name(part) if isinstance(part, Cell) else "",
)
def test_resume_in_another_layout(target: Cell, sources: list[Cell], saved: Saved, pool: RankPool) -> None:
    check_pairs(target, sources, saved, pool)


SAME = [
    *(layout(stage, 2, **DROPOUT) for stage in range(4)),
    layout(None, 1, **DROPOUT),
    *(layout(stage, 2, **DROPOUT, **BF16) for stage in (1, 2, 3)),
    layout(2, 2, **DROPOUT, **FP16),
    layout(2, 2, **DROPOUT, **OFFLOAD),
    layout(3, 2, **DROPOUT, **OFFLOAD_ALL),
    layout(3, 2, **DROPOUT, **CHECKPOINTING),
    layout(2, 2, **SGD, optim__momentum=0.9),
]


@pytest.mark.parametrize("case", quick(SAME, 3), ids=str)
def test_resume_in_the_same_layout_is_bitwise(case: Cell, saved: Saved, pool: RankPool) -> None:
    check_same(case, saved, pool)


def test_dropout_changes_the_losses(saved: Saved) -> None:
    """Otherwise the cells with dropout would prove nothing."""
    assert saved.of(layout(3, 2, **DROPOUT))[1].losses != saved.of(layout(3, 2))[1].losses


def test_control_zeroed_moments(saved: Saved, pool: RankPool) -> None:
    case = layout(3, 2)
    folder, went_on, _ = saved.of(case)
    ((again, _),) = pool.run(resume, case, [folder], True, ranks=case.ranks)[0]
    loss = again.distance(went_on).loss
    assert loss > 10 * TOLERANCE.loss, f"without moments the loss differs by {loss:.1e} only"


@pytest.mark.full
def test_resume_in_another_precision(saved: Saved, pool: RankPool) -> None:
    """A bf16 run resumes an fp32 one with its exact weights as masters, and the other way round.

    The differences are those of bf16 arithmetic, 1e-3 of the loss here, not of the state.
    """
    full, half = layout(2, 2), layout(3, 2, **BF16)
    folder, went_on, _ = saved.of(full)
    ((again, _),) = pool.run(resume, half, [folder], ranks=2)[0]
    loss = again.distance(went_on).loss
    assert 0 < loss < 5e-3, f"bf16 from fp32: {loss:.1e}"
    folder, went_on, _ = saved.of(half)
    ((again, _),) = pool.run(resume, full, [folder], ranks=2)[0]
    loss = again.distance(went_on).loss
    assert 0 < loss < 5e-3, f"fp32 from bf16: {loss:.1e}"


def test_masters_survive_a_change_of_precision(saved: Saved, pool: RankPool) -> None:
    """fp32 -> bf16 -> fp32 without a step in between gives the same weights."""
    full, half = layout(2, 2), layout(3, 2, **BF16)
    folder, _, _ = saved.of(full)
    through = folder.with_name(folder.name + "-bf16")
    pool.run(copy, half, folder, through, ranks=2)
    before, after = pool.run(load, full, [folder, through], ranks=2)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def copy(rank: int, ranks: int, case: Cell, source: Path, target: Path) -> None:
    engine = make(case, rank, open_reader(source))
    CheckpointStore(target).save(
        STOP, engine.shards(), engine.scalars(), namespace="test/1", rank=rank, ranks=ranks, attempt=1
    ).wait()
    engine.close()


def load(rank: int, ranks: int, case: Cell, folders: Sequence[Path]) -> list[State]:
    engine = make(case, rank)
    found = []
    for folder in folders:
        engine.load(open_reader(folder))
        found.append(gather_tensors(engine.shards(), rank, ranks))
    engine.close()
    return found


def test_optimizer_state_of_another_optimizer_is_refused(saved: Saved, pool: RankPool) -> None:
    folder, _, _ = saved.of(layout(2, 2))
    messages = pool.run(refusal, layout(2, 2, **SGD), folder, ranks=2)
    assert all("exp_avg" in text and "optim" in text for text in messages)


def refusal(rank: int, ranks: int, case: Cell, folder: Path) -> str:
    engine = make(case, rank)
    try:
        engine.load(open_reader(folder))
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return "accepted"
