"""The training state, how it is written, and the checks before a run continues from a checkpoint.

Everything follows from the number of completed steps: the consumed samples (``BatchPlan.at``), the learning
rate, the dropout seed of each step. The state is therefore that number, and a checkpoint records the rest to
detect what does not fit. Because a fork may change the global batch, each checkpoint records the batch sizes
of the steps before it, and a fork continues at the next sample.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from toolkit import families
from toolkit.checkpoint.online.store import CheckpointStore, PendingSave
from toolkit.checkpoint.scalars import CONSUMED, OPTIM, OPTIM_SETTINGS, SOUND, STEP
from toolkit.checkpoint.shard import Shard, StateReader
from toolkit.checkpoint.source import MODEL
from toolkit.data.registry import SampleStream
from toolkit.engine.protocol import Engine
from toolkit.errors import CheckpointError, Problem
from toolkit.observe.context import RankContext
from toolkit.paths import Location
from toolkit.plan.batch import continue_batch
from toolkit.plan.schedule import learning_rate
from toolkit.plan.types import BatchPlan, RampStage, RunPlan
from toolkit.rundir.start_state import StartKind

DATA, IDENTITY, SEED, VERSIONS = "data", "identity", "seed", "versions"
DATA_STATE = "data_state"  # of a stream whose position does not follow from the step
HOOKS = "hooks"  # states of hooks by name
BATCH_STAGES = "batch_stages"  # [size, first step, first sample] of each global batch size until this step
_RECORDED_PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers")


@dataclass(slots=True)
class TrainState:
    """``step`` is the number of completed optimizer steps; skipped ones count, since their samples are
    consumed.
    """

    step: int = 0

    def consumed_samples(self, plan: RunPlan) -> int:
        return plan.batch.at(self.step).first_sample


def namespace(plan: RunPlan) -> str:
    """Return the namespace of tensor names: ``llama/1``, ``transformers/phi3`` for ``model.hf``, or
    ``module/my.package.Model`` for ``model.target``.
    """
    if plan.shape is not None:
        return families.get_family(plan.shape.family).namespace
    model = plan.config.model
    return f"module/{model.target}" if model.target is not None else f"transformers/{model.hf.model_type}"


def scalars(
    plan: RunPlan,
    state: TrainState,
    fingerprint: Mapping[str, Any],
    data_state: Mapping[str, Any],
    engine: Mapping[str, object],
    hooks: Mapping[str, Any] | None = None,
    *,
    sound: bool | None = None,
) -> dict[str, object]:
    """Return what a checkpoint records besides tensors, with the engine's scalars, as plain JSON types.

    Args:
        sound: see ``toolkit.checkpoint.scalars.SOUND``; None: unknown.
    """
    own: dict[str, object] = {
        STEP: state.step,
        CONSUMED: state.consumed_samples(plan),
        DATA: dict(fingerprint),
        BATCH_STAGES: [
            [stage.size, stage.first_step, stage.first_sample]
            for stage in plan.batch.stages
            if stage.first_step < state.step
        ],
        DATA_STATE: dict(data_state),
        IDENTITY: plan.identity,
        SEED: plan.config.train.seed,
        VERSIONS: package_versions(),
        OPTIM: {name: getattr(plan.config.optim, name) for name in OPTIM_SETTINGS}
        | {"lr": learning_rate(plan, state.step)},
    }
    if sound is not None:
        own[SOUND] = sound
    if hooks:
        own[HOOKS] = dict(hooks)
    if plan.shape is not None:
        own[MODEL] = asdict(plan.shape)
    assert not own.keys() & engine.keys(), (
        f"the engine's scalars take the run's names {sorted(own.keys() & engine.keys())}"
    )
    return {**own, **engine}


@dataclass(frozen=True, slots=True)
class StateWriter:
    """Writes what this rank contributes to a checkpoint.

    Attributes:
        flush: called before a save, so that the rows up to it are written if the run is killed later.
        hook_states: returns what the hooks store. May be collective.
    """

    context: RankContext
    engine: Engine
    stream: SampleStream
    flush: Callable[[], None]
    hook_states: Callable[[], Mapping[str, Any]] = dict

    def save(
        self,
        store: CheckpointStore,
        step: int,
        shards: Sequence[Shard],
        *,
        sound: bool | None = None,
        background: bool,
        best: Sequence[int] = (),
    ) -> PendingSave:
        """Save the state after ``step`` optimizer steps, as ``CheckpointStore.save``. Collective.

        Args:
            shards: those of the engine.
            sound: as in :func:`scalars`.
        """
        recorded = self.collect_scalars(step, sound=sound)
        context = self.context
        return store.save(
            step,
            shards,
            recorded,
            namespace=namespace(context.plan),
            rank=context.rank,
            ranks=context.ranks,
            attempt=context.attempt,
            background=background,
            best=best,
        )

    def collect_scalars(self, step: int, *, sound: bool | None = None) -> dict[str, object]:
        """Return what is recorded beside the tensors after ``step`` optimizer steps, as :func:`scalars`.
        Collective.
        """
        self.flush()
        return scalars(
            self.context.plan,
            TrainState(step),
            self.stream.fingerprint(),
            self.stream.state(step),
            self.engine.scalars(),
            self.hook_states(),
            sound=sound,
        )


def hook_states(reader: StateReader) -> Mapping[str, Any]:
    """Return the states of hooks that a checkpoint recorded, by name."""
    recorded = reader.scalars.get(HOOKS)
    return recorded if isinstance(recorded, Mapping) else {}


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect numerical results."""
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # engines are optional
            continue
    return found


