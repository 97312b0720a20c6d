"""One distributed job, outside its ranks: a frozen configuration, the machines it is planned for, and where it is carried out.

    plan = plan_job(compose(words))               decided here, for machines that need not be here
    job = make_job(plan, script)                  its files are <run.dir>/jobs/NNN
    backends.of(job).render(job)                  what would be submitted: file name -> text (pure)
    submission.submit(job)                        takes the folder, writes the files, and hands the job over

Every backend starts the same words, ``launch/train.py --frozen=FILE``: nothing is composed again, so a run's configuration is the
same on all of them but for ``cluster`` and ``run.dir``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from toolkit.cluster.environment import Launch, detect_world
from toolkit.cluster.machine import Machine
from toolkit.config.cluster import ClusterBackend, ClusterConfig
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, Problem
from toolkit.files import write_whole
from toolkit.plan.devices import normalise_gpu_name
from toolkit.plan.types import Device, RunPlan, World

FROZEN = "--frozen="  # launch/train.py takes a whole configuration from a file
CONFIG_FILE = "config.yaml"
RECORD_FILE = "job.json"  # once it was handed over: submission.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """
    Attributes:
        name: for people and for lists of jobs.
        run_dir: the run's directory as the nodes know it; the same as ``config.run.dir``.
        number: of this run's jobs, from 1.
        config: resolved, with ``run.dir`` written.
        world: the machines it is planned for.
        script: launch/train.py as the nodes know it.
    """

    name: str
    run_dir: str
    number: int
    config: RunConfig
    world: World
    script: str

    @property
    def folder(self) -> Path:
        """The job's own files, and what the backend records of it."""
        return jobs_folder(Path(self.run_dir)) / f"{self.number:03d}"

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG_FILE

    @property
    def yaml(self) -> str:
        """The frozen configuration: what ``--frozen`` reads."""
        from toolkit.config.compose import to_yaml

        return to_yaml(self.config)

    def command(self, config_file: str | None = None) -> tuple[str, ...]:
        """The script and its word, without interpreter or launcher.

        Args:
            config_file: where the nodes find the frozen configuration; None: in the job's folder.
        """
        return (self.script, f"{FROZEN}{config_file or self.config_file}")


class JobState(StrEnum):
    """Where a job stands with its backend. How the run fared is in <run.dir>/status.json alone."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"  # or unknown to the backend, which forgets jobs after some time


@dataclass(frozen=True, slots=True)
class JobId:
    where: ClusterBackend
    id: str  # as the backend's own commands take it


class Backend(Protocol):
    """One way to carry out a job; a module of ``cluster/backends`` is one."""

    def render(self, job: Job) -> Mapping[str, str]:
        """The files of the job's folder, by name; with ``config.yaml``. Pure.

        Raises:
            ConfigError: what this backend cannot carry out, before anything is written.
        """

    def argv(self, job: Job) -> Sequence[str]:
        """The command that hands the job over, once its files are written."""

    def submit(self, job: Job) -> JobId:
        """Hand it over. Its files are written. Raises InputError with the backend's own words where it is not accepted."""

    def state(self, id: JobId) -> JobState:
        """Raises InputError where the backend does not answer."""

    def cancel(self, id: JobId) -> None:
        """A waiting job is withdrawn; a running one saves and ends, and is not started again."""


def planned_world(cluster: ClusterConfig, machine: Machine | None = None) -> World:
    """The world that a job will have: here for cluster=local, else as ``cluster.*`` describes it, since the nodes are not here.

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
                "a job for other machines says how many GPUs each of them has",
                "write cluster.gpus_per_node=8, or 0 to train on the CPU with cluster.cpu_ranks ranks a node",
            )
        )
    per_node = cluster.gpus_per_node or cluster.cpu_ranks
    on_gpus = cluster.gpus_per_node > 0
    return World(
        ranks=per_node * (cluster.nodes or 1),
        ranks_per_node=per_node,
        device=Device.CUDA if on_gpus else Device.CPU,
        gpu=(normalise_gpu_name(cluster.gpu) or cluster.gpu) if on_gpus and cluster.gpu is not None else None,
        # What the nodes have besides is found when the job starts there.
        has_libaio=True,
        has_compiler=True,
    )


def plan_job(config: RunConfig, machine: Machine | None = None) -> RunPlan:
    """The plan of a composed configuration on the machines that ``cluster`` names. Reads the sizes of ``model.pretrained``.

    Raises:
        UserError: with every problem found.
    """
    from toolkit.plan import make_plan
    from toolkit.plan.pretrained import resolve

    config = resolve(config)
    return make_plan(config, planned_world(config.cluster, machine))


def make_job(plan: RunPlan, script: str | Path, *, name: str | None = None, here: Path | None = None) -> Job:
    """The job that carries out ``plan``, with the number that is free now.

    ``run.dir`` is written into its configuration. It is absolute unless the job runs in containers, which have folders of their
    own: wherever the job starts, it is the same one.

    Args:
        script: launch/train.py as the nodes know it.
        name: None: the name of the run's directory.
        here: what relative paths begin at; None: the working folder.

    Raises:
        ConfigError: a name or path that no list of jobs can show.
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
                    "names and folders of jobs are one line of printable characters",
                    f"write {key} without line ends, tabs and control characters",
                )
            )
    config = replace(plan.config, run=replace(plan.config.run, dir=run_dir))
    return Job(
        name=name,
        run_dir=run_dir,
        number=next_number(Path(run_dir)),
        config=config,
        world=plan.world,
        script=str(script),
    )


def jobs_folder(run_dir: Path) -> Path:
    return run_dir / "jobs"


def numbers(run_dir: Path) -> list[int]:
    """The jobs of a run so far, in order."""
    folder = jobs_folder(run_dir)
    return (
        sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
        if folder.is_dir()
        else []
    )


def next_number(run_dir: Path) -> int:
    return max(numbers(run_dir), default=0) + 1


def take_folder(job: Job) -> Job:
    """``job`` with a folder that no other process has: its number grows where somebody was faster.

    Raises:
        InputError: the folder cannot be made here.
    """
    while True:
        try:
            with writable(Path(job.run_dir)):
                job.folder.mkdir(parents=True)
        except FileExistsError:
            job = replace(job, number=max(job.number, next_number(Path(job.run_dir)) - 1) + 1)
        else:
            return job


@contextmanager
def writable(run_dir: Path) -> Iterator[None]:
    """Around making something below ``run_dir``. Raises InputError where that cannot be; FileExistsError as it is."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(
            Problem(
                "run.dir",
                f"run.dir={run_dir}: {error.strerror}",
                "a job's files are written below the run's directory, from where it is submitted",
                "write run.dir=FOLDER, one that can be written here and that the nodes have too",
            )
        ) from None


def write_files(job: Job, files: Mapping[str, str]) -> None:
    """The rendered files, each whole, into the job's folder."""
    for name, text in files.items():
        write_whole(job.folder / name, text)
