"""Save a run, resume it in another layout, and compare how it continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.engine.cases import Cell, WithoutMoments, make, steps
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import WEIGHT, StateReader, TensorKey
from toolkit.engine.protocol import Engine
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, RunTrace, gather_tensors

TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-5)


STOP, MORE = 3, 3


State = dict[TensorKey, torch.Tensor]


def name(cell: Cell) -> str:
    return f"{'local' if cell.stage is None else f'zero{cell.stage}'}-{cell.ranks}"


def save_and_go_on(rank: int, ranks: int, case: Cell, folder: Path) -> tuple[RunTrace, State]:
    engine = make(case, rank)
    steps(engine, case, rank, 0, STOP)
    store = CheckpointStore(folder)
    store.save(
        STOP, engine.shards(), engine.scalars(), namespace="test/1", rank=rank, ranks=ranks, attempt=1
    ).wait()
    went_on, state = go_on(engine, case, rank)
    engine.close()
    return went_on, state


def go_on(engine: Engine, case: Cell, rank: int) -> tuple[RunTrace, State]:
    """Train MORE steps; return the trace and all state after them (on rank 0)."""
    results = steps(engine, case, rank, STOP, STOP + MORE)
    state = gather_tensors(engine.shards(), rank, case.ranks)
    weights = {key.name: value.float() for key, value in state.items() if key.state == WEIGHT}
    return RunTrace(tuple(results), weights), state


def resume(
    rank: int, ranks: int, case: Cell, folders: Sequence[Path], forget: bool = False
) -> list[tuple[RunTrace, Any]]:
    """Resume from each of ``folders`` in turn in one engine, so loading must replace all earlier state."""
    engine = make(case, rank)
    found = []
    for folder in folders:
        reader: StateReader = open_reader(folder)
        engine.load(WithoutMoments(reader) if forget else reader)
        found.append(go_on(engine, case, rank))
    engine.close()
    return found


class Saved:
    """Saves each layout on first use, and records how it continued."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self.of = cache(self._make)

    def _make(self, case: Cell) -> tuple[Path, RunTrace, State]:
        folder = self._folder / str(case)
        went_on, state = self._pool.run(save_and_go_on, case, folder, ranks=case.ranks)[0]
        return folder, went_on, state


def neighbours(layouts: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Each layout with the first, which is ``local``, and the two before it.

    A checkpoint has no layout, so a reader does not depend on the writer's; each layout is written and read
    often.
    """
    for at, target in enumerate(layouts):
        yield target, [layouts[0], *(layouts[at - back] for back in (1, 2) if (at - back) % len(layouts))]


def check_pairs(target: Cell, sources: Sequence[Cell], saved: Saved, pool: RankPool) -> None:
    made = [saved.of(source) for source in sources]
    resumed = pool.run(resume, target, [folder for folder, _, _ in made], ranks=target.ranks)[0]
    far = {}
    for source, (_, went_on, _), (again, _) in zip(sources, made, resumed, strict=True):
        distance = again.distance(went_on)
        if distance.times(TOLERANCE) > 1:
            far[name(source)] = distance
    assert not far, f"into {name(target)}: {far}"


def check_same(case: Any, saved: Saved, pool: RankPool) -> None:
    folder, went_on, state = saved.of(case)
    assert_same(pool.run(resume, case, [folder], ranks=case.ranks)[0][0], (went_on, state))


def assert_same(resumed: tuple[RunTrace, State], unbroken: tuple[RunTrace, State]) -> None:
    (again, found), (went_on, state) = resumed, unbroken
    assert again.losses == went_on.losses
    assert again.norms == went_on.norms
    assert found.keys() == state.keys()
    assert not [str(key) for key in state if not torch.equal(found[key], state[key])]
