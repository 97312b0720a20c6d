"""Detect the launcher of this process and the world it belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toolkit.cluster.world.machine_info import MachineInfo, detect_machine
from toolkit.cluster.world.node_range import NodeRange, parse_node_range
from toolkit.commands import command_line
from toolkit.config.cluster import ClusterConfig
from toolkit.errors import ConfigError, Problem
from toolkit.plan.devices import normalise_gpu_name
from toolkit.plan.types import Device, World
from toolkit.restart_phases import RestartPhases

HANDOVER = "--handover="  # option with which the supervisor passes each rank its attempt spec as a file


class Launcher(StrEnum):
    NONE = "none"  # plain python
    SUPERVISOR = "parent"  # the supervisor process: cluster/supervisor.py
    DEEPSPEED = "deepspeed"
    TORCHELASTIC = "torchrun"
    OTHER = "other"  # anything else that sets torch's environment variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The worker of torchrun's agent whose place a standby has taken: cluster/standbys/relay.py.

    Attributes:
        agent: PID of the agent.
        began: when it was started, in seconds since 1970.
    """

    pid: int
    agent: int
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's position among the processes that were launched together."""

    launcher: Launcher = Launcher.NONE
    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    ranks_per_node: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    agent_store: bool = False  # the launcher serves the store at address:port
    restart: int = 0  # restarts by this node's launcher so far
    restarts_left: int = 0
    # of torchrun --nnodes=MIN:MAX, which restarts the ranks when a node joins
    node_range: NodeRange | None = None
    handover: Path | None = None
    relay: Relay | None = None  # between the agent and this process, if this was a standby of torchrun
    phases: RestartPhases | None = None  # of the restart that torchrun began, if its standbys saw it

    @property
    def launcher_pid(self) -> int:
        """PID of the process that started this rank, or the one whose place it took."""
        return os.getppid() if self.relay is None else self.relay.agent

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node


def read_launch(
    environ: Mapping[str, str],
    arguments: Sequence[str],
    *,
    relay: Relay | None = None,
    phases: RestartPhases | None = None,
) -> tuple[Launch, list[str]]:
    """Read the launch from the environment and return it with the remaining command-line arguments.

    ``deepspeed`` inserts ``--local_rank=N`` before the user's arguments; Hydra would reject it, so it is
    removed.

    Raises:
        ConfigError: only some of torch's variables are set, or one is not a number.
    """
    handover: Path | None = None
    local_rank: str | None = None
    rest: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            local_rank = value
        elif argument.startswith(HANDOVER):
            handover = Path(value)
        else:
            rest.append(argument)
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Launch(), rest
    ranks, rank = _read_number(environ, "WORLD_SIZE"), _read_number(environ, "RANK")
    # torchrun sets LOCAL_WORLD_SIZE, deepspeed sets LOCAL_SIZE.
    per_node = next(
        (_read_number(environ, name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), ranks
    )
    if handover is not None:
        launcher = Launcher.SUPERVISOR
    elif "TORCHELASTIC_RUN_ID" in environ:
        launcher = Launcher.TORCHELASTIC
    elif local_rank is not None or "CROSS_RANK" in environ:
        launcher = Launcher.DEEPSPEED
    else:
        launcher = Launcher.OTHER
    return Launch(
        launcher=launcher,
        rank=rank,
        local_rank=_read_number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank % per_node,
        ranks=ranks,
        ranks_per_node=per_node,
        address=_read_text(environ, "MASTER_ADDR"),
        port=_read_number(environ, "MASTER_PORT"),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=(restart := int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))),
        restarts_left=int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - restart,
        node_range=parse_node_range(
            environ, agent_command_line(os.getppid() if relay is None else relay.agent)
        )
        if launcher is Launcher.TORCHELASTIC
        else None,
        handover=handover,
        relay=relay,
        phases=phases,
    ), rest


