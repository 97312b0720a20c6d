"""Runs that go back to a sound checkpoint after a NaN and a spike, and skip the samples before them.

    pytest tests/train/test_rollback.py             ZeRO 1 on two ranks
    pytest tests/train/test_rollback.py -m full     every engine, and killed runs

Their losses are compared to the bit with those of runs that skip the same samples from the beginning.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.poisoned_task import digest
from tests.train.tiny_run import without_fixed_costs
from toolkit.checkpoint import open_reader
from toolkit.checkpoint_folder import committed_checkpoints
from toolkit.config.monitor import MonitorConfig, WandbMode
from toolkit.config.schema import (
    EngineName,
    EvalConfig,
    OnNonfinite,
    OnSpike,
    Precision,
    RollbackConfig,
    RunConfig,
    RunSection,
    TaskConfig,
)
from toolkit.data.order.skipped import SkippedSamples
from toolkit.data.registry import RunData, open_data
from toolkit.engine.build import build_engine
from toolkit.errors import ExitCode
from toolkit.estimate.plan_report import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import Status
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
from toolkit.testing.tiny import tiny_config
from toolkit.train import rollback
from toolkit.train import run as run_module
from toolkit.train.rollback import RollbackDecision, decide_rollback, read_decisions, read_rollbacks

BATCH, STEPS, EVERY = 8, 32, 4
# The bad sample of step 7, and after its rollback, which skips two steps, all samples of step 28.
BAD_SAMPLE, SPIKE = 51, range(232, 240)
SKIPPED = SkippedSamples(((40, 56), (224, 240)))
WEIGHTS: dict[int, float | None] = {BAD_SAMPLE: None, **dict.fromkeys(SPIKE, 1000.0)}
SECONDS = 400.0  # for a run on a busy machine


@dataclass(frozen=True)
class Poison:
    """The folder of a test with the data and a file of poisoned samples."""

    folder: Path
    data: Path

    @property
    def file(self) -> Path:
        return self.folder / "poison.json"

    def spread(self, weights: dict[int, float | None]) -> None:
        """Write the weights of the samples at positions of the order; None is NaN."""
        found = digests(self.data, max(weights) + 1)
        self.file.write_text(json.dumps({found[at]: weight for at, weight in weights.items()}))


def plan_of(config: RunConfig, ranks: int) -> RunPlan:
    return make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU, has_compiler=True))


def digests(data: Path, count: int) -> list[str]:
    """The digests of the first samples in the order of the runs of this file."""
    config = tiny_config()
    config.data.path, config.data.vocab_size = str(data), 264
    opened = open_data(config, plan_of(config, 1).batch, 0, str(data))
    samples = opened.stream.samples(np.arange(count))  # type: ignore[attr-defined]
    opened.stream.close()
    return [digest(sample) for sample in samples]


class Attempt:
    """One start of a run in ``folder``, with small groups of everything that takes time switched off.

    Args:
        skipped: samples to skip from the beginning.
        die_at: the call of ``train_step`` at which every rank dies.
    """

    def __init__(
        self,
        poison: Poison,
        name: str,
        pool: RankPool,
        *,
        ranks: int = 1,
        skipped: SkippedSamples | None = None,
        die_at: int | None = None,
        apply_skips: bool = True,
        **changes: Any,
    ) -> None:
        folder, self.seen = poison.folder / name, poison.folder / f"{name}-seen"
        self.seen.mkdir(exist_ok=True)
        config = tiny_config(
            "llama",
            **{
                "train__steps": STEPS,
                "train__on_nonfinite": OnNonfinite.rollback,
                "train__on_spike": OnSpike.rollback,
                "train__rollback": RollbackConfig(window=2),
                "checkpoint__every": str(EVERY),
                "checkpoint__keep_last": 1,
                **changes,
            },
        )
        config.run, config.eval, config.debug.threads = RunSection(dir=str(folder)), EvalConfig(every=5), 1
        config.eval.batches = 1
        config.data.path, config.data.vocab_size = str(poison.data), 264
        config.task = TaskConfig(
            target="tests.train.poisoned_task.PoisonedTask",
            arguments={"poison": str(poison.file), "seen": str(self.seen)},
        )
        config.monitor = MonitorConfig(
            wandb=WandbMode.disabled, probe=False, system_seconds=0, hang_seconds=0, every=STEPS
        )
        self.directory = RunDirectory(folder)
        attempt = self.directory.begin(config, to_json(plan_of(config, ranks)))
        self.codes: list[int] | None = None  # None: it died
        try:
            self.codes = pool.run(
                train, config, attempt, skipped, die_at, apply_skips, ranks=ranks, timeout=SECONDS
            )
        except RanksFailed:
            if die_at is None:
                raise
        finally:
            self.directory.release()

    @property
    def status(self) -> Status:
        status = self.directory.status()
        assert status is not None
        return status

    def numbers(self) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of each row."""
        rows = read_rows(self.directory.metrics_file)
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    def saved(self) -> list[int]:
        return list(committed_checkpoints(self.directory.checkpoints))

    def trained_samples(self) -> list[str]:
        """The digest of the sample that each sample number had last."""
        found: dict[int, str] = {}
        for file in sorted(self.seen.iterdir(), key=lambda file: file.stat().st_mtime):
            found |= dict(json.loads(line) for line in file.read_text().splitlines())
        assert sorted(found) == list(range(len(found)))
        return [found[number] for number in sorted(found)]


