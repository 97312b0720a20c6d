"""One distributed job as seen from outside its ranks: a frozen configuration, its planned machines and a
backend.

    plan = plan_job(compose(overrides))              for machines that may be elsewhere
    job = create_job(plan, script)                   its files are in <run.dir>/jobs/NNN
    backends.get_backend(where).render(job)          what would be submitted: file name -> text (pure)
    submission.submit(job)                           creates the folder, writes the files and submits the job

Every backend starts ``launch/train.py --frozen=FILE``. Nothing is composed again, so the configuration of a
run is the same on all backends except for ``cluster`` and ``run.dir``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from toolkit.cluster.world.environment import Launch, detect_world
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.cluster.world.node_range import check_job_node_range
from toolkit.commands import python_arguments
from toolkit.config.cluster import ClusterBackend, ClusterConfig
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, Problem
from toolkit.files import write_whole
from toolkit.plan.devices import normalise_gpu_name
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import Device, RunPlan, World
from toolkit.rundir.excluded_hosts import read_excluded_hosts

log = logging.getLogger(__name__)

FROZEN = "--frozen="  # option of launch/train.py: read the whole configuration from a file
CONFIG_FILE = "config.yaml"
RECORD_FILE = "job.json"  # written after submission: submission.py


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A distributed training job.

    Attributes:
        name: shown to users and in job lists.
        run_dir: the run directory as seen by the nodes; equals ``config.run.dir``.
        number: index among this run's jobs, from 1.
        config: resolved, with ``run.dir`` set.
        world: the machines it is planned for.
        script: path of launch/train.py on the nodes, or the module toolkit.launch.train.
        excluded_hosts: hosts that the run has excluded itself: rundir/excluded_hosts.py.
    """

    name: str
    run_dir: str
    number: int
    config: RunConfig
    world: World
    script: str
    excluded_hosts: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the job's files and of the backend's output."""
        return jobs_folder(Path(self.run_dir)) / f"{self.number:03d}"

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG_FILE

    @property
    def yaml(self) -> str:
        """The frozen configuration, which ``--frozen`` reads."""
        from toolkit.config.compose import to_yaml

        return to_yaml(self.config)

    def command(self, config_file: str | None = None) -> tuple[str, ...]:
        """Return the script or module and its argument, without interpreter or launcher.

        Args:
            config_file: path of the frozen configuration on the nodes; None: in the job's folder.
        """
        return (*python_arguments(self.script), f"{FROZEN}{config_file or self.config_file}")


class JobState(StrEnum):
    """State of a job in its backend. The state of the run itself is only in <run.dir>/status.json."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"  # or unknown to the backend, which forgets jobs after some time


@dataclass(frozen=True, slots=True)
class JobId:
    where: ClusterBackend
    id: str  # in the form that the backend's commands accept


class Backend(Protocol):
    """Interface for submitting jobs; each module of ``cluster/jobs/backends`` implements it."""

    def render(self, job: TrainingJob) -> Mapping[str, str]:
        """Return the files of the job's folder by name, including ``config.yaml``. Pure.

        Raises:
            ConfigError: the backend cannot run this job; nothing has been written.
        """

    def argv(self, job: TrainingJob) -> Sequence[str]:
        """Return the command that submits the job once its files are written."""

    def submit(self, job: TrainingJob) -> JobId:
        """Submit the job, whose files are written. Raises InputError with the backend's message if it is
        rejected.
        """

    def state(self, id: JobId) -> JobState:
        """Return the job's state. Raises InputError if the backend does not respond."""

    def cancel(self, id: JobId) -> None:
        """Withdraw a waiting job; make a running one save and end without a restart."""


def resolve_world(cluster: ClusterConfig, machine: MachineInfo | None = None) -> World:
    """Return the world of a future job: this machine for cluster=local, else the one described by
    ``cluster.*``.

    Raises:
        ConfigError: it is not described.
    """
    if cluster.where is ClusterBackend.local:
        return detect_world(cluster, Launch(), machine)
    if cluster.gpus_per_node is None:
        raise ConfigError(
            Problem(
                "cluster.gpus_per_node",
                f"cluster={cluster.where.value} without cluster.gpus_per_node",
                "a job for other machines needs their number of GPUs",
                "set cluster.gpus_per_node=8, or 0 to train on the CPU with cluster.cpu_ranks ranks per node",
            )
        )
    per_node = cluster.gpus_per_node or cluster.cpu_ranks
    on_gpus = cluster.gpus_per_node > 0
    return World(
        ranks=per_node * (cluster.nodes or 1),
        ranks_per_node=per_node,
        device=Device.CUDA if on_gpus else Device.CPU,
        gpu=(normalise_gpu_name(cluster.gpu) or cluster.gpu) if on_gpus and cluster.gpu is not None else None,
        # Other properties of the nodes are detected when the job starts there.
        has_libaio=True,
        has_compiler=True,
        has_nvcc=True,
        torch_cuda=machine.torch_cuda if machine is not None else None,
        transformer_engine=cluster.transformer_engine or (machine.transformer_engine if machine else None),
    )


