"""Carry out a rollback: load a sound checkpoint in the running processes, and skip the samples that precede
the fault."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import newest_sound_step, rewind_to_checkpoint
from toolkit.checkpoint_folder import step_name
from toolkit.observe.context import RankContext
from toolkit.train import state
from toolkit.train.build import Training, TrainingHooks
from toolkit.train.rollback import append_rollback, decide_rollback
from toolkit.train.soundness import Fault

log = logging.getLogger(__name__)


def roll_back(training: Training, hooks: TrainingHooks, fault: Fault) -> Iterable[Any]:
    """Go back to the newest sound checkpoint, and return the samples of the steps after it. Collective.

    Rows and checkpoints of the steps that are repeated move to the folder of this attempt, as a restart moves
    them. If the process is killed during the rollback, the next start resumes from the same checkpoint; it
    meets the same fault again unless the rollback is recorded.

    Raises:
        Diverged: as :func:`decide_rollback`.
        CheckpointError: the checkpoint is damaged.
    """
    context, stream = training.context, training.data.stream
    plan, directory, attempt = context.plan, context.directory, context.attempt
    hooks.checkpoints.wait()
    decided = decide_rollback(
        fault,
        target=agreed_sound_step(context),
        earlier=training.rollbacks,
        settings=plan.config.train.rollback,
        batch=plan.batch,
        skipped=stream.skipped,
        attempt=attempt,
    )
    step = decided.checkpoint_step
    folder = directory.checkpoints / step_name(step)
    training.monitor.recorder.discard_steps()
    reader = open_reader(folder, state.namespace(plan), plan.shape)
    stream.close()
    hooks.all.on_rollback(folder)
    training.sink.flush()
    if context.rank == 0:
        aside = directory.set_aside_folder(attempt)
        rewind_to_checkpoint(directory.checkpoints, folder, step, aside)
        directory.cut_rows_after(step, attempt)
        append_rollback(directory.rollbacks_file, decided)
        alert = decided.to_alert()
        training.monitor.alert(alert)
        log.warning(f"{fault.cause}: {alert.cause}")
    training.rollbacks.append(decided)
    training.engine.load(reader)
    training.monitor.hangs.beat(f"loading {folder.name}")
    training.state.step = step
    stream.skipped = stream.skipped.add([decided.skipped])
    hooks.all.load_state_dict(state.hook_states(reader))
    return stream.steps(step)


def agreed_sound_step(context: RankContext) -> int | None:
    """Return the newest step whose checkpoint every rank finds sound; None if there is none. Collective."""
    own = newest_sound_step(context.directory.checkpoints)
    (lowest,) = context.all_reduce_flags([1 if own is None else -own])
    return None if lowest > 0 else -lowest
