"""A run that stopped goes on as if it had not: same layout to the bit, any other layout within 1e-5 of the loss for 6 steps.

    pytest tests/engine/test_resume.py             two ranks
    pytest tests/engine/test_resume.py -m full     every ordered pair of {local, ZeRO 0-3} x {1, 2, 4 ranks}

Through checkpoints on disk, written by every rank and read by every rank. Each pair is held against the run that went on in the
layout that it was saved in; a resume with zeroed moments must leave the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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
    WithoutMoments,
    cell,
    make,
    steps,
)
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import WEIGHT, StateReader, TensorKey
from toolkit.engine.protocol import Engine
from toolkit.errors import CheckpointError
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, Trace, gather

TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-5)
STOP, MORE = 4, 6
GLOBAL = 4  # micro-batches of a step, in every layout
State = dict[TensorKey, torch.Tensor]


def layout(stage: int | None, ranks: int, **more: Any) -> Cell:
    return cell(stage, ranks, GLOBAL // ranks, "gpt2", **more)  # it has dropout


CORE = [layout(None, 1), *(layout(stage, 2) for stage in range(4))]
ALL = [layout(None, 1), *(layout(stage, ranks) for stage in range(4) for ranks in (1, 2, 4))]


def name(cell: Cell) -> str:
    return f"{'local' if cell.stage is None else f'zero{cell.stage}'}-{cell.ranks}"


def save_and_go_on(rank: int, ranks: int, case: Cell, folder: Path) -> tuple[Trace, State]:
    engine = make(case, rank)
    steps(engine, case, rank, 0, STOP)
    store = CheckpointStore(folder)
    store.save(
        STOP, engine.shards(), engine.scalars(), namespace="test/1", rank=rank, ranks=ranks, attempt=1
    ).wait()
    went_on, state = go_on(engine, case, rank)
    engine.close()
    return went_on, state


def go_on(engine: Engine, case: Cell, rank: int) -> tuple[Trace, State]:
    """Six further steps, and all state after them (on rank 0)."""
    results = steps(engine, case, rank, STOP, STOP + MORE)
    state = gather(engine.shards(), rank, case.ranks)
    weights = {key.name: value.float() for key, value in state.items() if key.state == WEIGHT}
    return Trace(tuple(results), weights), state


def resume(
    rank: int, ranks: int, case: Cell, folders: Sequence[Path], forget: bool = False
) -> list[tuple[Trace, Any]]:
    """From each of ``folders`` in turn, in one engine: loading must leave nothing of what was there."""
    engine = make(case, rank)
    found = []
    for folder in folders:
        reader: StateReader = open_reader(folder)
        engine.load(WithoutMoments(reader) if forget else reader)
        found.append(go_on(engine, case, rank))
    engine.close()
    return found


class Saved:
    """What each layout saved and how it went on, made when first asked for."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self.of = cache(self._make)

    def _make(self, case: Cell) -> tuple[Path, Trace, State]:
        folder = self._folder / str(case)
        went_on, state = self._pool.run(save_and_go_on, case, folder, ranks=case.ranks)[0]
        return folder, went_on, state


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("target", CORE, ids=name)
def test_core_pairs(target: Cell, saved: Saved, pool: RankPool) -> None:
    check_pairs(target, CORE, saved, pool)


@pytest.mark.full
@pytest.mark.parametrize("target", ALL, ids=name)
def test_all_pairs(target: Cell, saved: Saved, pool: RankPool) -> None:
    check_pairs(target, ALL, saved, pool)


def check_pairs(target: Cell, sources: Sequence[Cell], saved: Saved, pool: RankPool) -> None:
    made = [saved.of(source) for source in sources]
    resumed = pool.run(resume, target, [folder for folder, _, _ in made], ranks=target.ranks)[0]
    far = {}
    for source, (_, went_on, _), (again, _) in zip(sources, made, resumed, strict=True):
        distance = again.distance(went_on)
        if distance.times(TOLERANCE) > 1:
            far[name(source)] = distance
    assert not far, f"into {name(target)}: {far}"