def train(
    rank: int,
    ranks: int,
    config: RunConfig,
    attempt: int,
    skipped: SkippedSamples | None,
    die_at: int | None,
    apply_skips: bool,
) -> int:
    torch.set_num_threads(1)
    with without_fixed_costs(), pytest.MonkeyPatch.context() as patch:
        if skipped is not None:
            patch.setattr(run_module, "open_data", opened_with(skipped))
        if die_at is not None:
            patch.setattr(run_module, "build_engine", dying_engine(die_at))
        if not apply_skips:
            decide = rollback.decide_rollback
            patch.setattr(rollback, "decide_rollback", lambda facts: without_skips(decide(facts)))
        plan = plan_of(config, ranks)
        return int(run_module.run(plan, rank=rank, local_rank=rank, stop=lambda: None, attempt=attempt))


def without_skips(decision: RollbackDecision) -> RollbackDecision:
    if decision.rollback is None:
        return decision
    return replace(decision, rollback=replace(decision.rollback, skipped=(0, 0)))


def opened_with(skipped: SkippedSamples) -> Any:
    def open_skipping(*arguments: Any) -> RunData:
        data = open_data(*arguments)
        data.stream.skipped = skipped
        return data

    return open_skipping


def dying_engine(call: int) -> Any:
    def build(*arguments: Any, **named: Any) -> Any:
        engine, calls = build_engine(*arguments, **named), 0
        train_step = engine.train_step

        def counted(*each: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(*each)

        engine.train_step = counted  # type: ignore[method-assign]
        return engine

    return build


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as ranks:
        yield ranks


@pytest.fixture
def poison(tmp_path: Path, data: Path) -> Poison:
    found = Poison(tmp_path, data)
    found.spread(WEIGHTS)
    return found


FreshRun = Callable[[str], Attempt]


@pytest.fixture(scope="module")
def fresh(pool: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> FreshRun:
    """The run of a layout that skips the samples from the beginning."""

    @cache
    def train_fresh(layout: str) -> Attempt:
        poison = Poison(tmp_path_factory.mktemp("fresh"), data)
        poison.spread(WEIGHTS)
        return Attempt(poison, "fresh", pool, skipped=SKIPPED, **LAYOUTS[layout])

    return train_fresh


DEEPSPEED: dict[str, Any] = {"engine__name": EngineName.deepspeed, "ranks": 2}
MEGATRON: dict[str, Any] = {"engine__name": EngineName.megatron, "ranks": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {},
    "zero1": {**DEEPSPEED, "zero__stage": 1},
    "megatron": {**MEGATRON, "zero__stage": 1},
    "zero2-bf16": {**DEEPSPEED, "zero__stage": 2, "precision__name": Precision.bf16},
    "zero3-fp16": {**DEEPSPEED, "zero__stage": 3, "precision__name": Precision.fp16},
    "pipeline": {**DEEPSPEED, "zero__stage": 1, "parallel__pipeline": 2},
    "megatron-tensor": {**MEGATRON, "parallel__tensor": 2},
    "megatron-pipeline": {**MEGATRON, "parallel__pipeline": 2},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "zero1" else pytest.mark.full) for name in LAYOUTS]
)
def test_run_goes_back_skips_samples_and_ends(
    layout: str, poison: Poison, fresh: FreshRun, pool: RankPool
) -> None:
    found = Attempt(poison, "run", pool, **LAYOUTS[layout])
    assert found.codes == [ExitCode.DONE] * len(found.codes or ())
    assert [
        (row.step, row.reason, row.checkpoint_step, row.skipped, row.attempt)
        for row in read_rollbacks(found.directory.rollbacks_file)
    ] == [(7, "non-finite", 4, (40, 56), 1), (28, "spike", 24, (224, 240), 1)]

    assert not fresh(layout).directory.rollbacks_file.exists()
    assert [step for step, _, _ in found.numbers()] == list(range(1, STEPS + 1))
    assert found.numbers() == fresh(layout).numbers()
    every = digests(poison.data, BATCH * STEPS + 32)
    assert found.trained_samples() == [every[at] for at in SKIPPED.positions(np.arange(BATCH * STEPS))]

    scalars = open_reader(found.directory.checkpoints).scalars
    assert scalars["data_state"] == {"skipped": [[40, 56], [224, 240]]}
    assert scalars["sound"] is True
    assert found.saved() == [STEPS]
    assert (found.status.step, Path(found.status.checkpoint or "").name) == (STEPS, "step-00000032")
    alerts = [row for row in read_rows(found.directory.alerts_file) if row["name"] == "rollback"]
    assert [(row["step"], row["fault"]) for row in alerts] == [(7, "non-finite"), (28, "spike")]
    for file in (found.directory.ledger_file, found.directory.eval_file):
        steps = [row["step"] for row in read_rows(file)]
        assert steps == sorted(set(steps)), f"{file.name} has each step once"
    moved = list(read_rows(found.directory.attempt_folder(1) / "metrics.jsonl"))
    assert [row["step"] for row in moved] == [5, 6, 7, 25, 26, 27, 28]
    assert moved[2]["loss"] is None


