"""Save with one engine's own functions, convert, load with another's, and continue training as if
uninterrupted.

    pytest tests/checkpoint/test_continuation.py
    pytest tests/checkpoint/test_continuation.py -m full      every layout from and into two others

Four steps, the vendor's save (``local``: this toolkit's), a conversion, the vendor's load in the other
layout, six steps. The reference is an uninterrupted ``local`` run. Converting there and back preserves every
bit. The control zeroes the moments, which must exceed the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoint import vendors
from toolkit.checkpoint.offline import reshard
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.scalars import STEP
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.verify import compute_digest
from toolkit.config.reshard import (
    TargetConfig,
    TargetFormat,
    TargetOptimConfig,
    TargetParallelConfig,
    TargetZeroStage,
)
from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import StepResult
from toolkit.families import FAMILIES
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

STOP, MORE = 4, 6
TOLERANCE = 1e-5  # of losses, and of gradient norms
CASE = OptimizerCase.ADAM
SETTINGS = TargetOptimConfig(lr=2e-3, betas=[0.9, 0.95], eps=1e-4, weight_decay=0.1)  # its
LOCAL = Cell(engine=EngineName.local, family="llama")


@dataclass(frozen=True)
class Layout:
    """An engine with its layout, and the format of its checkpoints."""

    cell: Cell
    form: TargetFormat

    @property
    def config(self) -> TargetConfig:
        cell = self.cell
        if self.form in (TargetFormat.native, TargetFormat.huggingface):
            return TargetConfig(format=self.form, optimizer=True)
        stage = cell.zero if self.form is TargetFormat.deepspeed else min(cell.zero, 1)
        axes = TargetParallelConfig(data=cell.data, tensor=cell.tensor, pipeline=cell.pipeline)
        return TargetConfig(
            format=self.form, zero=TargetZeroStage[f"stage{stage}"], parallel=axes, optim=SETTINGS
        )


LAYOUTS = {
    **{
        f"zero{stage}": Layout(deepspeed("llama", stage, data=2), TargetFormat.deepspeed)
        for stage in range(4)
    },
    "zero3-dp4": Layout(deepspeed("llama", 3, data=4), TargetFormat.deepspeed),
    "zero1-tp2": Layout(deepspeed("llama", 1, tensor=2), TargetFormat.deepspeed),
    "zero1-pp2": Layout(deepspeed("llama", 1, pipeline=2), TargetFormat.deepspeed),
    "megatron-tp2": Layout(megatron("llama", tensor=2), TargetFormat.megatron),
    "megatron-pp2": Layout(megatron("llama", pipeline=2), TargetFormat.megatron),
    "megatron-dp2-zero1": Layout(megatron("llama", data=2, zero=1), TargetFormat.megatron),
    "megatron-tp2-pp2": Layout(megatron("llama", tensor=2, pipeline=2), TargetFormat.megatron),
    "huggingface": Layout(LOCAL, TargetFormat.huggingface),
    "native": Layout(LOCAL, TargetFormat.native),
}
NAMES = tuple(LAYOUTS)
QUICK = [("zero3", "megatron-tp2"), ("megatron-dp2-zero1", "zero2"), ("zero1-tp2", "huggingface")]
# The number of layouts is prime, so each of these strides visits all of them.
FULL = [(name, NAMES[(at + step) % len(NAMES)]) for at, name in enumerate(NAMES) for step in (3, 8)]
assert len(NAMES) == 13


# ---- on ranks


def train(rank: int, ranks: int, layout: Layout, folder: Path) -> None:
    """Four steps, and the vendor's save."""
    plan = layout.cell.plan(CASE)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    train_steps(engine, plan, range(STOP), rank=rank)
    if layout.form is TargetFormat.deepspeed:
        vendors.vendor_save(engine, folder)
    elif layout.form is TargetFormat.megatron:
        vendors.vendor_save_megatron(engine, folder, STOP)
    else:
        assert plan.shape is not None
        CheckpointStore(folder).save(
            STOP,
            engine.shards(),
            {STEP: STOP, **engine.scalars()},
            rank=rank,
            ranks=ranks,
            attempt=1,
            namespace=FAMILIES[plan.shape.family].namespace,
        ).wait()
    engine.close()


def resume_and_train(rank: int, ranks: int, layout: Layout, folder: Path, forget: bool) -> list[StepResult]:
    """The vendor's load, and six steps."""
    plan = layout.cell.plan(CASE)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    if layout.form is TargetFormat.deepspeed:
        vendors.vendor_load(engine, folder)
    elif layout.form is TargetFormat.megatron:
        vendors.vendor_load_megatron(engine, folder)
    else:
        engine.load(open_source(folder).reader())
    for shard in engine.shards() if forget else ():
        if shard.key.state in (EXP_AVG, EXP_AVG_SQ):
            shard.data.zero_()
    results = train_steps(engine, plan, range(STOP, STOP + MORE), rank=rank)
    engine.close()
    return results