def restore(
    plan: RunPlan, reader: StateReader, kind: StartKind, path: Location
) -> tuple[TrainState, BatchPlan]:
    """Return the state in the checkpoint at ``path``, and the batch plan of a run that continues from it.

    A resumed run must be the same run. A fork may differ: it inherits weights, optimizer state and the
    numbers of steps and consumed samples, so its first step starts at the sample at which its parent
    stopped.

    Raises:
        CheckpointError: the checkpoint records no training step, or is of another run.
    """
    found, seen = reader.scalars, f"resume={path}" if kind is StartKind.RESUME else f"run.fork={path}"
    key = seen.partition("=")[0]
    step, consumed = found.get(STEP), found.get(CONSUMED)
    if not isinstance(step, int):
        raise CheckpointError(
            Problem(
                key,
                f"{seen}, which records no training step",
                "a run continues from a checkpoint of a run",
                f"start from published weights with model=pretrained model.pretrained={path}",
            )
        )
    before, batch = _recorded_stages(found), plan.batch
    if isinstance(consumed, int) and (before or kind is StartKind.FORK):
        batch = continue_batch(batch, plan.config.train, before, step, consumed)
    if kind is StartKind.FORK:
        return TrainState(step), batch
    own = {IDENTITY: plan.identity, SEED: plan.config.train.seed, CONSUMED: batch.at(step).first_sample}
    differing = [
        f"{name}={found[name]}, here {value}"
        for name, value in own.items()
        if name in found and found[name] != value
    ]
    if differing:
        raise CheckpointError(
            Problem(
                key,
                f"{seen} has {'; '.join(differing)}",
                "a run continues with the same model, data, optimizer, schedule and batch",
                f"undo these changes, or start a new run from this state with run.fork={path}",
            )
        )
    return TrainState(step), batch


def _recorded_stages(found: Mapping[str, object]) -> list[RampStage]:
    """Return the recorded batch sizes; none if another program or an older version wrote the checkpoint."""
    recorded = found.get(BATCH_STAGES)
    if not isinstance(recorded, list):
        return []
    return [
        RampStage(size=size, first_step=step, first_sample=sample, steps=None)
        for size, step, sample in recorded
    ]
