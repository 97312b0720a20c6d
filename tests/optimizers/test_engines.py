"""Further optimizers and a user's own on every layout, against the local engine, and resumed across layouts.

pytest tests/optimizers/test_engines.py             one layout per claim
pytest tests/optimizers/test_engines.py -m full     every stage, tensor and pipeline parallelism
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import WithoutMoments
from tests.optimizers.test_trial_steps import OWN
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint_folder import step_name
from toolkit.config.optim import ScheduleName
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.local import LocalEngine
from toolkit.errors import PlanError
from toolkit.optimizers import get_optimizer
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
from toolkit.testing.parity import rank_samples, train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task

LION: dict[str, Any] = {"optim__name": "lion", "optim__lr": 2e-3, "optim__betas": [0.9, 0.99]}
OWN_ADAGRAD: dict[str, Any] = {
    "optim__name": "custom",
    "optim__target": f"{OWN}.Adagrad",
    "optim__arguments": {"eps": 1e-3},
    "optim__lr": 4e-3,
    "optim__weight_decay": 0.1,
}
NADAM = OWN_ADAGRAD | {"optim__target": "torch.optim.NAdam", "optim__arguments": {"eps": 1e-4}}
NORMALIZED: dict[str, Any] = OWN_ADAGRAD | {
    "optim__target": f"{OWN}.Normalized",
    "optim__arguments": {},
    "optim__weight_decay": 0.0,
    "optim__lr": 0.6,
}
COUNTS = NORMALIZED | {"optim__target": f"{OWN}.CountsInGroup", "optim__lr": 1.0}
ADAFACTOR: dict[str, Any] = {"optim__name": "adafactor", "optim__lr": 5e-2, "optim__weight_decay": 0.0}
STEPS, STOP = 12, 6
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pool() -> Any:
    with rank_pool(2) as ranks:
        yield ranks


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    return {"engine__name": EngineName.deepspeed, "zero__stage": stage, **changes}


def plan_of(optimizer: dict[str, Any], layout: dict[str, Any]) -> RunPlan:
    ranks = 2 if layout else 1
    return tiny_plan(ranks=ranks, **optimizer, **layout)


def train_and_save(
    rank: int,
    ranks: int,
    plan: RunPlan,
    first: int,
    last: int,
    source: Path | None,
    target: Path | None,
    forget: bool,
) -> list[float]:
    """Train steps ``first .. last`` from ``source``, and save to ``target``; return the losses.

    Args:
        forget: load the weights of ``source`` without the optimizer state.
    """
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    try:
        reader = open_initial_weights(plan) if source is None else open_reader(source, "llama/1", plan.shape)
        engine.load(WithoutMoments(reader) if forget else reader)
        results = train_steps(engine, plan, range(first, last), rank=rank)
        if target is not None:
            store = CheckpointStore(target)
            scalars = {"step": last, **engine.scalars()}
            store.save(
                last, engine.shards(), scalars, namespace="llama/1", rank=rank, ranks=ranks, attempt=1
            ).wait()
    finally:
        engine.close()
    return [result.loss for result in results]


class Runs:
    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder

    def run(
        self,
        optimizer: dict[str, Any],
        layout: dict[str, Any],
        first: int = 0,
        last: int = STEPS,
        source: Path | None = None,
        target: Path | None = None,
        forget: bool = False,
    ) -> list[float]:
        plan = plan_of(optimizer, layout)
        arguments = (plan, first, last, source, target, forget)
        found: list[float] = self.pool.run(train_and_save, *arguments, ranks=plan.world.ranks)[0]
        return found

    @cache  # noqa: B019 - one object per module
    def local(self, name: str) -> list[float]:
        losses = self.run(OPTIMIZERS[name], {})
        assert losses[0] - losses[-1] > 0.2, "a run that learns nothing always agrees"
        return losses


OPTIMIZERS = {
    "lion": LION,
    "own": OWN_ADAGRAD,
    "nadam": NADAM,
    "normalized": NORMALIZED,
    "counts": COUNTS,
    "adafactor": ADAFACTOR,
}


@pytest.fixture(scope="module")
def runs(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("saved"))


def far(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


CELLS = [
    ("own", zero(3)),
    ("adafactor", zero(0)),
    *(
        pytest.param(name, zero(stage), marks=pytest.mark.full)
        for name, stage in (
            ("lion", 0),
            ("lion", 1),
            ("lion", 2),
            ("lion", 3),
            ("own", 0),
            ("own", 1),
            ("own", 2),
            ("nadam", 1),
            ("nadam", 2),
            ("nadam", 3),
            ("normalized", 0),
            ("counts", 2),
        )
    ),
    *(
        pytest.param("own", layout, marks=pytest.mark.full)
        for layout in (
            zero(1, parallel__tensor=2),
            zero(1, parallel__pipeline=2),
            zero(1, parallel__context=2),
            zero(2, offload__optimizer=OffloadDevice.cpu),
            zero(3, offload__optimizer=OffloadDevice.cpu),
        )
    ),
]


@pytest.mark.parametrize(("name", "layout"), CELLS, ids=str)
def test_losses_equal_those_of_the_local_engine(name: str, layout: dict[str, Any], runs: Runs) -> None:
    assert far(runs.run(OPTIMIZERS[name], layout), runs.local(name)) <= TOLERANCE


def test_control_another_setting_is_far_from_the_local_engine(runs: Runs) -> None:
    other = OWN_ADAGRAD | {"optim__weight_decay": 0.0, "optim__arguments": {"eps": 2e-3}}
    assert far(runs.run(other, zero(1)), runs.local("own")) > 10 * TOLERANCE


HOPS = [
    ("own", zero(3), {}),
    ("adafactor", {}, zero(0)),
    *(
        pytest.param(name, before, after, marks=pytest.mark.full)
        for name, before, after in (
            ("own", {}, zero(2)),
            ("own", zero(1), zero(3)),
            ("own", zero(0), zero(1)),
            ("own", zero(1, parallel__tensor=2), zero(2)),
            ("nadam", zero(2), zero(3)),
            ("nadam", zero(3), {}),
            ("normalized", zero(0), {}),
            ("normalized", {}, zero(0)),
            ("counts", zero(2), {}),
            ("counts", {}, zero(1)),
            ("lion", zero(3), zero(1)),
        )
    ),
]


@pytest.mark.parametrize(("name", "before", "after"), HOPS, ids=str)
def test_run_resumes_in_another_layout(
    name: str, before: dict[str, Any], after: dict[str, Any], runs: Runs, tmp_path: Path
) -> None:
    """The losses continue those of an uninterrupted run. The next test is the control."""
    first = runs.run(OPTIMIZERS[name], before, 0, STOP, target=tmp_path)
    checkpoint = tmp_path / step_name(STOP)
    assert checkpoint.is_dir(), list(tmp_path.iterdir())
    rest = runs.run(OPTIMIZERS[name], after, STOP, STEPS, source=checkpoint)
    assert far(first + rest, runs.local(name)) <= TOLERANCE


def test_control_a_resume_without_optimizer_state_is_far_from_the_uninterrupted_run(
    runs: Runs, tmp_path: Path
) -> None:
    first = runs.run(OWN_ADAGRAD, zero(3), 0, STOP, target=tmp_path)
    rest = runs.run(OWN_ADAGRAD, {}, STOP, STEPS, source=tmp_path / step_name(STOP), forget=True)
    assert far(first + rest, runs.local("own")) > 10 * TOLERANCE


def test_state_of_another_optimizer_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.run(OWN_ADAGRAD, {}, 0, 1, target=tmp_path)
    with pytest.raises(RanksFailed, match="resumes with the optimizer that it was saved with"):
        runs.run(LION, {}, 1, 2, source=tmp_path / step_name(1))


@pytest.mark.parametrize("stage", [1, 3])
def test_inexact_layouts_are_refused_before_training(stage: int, runs: Runs) -> None:
    with pytest.raises(RanksFailed, match=f"zero.stage={stage}: the update of a flat range differs"):
        runs.run(NORMALIZED, zero(stage), 0, 1)
    with pytest.raises(PlanError, match="adafactor needs whole parameters"):
        plan_of(ADAFACTOR, zero(stage))


# -- optimizers of optional packages, which the test environment may lack

OPTIONAL: dict[str, dict[str, Any]] = {
    "adam8bit": {"optim__name": "adam8bit", "optim__lr": 2e-3, "optim__arguments": {"min_8bit_size": 256}},
    "schedule_free": {
        "optim__name": "schedule_free",
        "optim__lr": 4e-3,
        "optim__weight_decay": 0.0,
        "schedule__name": ScheduleName.constant,
    },
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_missing_package_is_named_before_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.plan.rules_optimizer.find_spec", lambda module: None)
    with pytest.raises(PlanError, match=r"remedy: install it: pip install '[a-z]+>=[\d.]+'"):
        plan_of(OPTIONAL[name], {})


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_optimizers_train_and_resume_with_whole_parameters(
    name: str, runs: Runs, tmp_path: Path
) -> None:
    """Local and ZeRO 0 agree, and a run continues from one on the other."""
    package = get_optimizer(name).package
    assert package is not None
    pytest.importorskip(package[1])
    straight = runs.run(OPTIONAL[name], {})
    assert straight[0] - straight[-1] > 0.2
    tolerance = 2e-3 if name == "adam8bit" else TOLERANCE  # rounding to 8 bits enlarges differences of fp32
    assert far(runs.run(OPTIONAL[name], zero(0)), straight) <= tolerance
    first = runs.run(OPTIONAL[name], {}, 0, STOP, target=tmp_path)
    assert first + runs.run(OPTIONAL[name], {}, STOP, STEPS, source=tmp_path / step_name(STOP)) == straight
    rest = runs.run(OPTIONAL[name], zero(0), STOP, STEPS, source=tmp_path / step_name(STOP))
    assert far(first + rest, straight) <= tolerance
    with pytest.raises(PlanError, match="needs whole parameters"):
        plan_of(OPTIONAL[name], zero(2))


@pytest.mark.full
@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16], ids=str)
def test_schedule_free_evaluates_with_the_average_and_keeps_the_iterate(precision: Precision) -> None:
    """Losses with and without evaluations are equal to the bit. Control: the two sets of weights differ."""
    pytest.importorskip("schedulefree")
    plan = tiny_plan(**OPTIONAL["schedule_free"], precision__name=precision)
    found: list[list[float]] = []
    for evaluate in (False, True):
        engine = LocalEngine(plan, text_task(plan))
        engine.load(open_initial_weights(plan))
        losses = []
        for step in range(8):
            losses += [result.loss for result in train_steps(engine, plan, range(step, step + 1))]
            if evaluate:
                batches = rank_samples(engine, plan, 100, 0)
                average = engine.eval_step(batches).loss_sum
        found.append(losses)
    assert found[0] == found[1]
    right, engine._spec = engine._spec, get_optimizer("adamw")
    engine._optimizers, kept = [], engine._optimizers
    iterate = engine.eval_step(batches).loss_sum
    engine._spec, engine._optimizers = right, kept
    assert abs(iterate - average) > 1e-3


def test_error_of_one_rank_names_the_line(runs: Runs) -> None:
    """Only rank 1 raises. The exit code of a whole run is tested in test_failures.py."""
    failing = OWN_ADAGRAD | {"optim__target": f"{OWN}.FailsOnRankOne", "optim__arguments": {}}
    where = r"optim.target \(.*own_optimizers.py:\d+\) raised this error in .*own_optimizers.py:\d+"
    with pytest.raises(RanksFailed, match=rf"(?s)rank 1: .*ArithmeticError: the preconditioner.*{where}"):
        runs.run(failing, zero(2))
