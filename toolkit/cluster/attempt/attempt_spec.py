"""Compose the configuration once and freeze it, so that every rank makes the same plan."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.cluster.attempt.node_snapshot_folder import launcher_restarts_ranks
from toolkit.cluster.jobs.job import FROZEN, resolve_from_files
from toolkit.cluster.stop.stop_request import process_start_time
from toolkit.cluster.world.environment import Launch, Launcher, check_startable, detect_world
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.cluster.world.node_range import check_departures, check_node_range
from toolkit.commands import command_line
from toolkit.config.cluster import ClusterBackend
from toolkit.config.project import find_project
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, Problem, Severity
from toolkit.files import write_whole
from toolkit.plan.types import Device, RunPlan, World
from toolkit.restart_phases import RestartPhase, RestartPhases
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_checks import check_remaining_work, schedule_warning
from toolkit.rundir.usage import device_hours, read_usage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """What all ranks must agree on, passed through the store (under a launcher) or as a file (from the
    supervisor).
    """

    yaml: str  # the whole, resolved configuration
    world: World
    attempt: int
    data: str | None = None  # folder of the prepared data that the run reads
    memory: str | None = None  # this node's folder of snapshots in memory, if it has one
    restart: RestartPhases | None = None  # of an attempt that follows another of the same command

    def restart_phase_ended(self, phase: RestartPhase) -> AttemptSpec:
        """Return a copy that records the end of a phase, if this is a restart."""
        return self if self.restart is None else replace(self, restart=self.restart.ended(phase))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write the spec for the ranks, which read it immediately; so the file is not synced to disk."""
        write_whole(path, json.dumps(self.to_json()), durable=False)

    @staticmethod
    def read(path: Path) -> AttemptSpec:
        return AttemptSpec.from_json(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> AttemptSpec:
        found = message["world"]
        world = World(
            **{
                **found,
                "device": Device(found["device"]),
                "lacking_for_compile": tuple(found["lacking_for_compile"]),  # JSON has lists only
            }
        )
        restart = message["restart"]
        return AttemptSpec(
            message["yaml"],
            world,
            message["attempt"],
            message["data"],
            message["memory"],
            None if restart is None else RestartPhases.from_json(restart),
        )

    def plan(self) -> RunPlan:
        from toolkit.config.compose import from_yaml
        from toolkit.plan import make_plan

        return make_plan(from_yaml(self.yaml), self.world)


def start_attempt(
    overrides: Sequence[str] | RunConfig, launch: Launch, machine: MachineInfo, began: float | None = None
) -> tuple[AttemptSpec, RunPlan, RunDirectory]:
    """Compose the configuration, plan the run and open its next attempt. Imports neither torch nor an engine.

    Args:
        began: when torchrun's first agent started, in seconds since 1970; None: there is none.

    Raises:
        UserError: the configuration is wrong; nothing has been written.
        NothingToDo: the requested steps are done; nothing has been written.
    """
    from toolkit.config.compose import to_yaml
    from toolkit.estimate.plan_report import to_json, warn_about_budget
    from toolkit.plan import make_plan
    from toolkit.plan.schedule import check_schedule
    from toolkit.rundir.budget import check_budget
    from toolkit.user_code import check_user_code

    config = load_config(overrides, launch)
    check_startable(config.cluster, launch, machine)
    plan = make_plan(config, detect_world(config.cluster, launch, machine))
    if launch.node_range is not None:
        check_node_range(config, launch.node_range, plan.world, agent_store=launch.agent_store)
    check_departures(config, launch.node_range, restarts=launch.restart + launch.restarts_left)
    check_user_code(plan.config)
    check_schedule(plan)
    directory = RunDirectory(plan.run_dir)
    if starts := count_earlier_starts(directory, began):
        plan = replace(plan, config=directory.config_for_restart(plan.config, starts))
    directory.check(plan.config)
    check_remaining_work(plan.config, directory)
    if plan.config.budget.is_set:
        check_budget(plan.config, plan.world.ranks, directory)
        hours, completed = device_hours(read_usage(directory)), directory.saved_step() or 0
        plan = warn_about_budget(plan, device_hours=hours, completed=completed)
    if (jump := schedule_warning(plan.config, directory)) is not None:
        plan = replace(plan, warnings=(*plan.warnings, jump))
    attempt = directory.begin(plan.config, to_json(plan), began=_start_time(overrides, launch))
    return AttemptSpec(to_yaml(plan.config), plan.world, attempt, restart=launch.phases), plan, directory


def _start_time(overrides: Sequence[str] | RunConfig, launch: Launch) -> float:
    """Return when this attempt began, in seconds since 1970."""
    if isinstance(overrides, RunConfig):
        return time.time()  # a program of the user may be older than its training
    return process_start_time() if launch.relay is None else launch.relay.began


def count_earlier_starts(directory: RunDirectory, began: float | None) -> int:
    """Return how many of the newest attempts were automatic starts of the same command.

    Under torchrun these are the attempts since its first agent ``began``: an agent itself only counts
    failures of its own node's ranks, and one that joined later may now have rank 0.
    """
    jobs = int(os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("JOBSET_RESTART") or 0)
    return jobs if began is None else jobs + directory.count_attempts_since(began)


def start_next_attempt(
    start: AttemptSpec, plan: RunPlan, directory: RunDirectory, starts: int
) -> AttemptSpec:
    """Open the next attempt of the same run, from the process that owns the run directory.

    Args:
        plan: the plan of the first attempt; another attempt differs only in ``resume``.
        starts: number of its attempts so far.

    Raises:
        UserError: the run directory or the budget no longer allows the run to continue.
    """
    from toolkit.config.compose import to_yaml
    from toolkit.estimate.plan_report import to_json
    from toolkit.rundir.budget import check_budget

    check_budget(plan.config, plan.world.ranks, directory)
    config = directory.config_for_restart(plan.config, starts)
    attempt = directory.begin(config, to_json(plan))
    return replace(start, yaml=to_yaml(config), attempt=attempt)


def load_config(overrides: Sequence[str] | RunConfig, launch: Launch) -> RunConfig:
    """Return the configuration: composed from ``overrides`` unless it is already, with the sizes of
    ``model.pretrained``; or read from ``--frozen=FILE``.

    A frozen configuration comes from a submitted job or an earlier attempt's ``config.yaml``. Nothing in it
    is resolved again, so it is the same on every node and at every start.

    Raises:
        UserError: the arguments or the file are wrong, or the run is meant for other machines.
    """
    from toolkit.config.compose import compose, from_yaml

    if isinstance(overrides, RunConfig):
        return resolve_from_files(overrides)
    frozen = [word for word in overrides if word.startswith(FROZEN)]
    if not frozen:
        config = resolve_from_files(compose(overrides))
        where = config.cluster.where
        if where is not ClusterBackend.local and launch.launcher is Launcher.NONE:
            raise ConfigError(
                Problem(
                    "cluster",
                    f"cluster={where.value}",
                    f"{command_line('train')} trains on the machine where it is started",
                    f"submit it: {command_line('submit')} with the same arguments (dry_run=true only shows "
                    "the job)",
                )
            )
        return config
    if len(overrides) > 1:
        others = " ".join(word for word in overrides if word != frozen[0])
        raise ConfigError(
            Problem(
                "--frozen",
                f"{frozen[0]} {others}",
                "a frozen configuration is complete and takes no further arguments",
                f"remove {others}, or remove --frozen and use the original arguments of the run",
            )
        )
    path = Path(frozen[0].removeprefix(FROZEN))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            Problem(
                "--frozen",
                frozen[0],
                f"the file must be readable ({error.strerror if isinstance(error, OSError) else error})",
                "use the config.yaml of a job (RUN_DIR/jobs/NNN) or of an attempt; every node needs the file",
            )
        ) from None
    return from_yaml(text)


