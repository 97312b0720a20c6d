"""The scalars that a checkpoint records, and the checks before a run continues from one.

pytest tests/train/test_state.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.config.schema import BatchRampConfig
from toolkit.errors import CheckpointError
from toolkit.plan.types import BatchPlan
from toolkit.rundir.start_state import StartKind
from toolkit.testing.tiny import tiny_plan
from toolkit.train.state import TrainState, namespace, restore, scalars

FINGERPRINT = {"order": "feistel-1", "data": "abc"}
PATH = Path("runs/x/checkpoints/step-00000003")


def continued(
    found: Mapping[str, object], kind: StartKind = StartKind.RESUME, **changes: Any
) -> tuple[TrainState, BatchPlan]:
    return restore(tiny_plan(**changes), SimpleNamespace(scalars=found), kind, PATH)  # type: ignore[arg-type]


def restored(found: Mapping[str, object], kind: StartKind = StartKind.RESUME, **changes: Any) -> TrainState:
    return continued(found, kind, **changes)[0]


def test_scalars_are_plain_json_and_restore_the_state() -> None:
    found = scalars(tiny_plan(), TrainState(3), FINGERPRINT, {"shard": 4}, {"optimizer_step": 2})
    assert json.loads(json.dumps(found)) == found
    assert found["step"] == 3
    assert found["consumed_samples"] == 24
    assert found["optimizer_step"] == 2
    assert found["seed"] == 3
    assert {"python", "torch", "transformers"} <= found["versions"].keys()  # type: ignore[attr-defined]
    assert restored(found).step == 3


def test_resume_allows_more_steps_and_another_layout() -> None:
    found = scalars(tiny_plan(), TrainState(3), FINGERPRINT, {}, {})
    assert restored(found, ranks=4, zero__stage=3, train__steps=50).step == 3


def test_consumed_samples_follow_a_batch_ramp() -> None:
    plan = tiny_plan()
    (
        plan.config.train.batch_ramp.start,
        plan.config.train.batch_ramp.increment,
        plan.config.train.batch_ramp.samples,
    ) = 2, 2, 12
    from toolkit.plan import make_plan

    ramped = make_plan(plan.config, plan.world)
    assert [TrainState(step).consumed_samples(ramped) for step in range(5)] == [
        ramped.batch.at(step).first_sample for step in range(5)
    ]
    assert TrainState(1).consumed_samples(ramped) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"identity": "00000000"}, "identity=00000000, here "),
        ({"seed": 4}, "seed=4, here 3"),
        ({"consumed_samples": 12, "batch_stages": None}, "consumed_samples=12, here 24"),
    ],
)
def test_resume_of_another_run_is_refused_and_a_fork_allowed(change: dict[str, object], named: str) -> None:
    found = scalars(tiny_plan(), TrainState(3), FINGERPRINT, {}, {}) | change
    with pytest.raises(CheckpointError) as refused:
        restored(found)
    assert named in str(refused.value)
    assert restored(found, StartKind.FORK).step == 3


@pytest.mark.parametrize("history", [True, False], ids=["recorded", "by another program"])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_fork_with_another_global_batch_starts_at_the_next_sample(size: int, history: bool) -> None:
    found = scalars(tiny_plan(), TrainState(3), FINGERPRINT, {}, {})
    if not history:
        del found["batch_stages"]
    _, batch = continued(found, StartKind.FORK, train__global_batch=size)
    assert [batch.at(step).first_sample for step in range(6)] == [0, 8, 16, 24, 24 + size, 24 + 2 * size]


def test_fork_of_a_fork_keeps_the_batch_sizes_of_its_ancestors() -> None:
    """Without its parent's batch sizes the fork's checkpoint is refused as another run's."""
    parent = scalars(tiny_plan(), TrainState(3), FINGERPRINT, {}, {})
    doubled = {"train__global_batch": 16}
    _, batch = continued(parent, StartKind.FORK, **doubled)
    child = scalars(replace(tiny_plan(**doubled), batch=batch), TrainState(5), FINGERPRINT, {}, {})
    assert child["consumed_samples"] == 24 + 2 * 16
    state, resumed = continued(child, **doubled)
    assert (state.step, resumed) == (5, batch)
    with pytest.raises(CheckpointError, match="consumed_samples=56, here 80"):
        continued({**child, "batch_stages": None}, **doubled)
    _, grandchild = continued(child, StartKind.FORK, train__global_batch=4)
    assert [grandchild.at(step).first_sample for step in range(8)] == [0, 8, 16, 24, 40, 56, 60, 64]


def test_batch_ramp_of_a_fork_continues_by_consumed_samples() -> None:
    found = scalars(tiny_plan(), TrainState(3), FINGERPRINT, {}, {})
    ramp = BatchRampConfig(start=4, increment=4, samples=40)
    _, batch = continued(found, StartKind.FORK, train__global_batch=16, train__batch_ramp=ramp)
    assert [batch.at(step).size for step in range(7)] == [8, 8, 8, 8, 12, 16, 16], (
        "a third of the ramp is 14 samples"
    )


def test_weights_without_a_step_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model\.pretrained=runs/x"):
        restored({})


def test_engine_scalars_must_not_collide_with_the_runs() -> None:
    with pytest.raises(AssertionError, match="step"):
        scalars(tiny_plan(), TrainState(3), FINGERPRINT, {}, {"step": 1})


def test_namespaces() -> None:
    assert namespace(tiny_plan()) == "llama/1"
    assert namespace(tiny_plan(None, model__target="my.package.Model")) == "module/my.package.Model"
