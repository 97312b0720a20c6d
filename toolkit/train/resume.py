"""Which state a start begins with: a checkpoint of this run, of its parent, published weights, or random ones. All are readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import find_checkpoint, make_newest, set_aside_all
from toolkit.checkpoint.shard import StateReader
from toolkit.checkpoint_folder import newest_checkpoint
from toolkit.data.registry import SampleStream
from toolkit.engine.build import first_weights
from toolkit.plan.types import BatchPlan, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.source import SourceKind, resolve_source
from toolkit.train import state
from toolkit.train.state import TrainState


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """``checkpoint`` is None where training begins at its first step."""

    reader: StateReader
    state: TrainState
    checkpoint: Path | None
    words: str  # for people
    batch: BatchPlan  # with the steps before, which a fork takes over from its parent
    forked: bool = False


def set_aside_later_checkpoints(
    plan: RunPlan, directory: RunDirectory, resume_point: ResumePoint, attempt: int
) -> list[str]:
    """After ``resume=PATH`` the run continues from there, and after ``resume=never`` from the beginning: later starts too, should this
    one end before its first save.

    The checkpoints of later steps belong to steps that are run again, and move to the attempt that made them, as their rows do.
    By rank 0. Returns lines to log.
    """
    if plan.config.resume == "auto":
        return []
    aside = directory.folder_of_older(attempt) / "checkpoints"
    if resume_point.checkpoint is None or plan.config.resume == "never":
        moved = set_aside_all(directory.checkpoints, aside)
    else:
        moved = make_newest(directory.checkpoints, resume_point.checkpoint, resume_point.state.step, aside)
    if not moved:
        return []
    names = ", ".join(folder.name for folder in moved)
    return [
        f"{names} of the steps that are run again {'are' if len(moved) > 1 else 'is'} now in {aside}, and no later save removes them"
    ]


def find_resume_point(plan: RunPlan, directory: RunDirectory) -> ResumePoint:
    """Without collectives: every rank comes to the same answer from the same files.

    Raises:
        UserError: there is nothing to continue from, or it must not be continued from.
    """
    # resume=never: RunDirectory.check has seen that nothing is there, or nothing that files agree on.
    source = resolve_source(
        plan.config, newest_checkpoint(directory.checkpoints) if plan.config.resume == "auto" else None
    )
    if source.path is None:
        pretrained = plan.config.model.pretrained
        words = (
            f"random weights of train.seed={plan.config.train.seed}"
            if pretrained is None
            else f"the weights of {pretrained}"
        )
        return ResumePoint(first_weights(plan), TrainState(), None, words, plan.batch)
    checkpoint = find_checkpoint(source.path) or source.path
    reader = open_reader(checkpoint, state.namespace(plan), plan.shape)
    begins, batch = state.restore(plan, reader, source.kind, checkpoint)
    kind = "fork of" if source.kind is SourceKind.FORK else "continues from"
    words = f"{kind} {checkpoint}: {begins.step} steps and {batch.at(begins.step).first_sample:,} samples are done"
    return ResumePoint(reader, begins, checkpoint, words, batch, forked=source.kind is SourceKind.FORK)


def restore_stream(resume_point: ResumePoint, stream: SampleStream) -> None:
    """Set ``stream`` to where the checkpoint's stream was.

    Raises:
        CheckpointError: a run is resumed on other data than it began with. A fork may read other data.
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
