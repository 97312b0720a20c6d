"""A start, composed once: the user's words become a frozen message, and every rank makes the same plan of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.cluster.environment import Launch, Launcher, check_startable, detect_world
from toolkit.cluster.job import FROZEN
from toolkit.cluster.machine import Machine
from toolkit.cluster.stop import own_beginning
from toolkit.config.cluster import ClusterBackend
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, Problem, Severity
from toolkit.files import write_whole
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rundir.continuing import check_work, schedule_warning
from toolkit.rundir.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Start:
    """What the ranks must agree on: they get it through the store (under a launcher) or as a file (from our parent)."""

    yaml: str  # the whole configuration, nothing left to resolve
    world: World
    attempt: int
    data: str | None = None  # the folder of the generation of data that the run reads, once it is ready

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, path: Path) -> None:
        """For the ranks, which read it now and never again: it need not outlast them."""
        write_whole(path, json.dumps(self.to_json()), durable=False)

    @staticmethod
    def read(path: Path) -> Start:
        return Start.from_json(json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> Start:
        world = World(**{**message["world"], "device": Device(message["world"]["device"])})
        return Start(message["yaml"], world, message["attempt"], message["data"])

    def plan(self) -> RunPlan:
        from toolkit.config.compose import from_yaml
        from toolkit.plan import make_plan

        return make_plan(from_yaml(self.yaml), self.world)


def begin(overrides: Sequence[str], launch: Launch, machine: Machine) -> tuple[Start, RunPlan, RunDirectory]:
    """Compose, plan and open the next attempt in the run directory. Imports neither torch nor an engine.

    Raises:
        UserError: whatever is wrong with the configuration; then nothing has been written.
        NothingToDo: the steps that it asks for are done; then nothing has been written either.
    """
    from toolkit.config.compose import to_yaml
    from toolkit.plan import make_plan
    from toolkit.plan.present import to_json
    from toolkit.plan.target import check_target

    config = configuration(overrides, launch)
    check_startable(config.cluster, launch, machine)
    plan = make_plan(config, detect_world(config.cluster, launch, machine))
    check_target(plan.config.model)
    directory = RunDirectory(plan.run_dir)
    directory.check(plan.config)
    if starts := earlier_starts(launch, directory):
        plan = replace(plan, config=directory.continued(plan.config, starts))
    check_work(plan.config, directory)
    if (jump := schedule_warning(plan.config, directory)) is not None:
        plan = replace(plan, warnings=(*plan.warnings, jump))
    attempt = directory.begin(plan.config, to_json(plan), began=own_beginning())
    return Start(to_yaml(plan.config), plan.world, attempt), plan, directory


def earlier_starts(launch: Launch, directory: RunDirectory) -> int:
    """How many of the newest attempts were of this same command, which no person has started again.

    Under torchrun those that began in the life of its agent on this node: the agent's own count is of failures of this node's ranks.
    """
    jobs = int(os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("JOBSET_RESTART") or 0)
    if launch.launcher is not Launcher.TORCHELASTIC:
        return jobs
    import psutil

    return jobs + directory.begun_since(psutil.Process(os.getppid()).create_time())


def begin_again(start: Start, directory: RunDirectory, starts: int) -> Start:
    """The next attempt of the same start, by the process that has the run's directory.

    Args:
        starts: attempts that there were of it.

    Raises:
        UserError: the directory no longer lets the run continue.
    """
    from toolkit.config.compose import to_yaml
    from toolkit.plan.present import to_json

    plan = start.plan()
    config = directory.continued(plan.config, starts)
    attempt = directory.begin(config, to_json(plan))
    return replace(start, yaml=to_yaml(config), attempt=attempt)


def configuration(words: Sequence[str], launch: Launch) -> RunConfig:
    """What ``words`` describe, with the sizes of ``model.pretrained``; or, as it stands, what ``--frozen=FILE`` holds.

    A frozen configuration was composed where its job was submitted, or is an earlier attempt's ``config.yaml``: nothing of it is
    looked up again, so it means the same on every node and at every start.

    Raises:
        UserError: a mistake in the words or the file; or the run is meant for other machines, and nobody has started it there.
    """
    from toolkit.config.compose import compose, from_yaml
    from toolkit.plan.pretrained import resolve

    frozen = [word for word in words if word.startswith(FROZEN)]
    if not frozen:
        config = resolve(compose(words))
        where = config.cluster.where
        if where is not ClusterBackend.local and launch.launcher is Launcher.NONE:
            raise ConfigError(
                Problem(
                    "cluster",
                    f"cluster={where.value}",
                    "launch/train.py trains where it is started",
                    "hand it over: python launch/submit.py with the same words (dry_run=true only shows it)",
                )
            )
        return config
    if len(words) > 1:
        others = " ".join(word for word in words if word != frozen[0])
        raise ConfigError(
            Problem(
                "--frozen",
                f"{frozen[0]} {others}",
                "a frozen configuration is whole: nothing is composed with it",
                f"leave out {others}, or leave out --frozen and write the words that the run began with",
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
                f"the file can be read ({error.strerror if isinstance(error, OSError) else error})",
                "give the config.yaml of a job (RUN_DIR/jobs/NNN) or of an attempt; every node needs it",
            )
        ) from None
    return from_yaml(text)


def announce(plan: RunPlan, attempt: int, launch: Launch) -> None:
    """Print what a person sees first: warnings, and where the run is."""
    for warning in (*plan.warnings, *elastic_warnings(launch)):
        print(f"{warning.severity}: {warning}", file=sys.stderr)
    world = plan.world
    print(
        f"run {plan.run_dir}, attempt {attempt}: {world.ranks} rank{'s' * (world.ranks > 1)} on {world.gpu or world.device}"
    )


def elastic_warnings(launch: Launch) -> list[Problem]:
    """An agent that serves the ranks' store does not publish its address again when a node joins later (torch 2.13,
    ``DynamicRendezvousHandler.next_rendezvous``): both sides wait for a minute and end."""
    if not (launch.elastic and launch.agent_store):
        return []
    return [
        Problem(
            "torchrun --nnodes",
            "torchrun with a range of nodes serves the ranks' store itself",
            "then a run survives the loss of a node, and ends when the node comes back (PyTorch 2.13)",
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node before torchrun",
            Severity.WARNING,
        )
    ]
