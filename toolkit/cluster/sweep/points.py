"""Points: composed and planned before anything is queued, so that what cannot run is known, with its reason, at once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.cluster import backends
from toolkit.cluster.environment import Launch, check_startable
from toolkit.cluster.job import make_job, plan_job
from toolkit.cluster.machine import Machine
from toolkit.config.cluster import ClusterBackend
from toolkit.config.multirun import OWN, SweepArguments, quoted
from toolkit.errors import ConfigError, PlanError, Problem, Severity, UserError, without_secrets
from toolkit.plan.types import Device, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.source import check_identity

NAME = 60  # letters of a point's name before the digits: a folder that can be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """
    Attributes:
        name: of its folder in the sweep's, the same whenever and by whomever the point is made.
        words: ``compose(words)`` is its configuration: as a user would type them, with the run directory and the group.
        swept: those of the words in which points differ.
        plan: None where it is refused.
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
        """Why it is refused, a line a rule."""
        errors = [problem for problem in self.problems if problem.severity is Severity.ERROR]
        return (
            without_secrets(
                "\n".join(" ".join(f"{problem.seen}: {problem.rule}".split()) for problem in errors)
            )
            or None
        )


def make_points(
    batch: Sequence[Sequence[str]], words: SweepArguments, folder: Path, machine: Machine, script: Path
) -> list[Point]:
    """One point for each combination of words; the same combination twice is one point.

    Args:
        folder: the sweep's, absolute.
        script: launch/train.py.

    Raises:
        ConfigError: a word that no point can mean, such as an unknown key: that is a slip and no point to be left out. Or the words
            no longer mean what a point of this folder was run with, since a file that they name has changed.
    """
    unplanned = {point.name: point for point in (_named(combination, words, folder) for combination in batch)}
    _check_words(list(unplanned.values()), words.options)
    points = [_planned(point, machine, script) for point in unplanned.values()]
    changed = [problem for point in points if (problem := _changed(point)) is not None]
    if changed:
        raise ConfigError(*changed)
    return points


def name_of(swept: Sequence[str]) -> str:
    """``zero-stage1-tensor-2-1f2e3d4c``: the last parts of the keys, the values, and eight digits that tell any two points apart."""
    digits = hashlib.sha256("\0".join(sorted(swept)).encode()).hexdigest()[:8]
    parts = (
        f"{re.split('[./]', key.lstrip('+~'))[-1]}-{value}"
        for key, _, value in (word.partition("=") for word in swept)
    )
    text = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-.")[:NAME].rstrip("-.")
    return f"{text}-{digits}" if text else f"point-{digits}"


def _named(combination: Sequence[str], words: SweepArguments, folder: Path) -> Point:
    swept = words.swept(combination)
    name = name_of(swept)
    own = [f"{OWN[0]}={quoted(folder / name)}"]
    if not any(word.partition("=")[0] == OWN[1] for word in combination):
        own.append(f"{OWN[1]}={quoted(folder.name)}")
    return Point(name=name, words=(*words.options, *combination, *own), swept=swept)


def _check_words(points: Sequence[Point], options: Sequence[str]) -> None:
    """Each word once, however many points have it."""
    from toolkit.config.overrides import read

    words = dict.fromkeys(word for point in points for word in point.words if word not in options)
    read([*options, *words])


def _planned(point: Point, machine: Machine, script: Path) -> Point:
    from toolkit.config.compose import compose
    from toolkit.plan.target import check_target

    try:
        config = compose(point.words)
        here = config.cluster.where is ClusterBackend.local
        seen = share(machine, config.cluster.gpus_per_node) if here else machine
        if here:
            check_startable(config.cluster, Launch(), seen)
        plan = plan_job(config, seen)
        check_target(plan.config.model)
        if not here:
            backends.of(config.cluster.where).render(
                make_job(plan, script)
            )  # for what the cluster would refuse
    except UserError as error:
        return replace(point, problems=error.problems)
    return replace(point, plan=plan, problems=plan.warnings)


def _changed(point: Point) -> Problem | None:
    """A point that was begun as another run than its words describe now."""
    if point.plan is None:
        return None
    try:
        check_identity(point.plan.config, RunDirectory(point.plan.run_dir).config_file)
    except ConfigError as error:
        return Problem(
            "sweep.dir",
            f"{point.label}: {error.problems[0].seen}",
            "the words of a sweep mean the same whenever they are typed; a file that they name has changed",
            "write sweep.dir=FOLDER for a sweep of its own, or undo the change",
        )
    return None


def share(machine: Machine, gpus: int | None) -> Machine:
    """What a point sees of this machine: as many GPUs as it asks for, of those here."""
    return replace(machine, gpus=machine.gpus[:gpus]) if gpus else machine


def host_bytes(plan: RunPlan) -> int:
    """Of a node, that its ranks are planned to use. 0 where that is unknown: model.target."""
    if plan.memory is None:
        return 0
    each = plan.memory.host + (plan.memory.device_total if plan.world.device is Device.CPU else 0)
    return each * min(plan.world.ranks, plan.world.ranks_per_node)


def all_refused(points: Sequence[Point]) -> PlanError:
    """Nothing is left to run: each reason once."""
    problems = {str(problem): problem for point in points for problem in point.problems}
    return PlanError(*problems.values())