SAME = [
    *(layout(stage, 2, **more) for stage in range(4) for more in ({}, DROPOUT)),
    layout(None, 1, **DROPOUT),
    *(layout(stage, 2, **DROPOUT, **BF16) for stage in (1, 2, 3)),
    layout(2, 2, **DROPOUT, **FP16),
    layout(2, 2, **DROPOUT, **OFFLOAD),
    layout(3, 2, **DROPOUT, **OFFLOAD_ALL),
    layout(3, 2, **DROPOUT, **CHECKPOINTING),
    layout(2, 2, **SGD, optim__momentum=0.9),
]


@pytest.mark.parametrize("case", SAME, ids=str)
def test_same_layout_to_the_bit(case: Cell, saved: Saved, pool: RankPool) -> None:
    check_same(case, saved, pool)


def check_same(case: Any, saved: Saved, pool: RankPool) -> None:
    folder, went_on, state = saved.of(case)
    assert_same(pool.run(resume, case, [folder], ranks=case.ranks)[0][0], (went_on, state))


def assert_same(resumed: tuple[Trace, State], unbroken: tuple[Trace, State]) -> None:
    (again, found), (went_on, state) = resumed, unbroken
    assert again.losses == went_on.losses
    assert again.norms == went_on.norms
    assert found.keys() == state.keys()
    assert not [str(key) for key in state if not torch.equal(found[key], state[key])]


def test_dropout_is_on(saved: Saved) -> None:
    """Else the cells with dropout prove nothing."""
    assert saved.of(layout(2, 2, **DROPOUT))[1].losses != saved.of(layout(2, 2))[1].losses


def test_control_zeroed_moments(saved: Saved, pool: RankPool) -> None:
    for case in (layout(2, 2), layout(3, 2)):
        folder, went_on, _ = saved.of(case)
        ((again, _),) = pool.run(resume, case, [folder], True, ranks=case.ranks)[0]
        loss = again.distance(went_on).loss
        assert loss > 10 * TOLERANCE.loss, f"without moments the loss differs by {loss:.1e} only"


def test_between_precisions(saved: Saved, pool: RankPool) -> None:
    """A bf16 run resumes a fp32 one with its exact weights as masters, and the other way round: what differs is bf16's
    arithmetic, 1e-3 of the loss here, not the state. Back in its own precision the state is the same to the bit."""
    full, half = layout(2, 2), layout(3, 2, **BF16)
    folder, went_on, _ = saved.of(full)
    ((again, _),) = pool.run(resume, half, [folder], ranks=2)[0]
    loss = again.distance(went_on).loss
    assert 0 < loss < 5e-3, f"bf16 from fp32: {loss:.1e}"
    folder, went_on, _ = saved.of(half)
    ((again, _),) = pool.run(resume, full, [folder], ranks=2)[0]
    loss = again.distance(went_on).loss
    assert 0 < loss < 5e-3, f"fp32 from bf16: {loss:.1e}"


def test_masters_cross_precisions_unchanged(saved: Saved, pool: RankPool) -> None:
    """fp32 -> bf16 -> fp32 without a step between gives the same weights."""
    full, half = layout(1, 2), layout(3, 4, **BF16)
    folder, _, _ = saved.of(full)
    through = folder.with_name(folder.name + "-bf16")
    pool.run(copy, half, folder, through, ranks=4)
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
        found.append(gather(engine.shards(), rank, ranks))
    engine.close()
    return found


def test_another_optimizer_is_refused(saved: Saved, pool: RankPool) -> None:
    folder, _, _ = saved.of(layout(2, 2))
    told = pool.run(refusal, layout(2, 2, **SGD), folder, ranks=2)
    assert all("exp_avg" in text and "optim" in text for text in told)


def refusal(rank: int, ranks: int, case: Cell, folder: Path) -> str:
    engine = make(case, rank)
    try:
        engine.load(open_reader(folder))
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return "accepted"
