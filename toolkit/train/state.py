"""Where a run is, what of it goes into a checkpoint, and which checkpoints it may continue from.

Everything follows from the number of completed steps: the samples consumed (``BatchPlan.at``), the learning rate, the seed of
each step's dropout. So the state is that number, and a checkpoint records the rest in order to refuse what does not fit.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit import families
from toolkit.checkpoint.scalars import CONSUMED, OPTIM, OPTIM_SETTINGS, STEP
from toolkit.checkpoint.shard import Reader
from toolkit.checkpoint.source import MODEL
from toolkit.errors import CheckpointError, Problem
from toolkit.plan.types import RunPlan
from toolkit.rundir.source import SourceKind

DATA, IDENTITY, SEED, VERSIONS = "data", "identity", "seed", "versions"
DATA_STATE = "data_state"  # of a stream whose place does not follow from the step
_RECORDED_PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers")


@dataclass(slots=True)
class TrainState:
    """``step`` is the number of completed optimizer steps; skipped ones count, since their samples are consumed."""

    step: int = 0

    def consumed_samples(self, plan: RunPlan) -> int:
        return plan.batch.at(self.step).first_sample


def namespace(plan: RunPlan) -> str:
    """Of the canonical names in this run's checkpoints: ``llama/1``, or ``module/my.package.Model`` for ``model.target``."""
    return families.get(plan.shape.family).namespace if plan.shape is not None else f"module/{plan.config.model.target}"


def scalars(plan: RunPlan, state: TrainState, fingerprint: Mapping[str, Any], data_state: Mapping[str, Any],
            engine: Mapping[str, object]) -> dict[str, object]:
    """What a checkpoint holds besides tensors: plain JSON types. The engine's own keys stand beside the run's."""
    own: dict[str, object] = {
        STEP: state.step, CONSUMED: state.consumed_samples(plan), DATA: dict(fingerprint),
        DATA_STATE: dict(data_state), IDENTITY: plan.identity, SEED: plan.config.train.seed, VERSIONS: versions(),
        OPTIM: {name: getattr(plan.config.optim, name) for name in OPTIM_SETTINGS},
    }
    if plan.shape is not None:
        own[MODEL] = asdict(plan.shape)
    assert not own.keys() & engine.keys(), f"the engine's scalars take the run's names {sorted(own.keys() & engine.keys())}"
    return {**own, **engine}


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide numbers, for whoever wonders later why two runs differ."""
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # engines are optional
            continue
    return found


def restore(plan: RunPlan, reader: Reader, kind: SourceKind, path: Path, check_data: Callable[[Mapping[str, object]], None]) -> TrainState:
    """The state that a checkpoint at ``path`` is of.

    A resumed run must be the same run on the same data. A fork may differ in both: it takes over weights, optimizer and the
    count of steps, and goes on at its own data's samples of that step.

    Args:
        check_data: raises CheckpointError where a recorded fingerprint is not of the data that this run reads.

    Raises:
        CheckpointError: it is not of a step, or it is of another run or other data.
    """
    found, seen = reader.scalars, f"resume={path}" if kind is SourceKind.RESUME else f"run.fork={path}"
    key = seen.partition("=")[0]
    step = found.get(STEP)
    if not isinstance(step, int):
        raise CheckpointError(Problem(key, f"{seen}, which is of no training step", "a run continues from a checkpoint of a run",
                                      f"start from published weights with model=pretrained model.pretrained={path}"))
    state = TrainState(step)
    if kind is SourceKind.FORK:
        return state
    recorded = found.get(DATA)
    if isinstance(recorded, Mapping):
        check_data(recorded)
    own = {IDENTITY: plan.identity, SEED: plan.config.train.seed, CONSUMED: state.consumed_samples(plan)}
    differing = [f"{name}={found[name]}, here {value}" for name, value in own.items() if name in found and found[name] != value]
    if differing:
        raise CheckpointError(Problem(
            key, f"{seen} has {'; '.join(differing)}", "a run continues with the same model, data, optimizer, schedule and batch",
            f"bring back what differs, or start a new run from this state with run.fork={path}"))
    return state
