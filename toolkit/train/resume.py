"""Find the state that a run starts from: its checkpoint or its parent's, published or random weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import find_checkpoint, move_all_checkpoints, rewind_to_checkpoint
from toolkit.checkpoint.shard import StateReader
from toolkit.checkpoint_folder import newest_checkpoint
from toolkit.data.registry import SampleStream
from toolkit.engine.build import open_initial_weights
from toolkit.hooks import Hooks
from toolkit.paths import Location, Url
from toolkit.plan.types import BatchPlan, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_state import StartKind, resolve_start_state
from toolkit.train import state
from toolkit.train.rollback import Rollback, read_rollbacks, skipped_on_resume
from toolkit.train.snapshot_restore import Snapshot
from toolkit.train.state import TrainState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """
    Attributes:
        checkpoint: None if training starts at its first step.
        batch: includes the batch sizes of earlier steps, which a fork inherits.
    """

    reader: StateReader
    state: TrainState
    checkpoint: Location | None
    description: str
    batch: BatchPlan
    forked: bool = False

    @property
    def continues(self) -> bool:
        """Whether the run continues from a checkpoint of its own."""
        return self.checkpoint is not None and not self.forked


def set_aside_later_checkpoints(
    plan: RunPlan, directory: RunDirectory, resume_point: ResumePoint, attempt: int
) -> None:
    """Move the checkpoints of steps that will be repeated to the folder of the attempt that wrote them. On
    rank 0.

    After ``resume=PATH``, or from its store, the run continues from that checkpoint, and after
    ``resume=never`` from the beginning. Later starts must do the same, even if this one ends before its first
    save.
    """
    from_store = isinstance(resume_point.checkpoint, Url) and not resume_point.forked
    if plan.config.resume == "auto" and not from_store:
        return
    aside = directory.set_aside_folder(directory.previous_attempt(attempt))  # a rollback may have used one
    if resume_point.checkpoint is None or plan.config.resume == "never":
        moved = move_all_checkpoints(directory.checkpoints, aside)
    else:
        moved = rewind_to_checkpoint(
            directory.checkpoints, resume_point.checkpoint, resume_point.state.step, aside
        )
    if moved:
        names = ", ".join(folder.name for folder in moved)
        log.info(
            f"moved the checkpoints of the steps that are repeated ({names}) to {aside}; no save removes them"
        )


def find_resume_point(
    plan: RunPlan, directory: RunDirectory, later: Url | None = None, snapshot: Snapshot | None = None
) -> ResumePoint:
    """Find the resume point from the files, which is the same on every rank.

    Args:
        later: a checkpoint of this run in its store that is later than those in the run's directory, if there
            is one.
        snapshot: a snapshot in memory that is later than both, if there is one.

    Raises:
        UserError: there is nothing to resume from, or it does not fit this run.
    """
    newest = None
    if plan.config.resume == "auto":
        newest = later or newest_checkpoint(directory.checkpoints)
    if snapshot is not None:
        newest = snapshot.folder
    start = resolve_start_state(plan.config, newest)
    if start.path is None:
        pretrained = plan.config.model.pretrained
        description = (
            f"random weights of train.seed={plan.config.train.seed}"
            if pretrained is None
            else f"the weights of {pretrained}"
        )
        return ResumePoint(open_initial_weights(plan), TrainState(), None, description, plan.batch)
    checkpoint = start.path
    if isinstance(checkpoint, Path):
        checkpoint = find_checkpoint(checkpoint) or checkpoint
    if snapshot is not None and checkpoint == snapshot.folder:
        reader = snapshot.reader(plan)
    else:
        reader = open_reader(checkpoint, state.namespace(plan), plan.shape)
    if isinstance(checkpoint, Url):
        checkpoint = reader.path  # of the pointer
    restored, batch = state.restore(plan, reader, start.kind, checkpoint)
    kind = "fork of" if start.kind is StartKind.FORK else "continues from"
    samples = batch.at(restored.step).first_sample
    description = f"{kind} {checkpoint}: {restored.step} steps and {samples:,} samples are done"
    return ResumePoint(reader, restored, checkpoint, description, batch, forked=start.kind is StartKind.FORK)


def restore_hooks(resume_point: ResumePoint, hooks: Hooks, *, rank: int) -> None:
    """Restore the states of hooks that the checkpoint recorded. The hooks of a fork start without state."""
    recorded = state.hook_states(resume_point.reader)
    if not resume_point.continues:
        return
    hooks.load_state_dict(recorded)
    if rank == 0 and (removed := hooks.without_hook(recorded)):
        log.info(f"the checkpoint has the state of {', '.join(removed)}, which this run does not have")


def earlier_rollbacks(directory: RunDirectory, resume_point: ResumePoint) -> list[Rollback]:
    """Return the rollbacks of the run that continues; none of a run that begins."""
    return read_rollbacks(directory.rollbacks_file) if resume_point.continues else []


def restore_stream(
    resume_point: ResumePoint, stream: SampleStream, rollbacks: Sequence[Rollback] = ()
) -> None:
    """Set ``stream`` to the position that the checkpoint recorded, without the samples that ``rollbacks``
    skip.

    Raises:
        CheckpointError: a resumed run reads other data than before. A fork may read other data.
    """
    if resume_point.checkpoint is None:
        return
    recorded, data_state = (
        value if isinstance(value := resume_point.reader.scalars.get(name), Mapping) else {}
        for name in (state.DATA, state.DATA_STATE)
    )
    if resume_point.forked:
        stream.fork(recorded, data_state)
        return
    if recorded:
        stream.check_fingerprint(recorded)
    stream.restore(data_state)
    if rollbacks:
        consumed = resume_point.batch.at(resume_point.state.step).first_sample
        stream.skipped = skipped_on_resume(stream.skipped, rollbacks, consumed)