def resolve_from_files(config: RunConfig) -> RunConfig:
    """Fill what the plan needs to know from files: the sizes of ``model.pretrained``, the steps of
    ``train.epochs``.

    Raises:
        UserError: a file is absent or does not fit the configuration.
    """
    from toolkit.plan.pretrained import resolve
    from toolkit.plan.train_steps import resolve_epochs

    config = resolve(config)
    if config.train.epochs is None:
        return config
    from toolkit.data.size import samples_per_epoch

    samples = samples_per_epoch(config)
    resolved = resolve_epochs(config, samples)
    log.info("train.epochs=%g of %d samples: %d steps", config.train.epochs, samples, resolved.train.steps)
    return resolved


def plan_job(
    config: RunConfig,
    machine: MachineInfo | None = None,
    trace: Callable[[RunPlan], ModuleTrace | NotTraced] | None = None,
) -> RunPlan:
    """Plan a composed configuration for the machines that ``cluster`` names. Reads the sizes of
    ``model.pretrained``, and of the data for ``train.epochs``.

    Args:
        trace: traces a model without a family (toolkit/train/trace.py), which takes some seconds and runs
            the user's code; None: its memory and FLOPs stay unknown.

    Raises:
        UserError: with every problem found.
    """
    from toolkit.plan import make_plan

    config = resolve_from_files(config)
    world = resolve_world(config.cluster, machine)
    plan = make_plan(config, world)
    check_job_node_range(config, world)
    if trace is None or plan.shape is not None:
        return plan
    return make_plan(config, world, trace(plan))


def create_job(
    plan: RunPlan, script: str | Path, *, name: str | None = None, here: Path | None = None
) -> TrainingJob:
    """Create the job for ``plan``, with the next free number.

    ``run.dir`` is written into its configuration as an absolute path, unless the job runs in containers,
    which have their own file system; so the job uses the same directory wherever it starts.

    Args:
        script: path of launch/train.py on the nodes, or the module toolkit.launch.train.
        name: None: the name of the run directory.
        here: base of relative paths; None: the working directory.

    Raises:
        ConfigError: the name or path contains characters that job lists cannot show.
        InputError: the run's list of excluded hosts is not valid.
    """
    run_dir = plan.run_dir
    if plan.config.cluster.where is not ClusterBackend.kubernetes:
        run_dir = str((here or Path.cwd()) / run_dir)
    name = name or Path(run_dir).name
    for key, text in (("run.name", name), ("run.dir", run_dir)):
        if not text.isprintable():
            raise ConfigError(
                Problem(
                    key,
                    f"{key}={text!r}",
                    "names and folders of jobs must be one line of printable characters",
                    f"set {key} without line breaks, tabs and control characters",
                )
            )
    config = replace(plan.config, run=replace(plan.config.run, dir=run_dir))
    return TrainingJob(
        name=name,
        run_dir=run_dir,
        number=next_job_number(Path(run_dir)),
        config=config,
        world=plan.world,
        script=str(script),
        excluded_hosts=tuple(entry.host for entry in read_excluded_hosts(Path(run_dir))),
    )


def jobs_folder(run_dir: Path) -> Path:
    return run_dir / "jobs"


def list_job_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of the run's jobs so far, sorted."""
    folder = jobs_folder(run_dir)
    return (
        sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
        if folder.is_dir()
        else []
    )


def next_job_number(run_dir: Path) -> int:
    return max(list_job_numbers(run_dir), default=0) + 1


def create_job_folder(job: TrainingJob) -> TrainingJob:
    """Create the job's folder; return ``job`` with a higher number if another process has taken its folder.

    Raises:
        InputError: the folder cannot be created.
    """
    while True:
        try:
            with convert_write_errors(Path(job.run_dir)):
                job.folder.mkdir(parents=True)
        except FileExistsError:
            job = replace(job, number=max(job.number, next_job_number(Path(job.run_dir)) - 1) + 1)
        else:
            return job


@contextmanager
def convert_write_errors(run_dir: Path) -> Iterator[None]:
    """Convert errors of writing below ``run_dir`` to InputError; FileExistsError passes through."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(
            Problem(
                "run.dir",
                f"run.dir={run_dir}: {error.strerror}",
                "the submitting machine must be able to write the job's files into the run directory",
                "set run.dir=FOLDER to a folder that is writable here and visible on the nodes",
            )
        ) from None


def write_files(job: TrainingJob, files: Mapping[str, str]) -> None:
    """Write the rendered files into the job's folder, each one atomically."""
    for name, text in files.items():
        write_whole(job.folder / name, text)