def detect_world(cluster: ClusterConfig, launch: Launch, machine: MachineInfo | None = None) -> World:
    """Return the world of this run: from the launcher, else from ``cluster.*``, else from this machine.

    A world described by ``cluster.*`` may be elsewhere (``launch/plan.py`` plans for it);
    :func:`check_startable` rejects it.

    Raises:
        ConfigError: the launcher started a world that contradicts ``cluster.*``.
    """
    machine = machine or detect_machine()
    if launch.launcher is Launcher.NONE:
        gpus = len(machine.gpus) if cluster.gpus_per_node is None else cluster.gpus_per_node
        per_node = gpus or cluster.cpu_ranks
        ranks = per_node * (cluster.nodes or 1)
        here = not _find_mismatches(cluster, machine)
    else:
        _check_launched(cluster, launch, machine)
        gpus = 0 if cluster.gpus_per_node == 0 else len(machine.gpus)
        per_node, ranks = launch.ranks_per_node, launch.ranks
        here = True
    own_gpu = here or cluster.gpu is None or normalise_gpu_name(cluster.gpu) == _gpu_kind(machine)
    return World(
        ranks=ranks,
        ranks_per_node=per_node,
        device=Device.CUDA if gpus else Device.CPU,
        gpu=(cluster.gpu or _gpu_kind(machine)) if gpus else None,
        device_memory_bytes=_smallest_gpu_memory(machine) if gpus and own_gpu else None,
        # For other machines, assume that libaio and compilers exist; this is checked when the run starts
        # there.
        host_memory_bytes=machine.host_memory_bytes if here else None,
        has_libaio=machine.has_libaio or not here,
        has_compiler=machine.has_compiler or not here,
        lacking_for_compile=machine.lacking_for_compile if here else (),
        has_nvcc=machine.has_nvcc or not here,
        nvcc=machine.nvcc if here else None,
        torch_cuda=machine.torch_cuda,
        # Nodes of a cluster usually share the Python environment with the machine that plans.
        transformer_engine=(None if here else cluster.transformer_engine) or machine.transformer_engine,
    )


def check_startable(cluster: ClusterConfig, launch: Launch, machine: MachineInfo | None = None) -> None:
    """Reject a run that can only be planned on this machine.

    Raises:
        ConfigError: ``cluster.*`` describes other machines, or the installed torch cannot use the GPUs.
    """
    machine = machine or detect_machine()
    if launch.launcher is Launcher.NONE:
        problems = _find_mismatches(cluster, machine)
        if problems:
            raise ConfigError(*problems)
    if machine.gpus and cluster.gpus_per_node != 0 and not machine.torch_has_cuda:
        raise ConfigError(
            Problem(
                "cluster.gpus_per_node",
                f"{len(machine.gpus)} GPUs, but torch was built without CUDA",
                "training on GPUs needs a CUDA build of torch",
                "install a CUDA build of torch, or set cluster.gpus_per_node=0 to train on the CPU",
            )
        )


def _check_launched(cluster: ClusterConfig, launch: Launch, machine: MachineInfo) -> None:
    on_gpus = bool(machine.gpus) and cluster.gpus_per_node != 0
    started = f"{launch.launcher} started {launch.ranks} ranks, {launch.ranks_per_node} per node"
    written: list[tuple[str, object, object]] = []
    if launch.node_range is None or cluster.nodes not in launch.node_range:
        written.append(("nodes", cluster.nodes, launch.nodes))
    if cluster.gpus_per_node != 0:
        written.append(("gpus_per_node", cluster.gpus_per_node, launch.ranks_per_node))
    if not on_gpus and cluster.cpu_ranks != 1:  # 1 is the default and may not have been set by the user
        written.append(("cpu_ranks", cluster.cpu_ranks, launch.ranks_per_node))
    kind = _gpu_kind(machine)
    if on_gpus and kind is not None:
        written.append(("gpu", cluster.gpu, kind))
    problems = [
        Problem(
            f"cluster.{name}",
            f"cluster.{name}={value}, but {started}" + (f" on {kind}" if name == "gpu" else ""),
            "under a launcher, the world is the one it started",
            f"remove cluster.{name}, or start {value} with the launcher's options",
        )
        for name, value, real in written
        if value is not None
        and value != real
        and not (name == "gpu" and normalise_gpu_name(str(value)) == real)
    ]
    problems += _find_other_transformer_engine(cluster, machine)
    if cluster.gpus_per_node and not machine.gpus:
        problems.append(_too_few_gpus(cluster.gpus_per_node))
    elif on_gpus and launch.local_rank >= len(machine.gpus):
        problems.append(
            Problem(
                "cluster.gpus_per_node",
                f"{launch.ranks_per_node} ranks on a node with {len(machine.gpus)} visible GPUs",
                "each rank needs its own GPU",
                f"start {len(machine.gpus)} ranks per node, or set cluster.gpus_per_node=0 to train on "
                "the CPU",
            )
        )
    if problems:
        raise ConfigError(*problems)


