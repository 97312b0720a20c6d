"""Predict what a start would do in an existing run directory: nothing, or continue with another learning
rate.
"""

from __future__ import annotations

import math
from pathlib import Path

from toolkit.config.optim import ScheduleName
from toolkit.config.schema import RunConfig
from toolkit.errors import Problem, Severity
from toolkit.plan.schedule import decay_span, scheduled_rate
from toolkit.rows import last_row
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_state import StartKind, find_run_directory, resolve_start_state
from toolkit.rundir.status import RunState, Status


class NothingToDo(Exception):
    """All requested steps are completed. The message is for the user; the exit code is 0."""


def check_remaining_work(config: RunConfig, directory: RunDirectory) -> None:
    """Compare the requested steps with the completed ones, using files only.

    A start is needed anyway if ``resume`` is a path, if the run did not end well, or if evaluations, the
    prompt or the export, which follow the last step, have changed.

    Raises:
        NothingToDo: All requested steps are completed.
    """
    steps, saved, status = config.train.steps, directory.saved_step(), directory.status()
    if config.resume != "auto" or saved is None:
        return
    if saved < steps:
        if status is not None and _ended_early(config, directory, status, saved):
            raise NothingToDo(
                f"nothing to do: {directory.path} ended early after step {saved} of {steps}: "
                f"{status.reason}\n    remedy: change train.early_stopping or hooks to train on, write "
                f"train.steps={2 * steps}, or run.name=ANOTHER for a new run"
            )
        return
    ended_well = status is not None and status.state is RunState.DONE
    if saved == steps and not (ended_well and _same_ending(config, directory)):
        return
    if config.checkpoint.url is not None and (directory.uploads / "pending").exists():
        return  # the last checkpoint is not in the store yet
    done = f"{saved} of {steps} steps" if saved == steps else f"{saved} steps, more than train.steps={steps},"
    raise NothingToDo(
        f"nothing to do: {done} of {directory.path} are done; write train.steps={2 * saved} to train "
        "longer, or "
        "run.name=ANOTHER for a new run"
    )


def _ended_early(config: RunConfig, directory: RunDirectory, status: Status, saved: int) -> bool:
    """Return whether early stopping or a hook ended the run, and this start would only repeat that."""
    from toolkit.config.compose import from_yaml

    if status.state is not RunState.DONE or status.step != saved or not status.reason:
        return False
    before = from_yaml(directory.config_file.read_text(encoding="utf-8"))
    return (
        config.train.steps == before.train.steps
        and config.train.early_stopping == before.train.early_stopping
        and config.hooks == before.hooks
        and _same_ending(config, directory)
    )


def _same_ending(config: RunConfig, directory: RunDirectory) -> bool:
    from toolkit.config.compose import from_yaml

    before = from_yaml(directory.config_file.read_text(encoding="utf-8"))
    return (
        config.eval == before.eval
        and config.checkpoint.export == before.checkpoint.export
        and config.monitor.prompt == before.monitor.prompt
    )


def schedule_warning(config: RunConfig, directory: RunDirectory) -> Problem | None:
    """Return a warning if this start's schedule gives another learning rate for the last recorded step, so
    that the curve would jump.
    """
    if config.schedule.name is ScheduleName.custom:
        return None  # its arguments are part of the run's identity, and train.steps is not among them
    start = resolve_start_state(config, directory.newest_checkpoint())
    if start.kind is not StartKind.RESUME or not isinstance(start.path, Path):
        return None
    folder = find_run_directory(start.path.absolute())
    row = last_row(RunDirectory(folder).metrics_file) if folder is not None else None
    return (
        changed_schedule(config, row["step"], row["lr"], folder)
        if folder is not None and row is not None
        else None
    )


def changed_schedule(config: RunConfig, step: int, lr: float, run: Path) -> Problem | None:
    """Return a warning if the learning rate of the last recorded step differs under this start's schedule.

    Args:
        config: Configuration of this start.
        step, lr: Of the last row; ``step`` counts from 1.
        run: The run's directory.
    """
    now = scheduled_rate(config, step - 1)
    if math.isclose(lr, now, rel_tol=1e-6, abs_tol=1e-12):
        return None
    schedule = config.schedule
    length, past = decay_span(schedule, config.train.steps)[1], max(1, step - schedule.warmup_steps)
    return Problem(
        "train.steps",
        f"train.steps={config.train.steps}: the learning rate of step {step} was {lr:.4g}, and is {now:.4g} "
        "in the "
        f"{schedule.name.value} schedule of this start",
        "the schedule ends at train.steps unless schedule.decay gives its length",
        f"continue if the jump is intended; to avoid it, write schedule.decay={length} at the first start "
        "of a run, whatever its "
        f"train.steps; to keep the rate low from here on, start a new run with run.fork={run} "
        f"schedule.decay={past}",
        Severity.WARNING,
    )
