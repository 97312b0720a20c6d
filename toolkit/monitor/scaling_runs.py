"""Compare the measured steps of finished runs with their estimates, for a scaling report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from toolkit.config.compose import from_yaml
from toolkit.config.schema import RunConfig
from toolkit.errors import InputError, Problem, UserError
from toolkit.estimate.measured_factors import MeasuredEstimate
from toolkit.estimate.scaling import Estimator, Planner
from toolkit.estimate.scaling_report import describe_layout
from toolkit.monitor.calibration_runs import world_of
from toolkit.monitor.measured_steps import MeasuredSteps, read_measured_steps
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan, World


def estimate_measured(
    folders: Sequence[Path],
    config: RunConfig,
    world: World,
    estimate: Estimator,
    plan_run: Planner = make_plan,
) -> list[MeasuredEstimate]:
    """Return the estimates and the measured steps of the runs in ``folders``, by rising number of ranks.

    Args:
        config: whose step time the runs are to predict, on machines like those of ``world``.
        estimate: of a plan.
        plan_run: plans a run; for a model without a family, with its trace.

    Raises:
        InputError: a run has too few measured steps, cannot be planned any more, or has another model,
            sequence length, precision or kind of hardware, so that ``config`` takes other times.
    """
    found = []
    for folder in folders:
        steps = read_measured_steps(folder)
        plan = _plan(folder, steps, plan_run)
        differences = [
            Problem(
                "measured",
                f"{folder}: {name} is {_shown(theirs)}, here {_shown(ours)}",
                "measured runs have the model, sequence length, precision and hardware of the configuration",
                "leave this run out, or plan its configuration",
            )
            for name, ours, theirs in _compared(config, world, plan)
            if ours != theirs
        ]
        if differences:
            raise InputError(*differences)
        predicted = estimate(plan)
        if predicted is None:
            raise _unusable(folder, "the time of its model is not predicted")
        found.append(
            MeasuredEstimate(
                name=folder.absolute().name,
                layout=describe_layout(plan),
                ranks=plan.world.ranks,
                global_batch=plan.batch.global_batch,
                estimate=predicted,
                seconds=steps.seconds,
            )
        )
    return sorted(found, key=lambda run: run.ranks)


def _plan(folder: Path, steps: MeasuredSteps, plan_run: Planner) -> RunPlan:
    """Return the plan of the run as this version of the toolkit makes it."""
    try:
        return plan_run(from_yaml(steps.config), world_of(steps.plan["world"]))
    except UserError as error:
        raise _unusable(folder, f"this version cannot plan it: {error.problems[0].seen}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(folder, f"plan.json: {type(error).__name__}: {error}") from error


def _compared(config: RunConfig, world: World, plan: RunPlan) -> Iterator[tuple[str, object, object]]:
    """Yield name, value here and value of the measured run."""
    theirs = plan.config
    yield "world.device", world.device.value, plan.world.device.value
    yield "world.gpu", world.gpu, plan.world.gpu
    yield "precision", config.precision, theirs.precision
    yield "train.sequence_length", config.train.sequence_length, theirs.train.sequence_length
    for key in (field.name for field in fields(config.model)):
        yield f"model.{key}", getattr(config.model, key), getattr(theirs.model, key)


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)


def _unusable(folder: Path, seen: str) -> InputError:
    return InputError(
        Problem(
            "measured",
            f"{folder}: {seen}",
            "measured runs are compared with their estimates",
            "leave it out, or train it again with this version",
        )
    )
