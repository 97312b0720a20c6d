"""Compose and plan all points of a sweep first, so that points that cannot run are reported immediately."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.cluster.jobs import backends
from toolkit.cluster.jobs.job import create_job, plan_job
from toolkit.cluster.world.environment import Launch, check_startable
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.config.cluster import ClusterBackend
from toolkit.config.multirun import OWN, SweepArguments, quoted
from toolkit.errors import ConfigError, PlanError, Problem, Severity, UserError, without_secrets
from toolkit.plan.types import Device, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_state import check_identity

MAX_NAME_LENGTH = 60  # length of the readable part of a point's folder name


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One combination of a sweep's values.

    Attributes:
        name: of its folder; depends only on the swept values.
        words: all overrides, including the run directory and the W&B group; ``compose(words)`` is the
            configuration.
        swept: the overrides in which the points differ.
        plan: None if the point is refused.
        problems: why it is refused.
    """

    name: str
    words: tuple[str, ...]
    swept: tuple[str, ...]
    plan: RunPlan | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def label(self) -> str:
        return " ".join(self.swept) or self.name

    @property
    def reason(self) -> str | None:
        """Why the point is refused, one line per rule."""
        errors = [problem for problem in self.problems if problem.severity is Severity.ERROR]
        return (
            without_secrets(
                "\n".join(" ".join(f"{problem.seen}: {problem.rule}".split()) for problem in errors)
            )
            or None
        )


def make_points(
    batch: Sequence[Sequence[str]], words: SweepArguments, folder: Path, machine: MachineInfo, script: str
) -> list[SweepPoint]:
    """Create one point for each combination, without duplicates.

    Args:
        folder: of the sweep, absolute.
        script: launch/train.py or its module.

    Raises:
        ConfigError: an override is invalid for every point, such as an unknown key; or a point's
            configuration no longer equals the one it was started with, since a file that it refers to has
            changed.
    """
    unplanned = {
        point.name: point for point in (_make_point(combination, words, folder) for combination in batch)
    }
    _check_overrides(list(unplanned.values()), words.options)
    points = [_plan_point(point, machine, script) for point in unplanned.values()]
    changed = [problem for point in points if (problem := _find_changed_config(point)) is not None]
    if changed:
        raise ConfigError(*changed)
    return points if words.sweep.prune is None else _refuse_slow(points, words.sweep.prune)


def point_name(swept: Sequence[str]) -> str:
    """Return a readable, unique name: keys and values followed by a hash, such as
    ``zero-stage1-tensor-2-1f2e3d4c``.
    """
    digits = hashlib.sha256("\0".join(sorted(swept)).encode()).hexdigest()[:8]
    parts = (
        f"{re.split('[./]', key.lstrip('+~'))[-1]}-{value}"
        for key, _, value in (word.partition("=") for word in swept)
    )
    text = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")[:MAX_NAME_LENGTH].rstrip("-.")
    return f"{text}-{digits}" if text else f"point-{digits}"


def _make_point(combination: Sequence[str], words: SweepArguments, folder: Path) -> SweepPoint:
    swept = words.swept(combination)
    name = point_name(swept)
    own = [f"{OWN[0]}={quoted(folder / name)}"]
    if not any(word.partition("=")[0] == OWN[1] for word in combination):
        own.append(f"{OWN[1]}={quoted(folder.name)}")
    return SweepPoint(name=name, words=(*words.options, *combination, *own), swept=swept)


def _check_overrides(points: Sequence[SweepPoint], options: Sequence[str]) -> None:
    """Parse each distinct override once."""
    from toolkit.config.overrides import parse_overrides

    words = dict.fromkeys(word for point in points for word in point.words if word not in options)
    parse_overrides([*options, *words])


def _plan_point(point: SweepPoint, machine: MachineInfo, script: str) -> SweepPoint:
    from toolkit.config.compose import compose
    from toolkit.plan.schedule import check_schedule
    from toolkit.user_code import check_user_code

    try:
        config = compose(point.words)
        here = config.cluster.where is ClusterBackend.local
        seen = limit_gpus(machine, config.cluster.gpus_per_node) if here else machine
        if here:
            check_startable(config.cluster, Launch(), seen)
        plan = plan_job(config, seen)
        check_user_code(plan.config)
        check_schedule(plan)
        if not here:
            # raises what the cluster would reject
            backends.get_backend(config.cluster.where).render(create_job(plan, script))
    except UserError as error:
        return replace(point, problems=error.problems)
    return replace(point, plan=plan, problems=plan.warnings)


def _refuse_slow(points: Sequence[SweepPoint], most: float) -> list[SweepPoint]:
    """Refuse the points whose predicted time per token exceeds that of the fastest point ``most`` times."""
    times = {point.name: seconds for point in points if (seconds := _predict_seconds(point)) is not None}
    if not times:
        return list(points)
    least = min(times.values())
    return [
        replace(point, plan=None, problems=(_slow_problem(times[point.name] / least, most),))
        if times.get(point.name, 0.0) > most * least
        else point
        for point in points
    ]


def _predict_seconds(point: SweepPoint) -> float | None:
    """Return the predicted seconds of a step per token, image or sample; None if unknown."""
    from toolkit.estimate.profile import load_profile
    from toolkit.estimate.step import estimate_step

    plan = point.plan
    profile = None if plan is None else load_profile(plan.config.cluster, plan.world)
    estimate = None if plan is None or profile is None else estimate_step(plan, profile)
    return None if plan is None or estimate is None else estimate.seconds / plan.units_per_step


def _slow_problem(ratio: float, most: float) -> Problem:
    return Problem(
        "sweep.prune",
        f"predicted to take {ratio:.2f} x as long per token as the fastest point",
        f"with sweep.prune={most:g} a point takes at most {most:g} x as long",
        f"set sweep.prune={ratio + 0.1:.1f}, or leave it out",
    )


def _find_changed_config(point: SweepPoint) -> Problem | None:
    """Return a problem if the point was started with another configuration than its overrides give now."""
    if point.plan is None:
        return None
    try:
        check_identity(point.plan.config, RunDirectory(point.plan.run_dir).config_file)
    except ConfigError as error:
        return Problem(
            "sweep.dir",
            f"{point.label}: {error.problems[0].seen}",
            "the overrides of a sweep must always give the same configuration, but a file that they refer "
            "to has changed",
            "set sweep.dir=FOLDER to start a new sweep, or undo the change",
        )
    return None


def limit_gpus(machine: MachineInfo, gpus: int | None) -> MachineInfo:
    """Return the machine with as many GPUs as one point uses."""
    return replace(machine, gpus=machine.gpus[:gpus]) if gpus else machine


def planned_host_bytes(plan: RunPlan) -> int:
    """Return the planned host memory of a node in bytes; 0 if unknown (model.target)."""
    if plan.memory is None:
        return 0
    each = plan.memory.host + (plan.memory.device_total if plan.world.device is Device.CPU else 0)
    return each * min(plan.world.ranks, plan.world.ranks_per_node)


def all_refused_error(points: Sequence[SweepPoint]) -> PlanError:
    """Return an error with each reason once, for a sweep whose points are all refused."""
    problems = {str(problem): problem for point in points for problem in point.problems}
    return PlanError(*problems.values())