# ---- between them


def convert(source: CheckpointSource, layout: Layout, path: Path) -> CheckpointSource:
    target = reshard.lay_out(source, layout.config)
    Conversion(source, target, path).run()
    (path / target.manifest).rename(
        path.with_name(f"{path.name}-manifest")
    )  # so that the format's own reader reads it
    if layout.form is TargetFormat.native:
        path.with_name(f"{path.name}-manifest").rename(path / target.manifest)
    return open_source(path, source.shape)


class Saved:
    """Vendors' checkpoints of each layout after four steps, created on demand."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self.get = cache(self._make)

    def _make(self, name: str) -> CheckpointSource:
        layout, folder = LAYOUTS[name], self._folder / name
        if layout.form is TargetFormat.huggingface:  # no vendor writes this format with optimizer state
            return convert(self.get("native"), layout, folder)
        self._pool.run(train, layout, folder, ranks=layout.cell.ranks)
        return open_source(folder, layout.cell.plan(CASE).shape)


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(pool, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def unbroken() -> list[StepResult]:
    """The last six of ten steps of ``local``."""
    plan = LOCAL.plan(CASE)
    engine = build_engine(plan, text_task(plan), rank=0, local_rank=0)
    engine.load(open_initial_weights(plan))
    results = train_steps(engine, plan, range(STOP + MORE))
    engine.close()
    return results[STOP:]


def resume_and_compare(
    pool: RankPool,
    source: CheckpointSource,
    name: str,
    path: Path,
    unbroken: list[StepResult],
    forget: bool = False,
) -> tuple[float, float]:
    """Return the largest differences of losses and gradient norms from the uninterrupted run."""
    layout = LAYOUTS[name]
    convert(source, layout, path)
    by_rank = pool.run(resume_and_train, layout, path, forget, ranks=layout.cell.ranks)
    assert all(results == by_rank[0] for results in by_rank)
    pairs = list(zip(by_rank[0], unbroken, strict=True))
    return max(abs(a.loss - b.loss) for a, b in pairs), max(abs(a.grad_norm - b.grad_norm) for a, b in pairs)


def check_pair(
    pair: tuple[str, str], saved: Saved, pool: RankPool, unbroken: list[StepResult], path: Path
) -> None:
    before, after = pair
    loss, norm = resume_and_compare(pool, saved.get(before), after, path / "t", unbroken)
    print(f"{before} -> {after}: {loss:.1e} {norm:.1e}")
    assert max(loss, norm) <= TOLERANCE, f"loss {loss:.1e}, norm {norm:.1e}"


@pytest.mark.parametrize("pair", QUICK, ids="-to-".join)
def test_training_resumes_from_converted_checkpoint(
    pair: tuple[str, str], saved: Saved, pool: RankPool, unbroken: list[StepResult], tmp_path: Path
) -> None:
    check_pair(pair, saved, pool, unbroken, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("pair", FULL, ids="-to-".join)
def test_training_resumes_between_all_formats(
    pair: tuple[str, str], saved: Saved, pool: RankPool, unbroken: list[StepResult], tmp_path: Path
) -> None:
    check_pair(pair, saved, pool, unbroken, tmp_path)


@pytest.mark.parametrize("pair", QUICK[:2], ids="-to-".join)
def test_control_zeroed_moments_change_losses(
    pair: tuple[str, str], saved: Saved, pool: RankPool, unbroken: list[StepResult], tmp_path: Path
) -> None:
    loss, norm = resume_and_compare(pool, saved.get(pair[0]), pair[1], tmp_path / "t", unbroken, forget=True)
    assert min(loss, norm) > 10 * TOLERANCE, f"loss {loss:.1e}, norm {norm:.1e}"


def check_round_trip(pair: tuple[str, str], saved: Saved, path: Path) -> None:
    here, there = pair
    source = saved.get(here)
    between = convert(source, LAYOUTS[there], path / "there")
    back = convert(between, LAYOUTS[here], path / "back")
    expected, found = compute_digest(source.reader()), compute_digest(back.reader())
    assert found.tensors == expected.tensors
    assert found.overall == expected.overall
    assert back.step == between.step == source.step == STOP
    known = source.catalog.scalars.keys() & between.catalog.scalars.keys()
    assert {name: back.catalog.scalars[name] for name in known} == {
        name: source.catalog.scalars[name] for name in known
    }


@pytest.mark.parametrize("pair", QUICK, ids="-to-".join)
def test_round_trip_restores_every_tensor(pair: tuple[str, str], saved: Saved, tmp_path: Path) -> None:
    check_round_trip(pair, saved, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("here", NAMES)
def test_round_trip_between_all_formats(here: str, saved: Saved, tmp_path: Path) -> None:
    """Into five others, which visits every format from every format."""
    for step in (1, 3, 5, 8, 10):
        there = NAMES[(NAMES.index(here) + step) % len(NAMES)]
        check_round_trip((here, there), saved, tmp_path / there)