def test_control_run_that_skips_nothing_meets_the_fault_until_the_limit(
    poison: Poison, pool: RankPool
) -> None:
    found = Attempt(poison, "run", pool, apply_skips=False)
    assert found.codes == [ExitCode.DIVERGED]
    rows = read_rollbacks(found.directory.rollbacks_file)
    assert [(row.step, row.checkpoint_step) for row in rows] == [(7, 4)] * 3
    *_, ended = read_decisions(found.directory.rollbacks_file)
    assert (ended.rollback, ended.facts.earlier, ended.facts.limit) == (None, (4, 4, 4), 3)
    reason = found.status.reason or ""
    assert "step 7: the loss is not finite" in reason
    assert "3 rollbacks to step-00000004 have not helped (train.rollback.limit)" in reason
    assert found.saved() == [4]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["local", "zero1"])
def test_run_that_is_killed_after_a_rollback_skips_the_same_samples(
    layout: str, poison: Poison, fresh: FreshRun, pool: RankPool
) -> None:
    killed = Attempt(poison, "run", pool, die_at=9, **LAYOUTS[layout])
    assert killed.codes is None
    assert Path(killed.status.checkpoint or "").name == "step-00000004"
    assert killed.saved() == [4], "it was killed before it saved the rollback"
    again = Attempt(poison, "run", pool, die_at=6, **LAYOUTS[layout])
    assert (again.codes, again.saved()) == (None, [8])
    resumed = Attempt(poison, "run", pool, **LAYOUTS[layout])
    assert resumed.codes == [ExitCode.DONE] * len(resumed.codes or ())
    assert [row.attempt for row in read_rollbacks(resumed.directory.rollbacks_file)] == [1, 3]
    assert resumed.numbers() == fresh(layout).numbers()


