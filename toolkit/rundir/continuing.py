"""What a start would do in the directory of a run that has begun before: nothing, or continue under another learning rate."""

from __future__ import annotations

import math
from pathlib import Path

from toolkit.config.schema import RunConfig
from toolkit.errors import Problem, Severity
from toolkit.plan.schedule import decay_span, rate
from toolkit.rows import last_row
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.source import SourceKind, find_run_directory, resolve_source
from toolkit.rundir.status import RunState


class NothingToDo(Exception):
    """The steps that a start asks for are done. Its text says so; the exit code is 0."""


def check_remaining_work(config: RunConfig, directory: RunDirectory) -> None:
    """Compare the steps asked for with those that are done, from files alone.

    A start is needed all the same if ``resume`` names a checkpoint to go back to, if the run did not end well, or if it asks for
    other evaluations, another prompt, or the export, which follow the last step.

    Raises:
        NothingToDo: every step is done, or more of them than asked for.
    """
    steps, saved, status = config.train.steps, directory.saved_step(), directory.status()
    if config.resume != "auto" or saved is None or saved < steps:
        return
    ended_well = status is not None and status.state is RunState.DONE
    if saved == steps and not (ended_well and _same_ending(config, directory)):
        return
    done = f"{saved} of {steps} steps" if saved == steps else f"{saved} steps, more than train.steps={steps},"
    raise NothingToDo(
        f"nothing to do: {done} of {directory.path} are done; write train.steps={2 * saved} to train longer, or "
        "run.name=ANOTHER for a new run"
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
    """A warning if the learning rate of the newest recorded step differs under the schedule of this start: the curve then jumps."""
    source = resolve_source(config, directory.newest_checkpoint())
    if source.kind is not SourceKind.RESUME or source.path is None:
        return None
    folder = find_run_directory(source.path.absolute())
    row = last_row(RunDirectory(folder).metrics_file) if folder is not None else None
    return (
        changed_schedule(config, row["step"], row["lr"], folder)
        if folder is not None and row is not None
        else None
    )


def changed_schedule(config: RunConfig, step: int, lr: float, run: Path) -> Problem | None:
    """
    Args:
        step, lr: of the newest row; ``step`` counts from 1.
        run: the directory of the run.
    """
    now = rate(config, step - 1)
    if math.isclose(lr, now, rel_tol=1e-6, abs_tol=1e-12):
        return None
    schedule = config.schedule
    length, past = decay_span(schedule, config.train.steps)[1], max(1, step - schedule.warmup)
    return Problem(
        "train.steps",
        f"train.steps={config.train.steps}: the learning rate of step {step} was {lr:.4g}, and is {now:.4g} in the "
        f"{schedule.name.value} schedule of this start",
        "the schedule ends at train.steps unless schedule.decay gives its length",
        f"continue if the jump is intended; to avoid it, write schedule.decay={length} at the first start of a run, whatever its "
        f"train.steps; to keep the rate low from here on, start a new run with run.fork={run} schedule.decay={past}",
        Severity.WARNING,
    )