def _find_mismatches(cluster: ClusterConfig, machine: MachineInfo) -> list[Problem]:
    """Return the differences between the machines described by ``cluster.*`` and this one."""
    problems = []
    if (cluster.nodes or 1) > 1:
        problems.append(
            Problem(
                "cluster.nodes",
                f"cluster.nodes={cluster.nodes}",
                "plain python starts ranks on this machine only",
                "start with torchrun or deepspeed on every node, or plan for these machines with "
                f"{command_line('plan')}",
            )
        )
    if cluster.gpus_per_node and len(machine.gpus) < cluster.gpus_per_node:
        problems.append(_too_few_gpus(cluster.gpus_per_node, len(machine.gpus)))
    if cluster.gpu is not None:
        on_gpus = bool(machine.gpus) and cluster.gpus_per_node != 0
        here = _gpu_kind(machine) if on_gpus else None
        if not on_gpus or (
            here is not None and normalise_gpu_name(cluster.gpu) != here
        ):  # the name of an unknown GPU cannot be compared
            problems.append(
                Problem(
                    "cluster.gpu",
                    f"cluster.gpu={cluster.gpu}",
                    f"this machine has {here or 'no GPU in use'}",
                    f"remove cluster.gpu, or plan for this GPU with {command_line('plan')}",
                )
            )
    return problems + _find_other_transformer_engine(cluster, machine)


def _find_other_transformer_engine(cluster: ClusterConfig, machine: MachineInfo) -> list[Problem]:
    named, installed = cluster.transformer_engine, machine.transformer_engine
    if named is None or named == installed:
        return []
    return [
        Problem(
            "cluster.transformer_engine",
            f"cluster.transformer_engine={named}",
            f"this machine has {installed or 'no Transformer Engine'}",
            f"remove cluster.transformer_engine, or plan for these machines with {command_line('plan')}",
        )
    ]


def _too_few_gpus(wanted: int, here: int = 0) -> Problem:
    return Problem(
        "cluster.gpus_per_node",
        f"cluster.gpus_per_node={wanted}",
        f"this process sees {here} GPUs",
        "remove cluster.gpus_per_node, set it to 0 to train on the CPU, or plan for these GPUs with "
        f"{command_line('plan')}",
    )


def _gpu_kind(machine: MachineInfo) -> str | None:
    """Return the GPU model; None if there is no GPU, it is unknown, or models differ."""
    kinds = {normalise_gpu_name(gpu.product) for gpu in machine.gpus}
    return kinds.pop() if len(kinds) == 1 else None


def _smallest_gpu_memory(machine: MachineInfo) -> int | None:
    """Return the memory of the smallest GPU, since every rank holds an equal share."""
    sizes = [gpu.memory_bytes for gpu in machine.gpus]
    return min((size for size in sizes if size is not None), default=None) if None not in sizes else None


def agent_command_line(pid: int) -> list[str]:
    """Return the command line of torchrun's agent."""
    import psutil

    return psutil.Process(pid).cmdline()


def _read_text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        present = ", ".join(
            sorted(
                key
                for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
                if environ.get(key)
            )
        )
        raise ConfigError(
            Problem(
                name,
                f"{present} in the environment without {name}",
                "a launcher sets all of torch's variables or none",
                f"start with deepspeed or torchrun; for plain python: unset {present.replace(',', '')}",
            )
        )
    return value


def _read_number(environ: Mapping[str, str], name: str) -> int:
    value = _read_text(environ, name)
    if not value.isdigit():
        seen = f"{name}={value} in the environment"
        raise ConfigError(
            Problem(name, seen, f"{name} must be a whole number", "start with deepspeed or torchrun")
        )
    return int(value)