def log_start(plan: RunPlan, attempt: int, launch: Launch) -> None:
    """Log the plan's warnings, the project of the user and the run directory."""
    if (project := find_project()) is not None:
        log.info("%s", project)
    for warning in (*plan.warnings, *find_unused_snapshots(plan, launch)):
        log.warning("%s", warning)
    world = plan.world
    size = f"{world.ranks} rank{'s' * (world.ranks > 1)} on {world.gpu or world.device}"
    log.info("run %s, attempt %d: %s", plan.run_dir, attempt, size)


def find_unused_snapshots(plan: RunPlan, launch: Launch) -> list[Problem]:
    """Warn that nothing will read snapshots in memory: what started the ranks does not restart them."""
    every, restarts = plan.config.checkpoint.memory_every, plan.config.cluster.restarts
    alone = launch.launcher is Launcher.NONE
    if not every or (alone and restarts > 0) or launcher_restarts_ranks(launch):
        return []
    where = "cluster.restarts=0" if alone else f"started by {launch.launcher} without restarts"
    return [
        Problem(
            "checkpoint.memory_every",
            f"checkpoint.memory_every={every}, {where}",
            "ranks continue from snapshots in memory if plain python (cluster.restarts > 0) or torchrun "
            "(--max-restarts > 0) restarts them; otherwise none are taken",
            "start with plain python or torchrun --max-restarts=3, or leave out checkpoint.memory_every",
            Severity.WARNING,
        )
    ]