@pytest.mark.full
def test_rollback_without_its_row_is_decided_again(poison: Poison, fresh: FreshRun, pool: RankPool) -> None:
    """As if the process had died between moving the checkpoints and writing the row."""
    killed = Attempt(poison, "run", pool, die_at=9)
    killed.directory.rollbacks_file.unlink()
    resumed = Attempt(poison, "run", pool)
    rows = read_rollbacks(resumed.directory.rollbacks_file)
    assert [(row.attempt, row.skipped) for row in rows] == [(2, (40, 56)), (2, (224, 240))]
    assert resumed.numbers() == fresh("local").numbers()


@pytest.mark.full
def test_other_layout_and_engine_skip_the_same_samples(
    poison: Poison, fresh: FreshRun, pool: RankPool
) -> None:
    Attempt(poison, "run", pool, die_at=9, **LAYOUTS["zero1"])
    resumed = Attempt(poison, "run", pool, **LAYOUTS["megatron-tensor"])
    assert np.allclose(resumed.numbers(), fresh("local").numbers(), rtol=0, atol=1e-4)
    every = digests(poison.data, BATCH * STEPS + 32)
    assert resumed.trained_samples() == [every[at] for at in SKIPPED.positions(np.arange(BATCH * STEPS))]


def test_run_without_a_sound_checkpoint_ends(poison: Poison, pool: RankPool) -> None:
    poison.spread({8: None})
    found = Attempt(poison, "run", pool)
    assert found.codes == [ExitCode.DIVERGED]
    assert "step 2: the loss is not finite" in (found.status.reason or "")
    assert "there is no sound checkpoint to go back to" in (found.status.reason or "")
    (ended,) = read_decisions(found.directory.rollbacks_file)
    assert (ended.rollback, ended.facts.step) == (None, 2)
    assert (ended.refusal or "") in (found.status.reason or "")
    assert read_rollbacks(found.directory.rollbacks_file) == []


def test_newest_sound_checkpoint_is_kept_and_a_rollback_goes_to_it(poison: Poison, pool: RankPool) -> None:
    """Saves after a bad step are not sound, and retention keeps only the newest of them."""
    poison.spread(dict.fromkeys((50, 82, 114, 140), None))  # steps 7, 11, 15 and 18
    first = Attempt(poison, "run", pool, train__on_nonfinite=OnNonfinite.skip, train__steps=16)
    assert first.codes == [ExitCode.DONE]
    assert first.saved() == [4, 16]
    assert [
        open_reader(first.directory.checkpoints / f"step-{step:08d}").scalars["sound"] for step in (4, 16)
    ] == [True, False]
    found = Attempt(poison, "run", pool, train__steps=20)
    assert found.codes == [ExitCode.DONE]
    rows = read_rollbacks(found.directory.rollbacks_file)
    assert [(row.step, row.checkpoint_step) for row in rows[:2]] == [(18, 4), (7, 4)]
    decisions = read_decisions(found.directory.rollbacks_file)
    assert [decision.facts.unsound for decision in decisions[:2]] == [(16,), ()]
    assert [decide_rollback(decision.facts).rollback for decision in decisions] == rows
    aside = found.directory.attempt_folder(2) / "checkpoints"
    assert [folder.name for folder in aside.iterdir()] == ["step-00000016"]
    assert found.saved() == [20]
    skipped = SkippedSamples().add(row.skipped for row in rows)
    every = digests(poison.data, 400)
    assert found.trained_samples() == [every[at] for at in skipped.positions(np.arange(BATCH * 20))]
    assert {every[at] for at in (50, 82, 114, 140)}.isdisjoint(found.trained_samples())


def test_run_whose_loss_jumps_and_stays_saves_on_and_keeps_the_checkpoint_before(
    poison: Poison, pool: RankPool
) -> None:
    poison.spread(dict.fromkeys(range(BATCH * 24, BATCH * 44), 3.0))  # steps 25 to 44
    found = Attempt(poison, "run", pool, train__on_spike=OnSpike.ignore, train__steps=44)
    assert found.codes == [ExitCode.DONE]
    assert found.saved() == [24, 44]
    readers = [open_reader(found.directory.checkpoints / f"step-{step:08d}") for step in found.saved()]
    assert [reader.scalars["sound"] for reader in readers] == [True, False]
