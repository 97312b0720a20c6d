"""Who started this process, and the world it is part of."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toolkit.cluster.interface import interface_to
from toolkit.cluster.machine import Machine, this_machine
from toolkit.config.cluster import ClusterConfig
from toolkit.config.schema import EngineName
from toolkit.errors import ConfigError, Problem
from toolkit.plan.devices import normalise_gpu_name
from toolkit.plan.types import Device, RunPlan, World

HANDOVER = "--handover="  # our parent gives each rank the frozen start as a file


class Launcher(StrEnum):
    NONE = "none"  # a person, or a script: plain python
    PARENT = "parent"  # our own parent process: cluster/parent.py
    DEEPSPEED = "deepspeed"
    TORCHELASTIC = "torchrun"
    OTHER = "other"  # anything that sets torch's variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process among those that were started together."""

    launcher: Launcher = Launcher.NONE
    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    ranks_per_node: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    agent_store: bool = False  # the launcher itself serves the store at address:port
    restart: int = (
        0  # how often the launcher of this node has answered a failure of its ranks by another start
    )
    restarts_left: int = 0
    elastic: bool = False  # torchrun restarts the ranks whenever a node joins (--nnodes=MIN:MAX)
    handover: Path | None = None

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node


def read_launch(environ: Mapping[str, str], arguments: Sequence[str]) -> tuple[Launch, list[str]]:
    """The launch, and the arguments that are left for the configuration.

    ``deepspeed`` inserts ``--local_rank=N`` before what the user typed, which Hydra would refuse.

    Raises:
        ConfigError: torch's variables are there in part only, or are no numbers.
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
    ranks, rank = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
    # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE.
    per_node = next(
        (_number(environ, name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), ranks
    )
    if handover is not None:
        launcher = Launcher.PARENT
    elif "TORCHELASTIC_RUN_ID" in environ:
        launcher = Launcher.TORCHELASTIC
    elif local_rank is not None or "CROSS_RANK" in environ:
        launcher = Launcher.DEEPSPEED
    else:
        launcher = Launcher.OTHER
    return Launch(
        launcher=launcher,
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank % per_node,
        ranks=ranks,
        ranks_per_node=per_node,
        address=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT"),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=(restart := int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))),
        restarts_left=int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - restart,
        elastic=launcher is Launcher.TORCHELASTIC and is_elastic(environ, _agent_words()),
        handover=handover,
    ), rest


def detect_world(cluster: ClusterConfig, launch: Launch, machine: Machine | None = None) -> World:
    """The world of this run: what a launcher started, else what is described by ``cluster.*``, else this machine.

    A described world need not be here (``launch/plan.py`` plans for it); :func:`check_startable` refuses to start it.

    Raises:
        ConfigError: a launcher started something else than ``cluster.*`` says.
    """
    machine = machine or this_machine()
    if launch.launcher is Launcher.NONE:
        gpus = len(machine.gpus) if cluster.gpus_per_node is None else cluster.gpus_per_node
        per_node = gpus or cluster.cpu_ranks
        ranks = per_node * (cluster.nodes or 1)
        here = not _differences(cluster, machine)
    else:
        _check_launched(cluster, launch, machine)
        gpus = 0 if cluster.gpus_per_node == 0 else len(machine.gpus)
        per_node, ranks = launch.ranks_per_node, launch.ranks
        here = True
    own_gpu = here or cluster.gpu is None or normalise_gpu_name(cluster.gpu) == _kind(machine)
    return World(
        ranks=ranks,
        ranks_per_node=per_node,
        device=Device.CUDA if gpus else Device.CPU,
        gpu=(cluster.gpu or _kind(machine)) if gpus else None,
        device_memory_bytes=_memory(machine) if gpus and own_gpu else None,
        # Elsewhere, what a machine has besides its GPUs is its owner's to know; starting there checks it.
        host_memory_bytes=machine.host_memory_bytes if here else None,
        has_libaio=machine.has_libaio or not here,
        has_compiler=machine.has_compiler or not here,
    )


def check_startable(cluster: ClusterConfig, launch: Launch, machine: Machine | None = None) -> None:
    """Refuse to start what can only be planned here.

    Raises:
        ConfigError: the described machines are not this one, or the installed torch cannot use its GPUs.
    """
    machine = machine or this_machine()
    if launch.launcher is Launcher.NONE:
        problems = _differences(cluster, machine)
        if problems:
            raise ConfigError(*problems)
    if machine.gpus and cluster.gpus_per_node != 0 and not machine.torch_has_cuda:
        raise ConfigError(
            Problem(
                "cluster.gpus_per_node",
                f"{len(machine.gpus)} GPUs and a torch built without CUDA",
                "training on GPUs needs a torch that was built for them",
                "install a CUDA build of torch, or write cluster.gpus_per_node=0 to train on the CPU",
            )
        )


def set_defaults(
    environ: MutableMapping[str, str], launch: Launch, world: World, machine: Machine, threads: int | None
) -> None:
    """Settings that libraries read when they are imported, so this comes before torch. What the user set stays.

    Args:
        threads: ``debug.threads``; None: the machine's cores shared by its ranks.
    """
    set_thread_default(environ, world.ranks_per_node, machine.cores, threads)
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and a later fork would deadlock
    if world.device is Device.CPU:
        environ.setdefault(
            "TORCHDYNAMO_DISABLE", "1"
        )  # compiling optimizer helpers takes up to 10 s and gains nothing
        environ.setdefault("DS_ACCELERATOR", "cpu")
        if machine.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = (
                ""  # cluster.gpus_per_node=0 was written: no library may take them
            )
    elif "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # the older name, which PyTorch still reads
        environ.setdefault(
            "TORCH_FR_BUFFER_SIZE", "2000"
        )  # collectives that PyTorch remembers of each rank, for the report of a hang
    if world.nodes == 1:
        environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # else gloo looks up the host's name, which need not resolve
    elif (interface := interface_to(launch.address)) is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Libraries that were written for launchers look for these, also where one process runs alone.
    for name, value in (
        ("RANK", launch.rank),
        ("LOCAL_RANK", launch.local_rank),
        ("WORLD_SIZE", world.ranks),
        ("LOCAL_WORLD_SIZE", world.ranks_per_node),
        ("LOCAL_SIZE", world.ranks_per_node),
        ("MASTER_ADDR", launch.address),
        ("MASTER_PORT", launch.port),
    ):
        environ.setdefault(name, str(value))


def set_cuda_defaults(environ: MutableMapping[str, str], plan: RunPlan) -> None:
    """Set what CUDA reads when the process first uses a GPU, unless the user has set it.

    With tensor parallelism Megatron-core overlaps collectives with matrix multiplications, and relies on a single
    hardware queue to start the collective first (``megatron/core/tensor_parallel/layers.py``).
    """
    if (
        plan.world.device is Device.CUDA
        and plan.config.engine.name is EngineName.megatron
        and plan.axes.tensor > 1
    ):
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_thread_default(
    environ: MutableMapping[str, str], ranks_per_node: int, cores: int, threads: int | None = None
) -> None:
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_per_node)))


def _check_launched(cluster: ClusterConfig, launch: Launch, machine: Machine) -> None:
    on_gpus = bool(machine.gpus) and cluster.gpus_per_node != 0
    started = f"{launch.launcher} started {launch.ranks} ranks, {launch.ranks_per_node} a node"
    written: list[tuple[str, object, object]] = [("nodes", cluster.nodes, launch.nodes)]
    if cluster.gpus_per_node != 0:
        written.append(("gpus_per_node", cluster.gpus_per_node, launch.ranks_per_node))
    if not on_gpus and cluster.cpu_ranks != 1:  # 1 is the default: nobody need have written it
        written.append(("cpu_ranks", cluster.cpu_ranks, launch.ranks_per_node))
    kind = _kind(machine)
    if on_gpus and kind is not None:
        written.append(("gpu", cluster.gpu, kind))
    problems = [
        Problem(
            f"cluster.{name}",
            f"cluster.{name}={value}, but {started}" + (f" on {kind}" if name == "gpu" else ""),
            "under a launcher, the world is what it started",
            f"leave out cluster.{name}, or start {value} with the launcher's options",
        )
        for name, value, real in written
        if value is not None
        and value != real
        and not (name == "gpu" and normalise_gpu_name(str(value)) == real)
    ]
    if cluster.gpus_per_node and not machine.gpus:
        problems.append(_no_gpus(cluster.gpus_per_node))
    elif on_gpus and launch.local_rank >= len(machine.gpus):
        problems.append(
            Problem(
                "cluster.gpus_per_node",
                f"{launch.ranks_per_node} ranks on a node with {len(machine.gpus)} visible GPUs",
                "each rank has a GPU of its own",
                f"start {len(machine.gpus)} ranks a node, or write cluster.gpus_per_node=0 to train on the CPU",
            )
        )
    if problems:
        raise ConfigError(*problems)


def _differences(cluster: ClusterConfig, machine: Machine) -> list[Problem]:
    """How the described machines differ from this one."""
    problems = []
    if (cluster.nodes or 1) > 1:
        problems.append(
            Problem(
                "cluster.nodes",
                f"cluster.nodes={cluster.nodes}",
                "plain python starts ranks on this machine only",
                "start with torchrun or deepspeed on every node, or see what it would be with launch/plan.py",
            )
        )
    if cluster.gpus_per_node and len(machine.gpus) < cluster.gpus_per_node:
        problems.append(_no_gpus(cluster.gpus_per_node, len(machine.gpus)))
    if cluster.gpu is not None:
        on_gpus = bool(machine.gpus) and cluster.gpus_per_node != 0
        here = _kind(machine) if on_gpus else None
        if not on_gpus or (
            here is not None and normalise_gpu_name(cluster.gpu) != here
        ):  # a GPU of unknown kind may be called anything
            problems.append(
                Problem(
                    "cluster.gpu",
                    f"cluster.gpu={cluster.gpu}",
                    f"this machine has {here or 'no GPU in use'}",
                    "leave out cluster.gpu, or see what it would be with launch/plan.py",
                )
            )
    return problems


def _no_gpus(wanted: int, here: int = 0) -> Problem:
    return Problem(
        "cluster.gpus_per_node",
        f"cluster.gpus_per_node={wanted}",
        f"this process sees {here} GPUs",
        "leave out cluster.gpus_per_node, write 0 to train on the CPU, or see what it would be with launch/plan.py",
    )


def _kind(machine: Machine) -> str | None:
    """None where there is no GPU, an unknown one, or two kinds."""
    kinds = {normalise_gpu_name(gpu.product) for gpu in machine.gpus}
    return kinds.pop() if len(kinds) == 1 else None


def _memory(machine: Machine) -> int | None:
    """Of the smallest GPU: every rank holds an equal share."""
    sizes = [gpu.memory_bytes for gpu in machine.gpus]
    return min((size for size in sizes if size is not None), default=None) if None not in sizes else None


def is_elastic(environ: Mapping[str, str], agent_words: Sequence[str]) -> bool:
    """Whether torchrun's agent may change the number of nodes during the run (``--nnodes=MIN:MAX``).

    The agent does not pass this on to its ranks, so it is read from the two places that torchrun itself reads (torch 2.13,
    ``distributed/run.py``): the agent's command line, or else the variable ``PET_NNODES``.
    """
    value = environ.get("PET_NNODES", "")
    for index, word in enumerate(agent_words):
        name, _, attached = word.partition("=")
        if name == "--nnodes":
            value = attached or "".join(agent_words[index + 1 : index + 2])
            break
    least, _, most = value.partition(":")
    return bool(most) and least != most


def _agent_words() -> list[str]:
    import psutil

    return psutil.Process(os.getppid()).cmdline()


def _text(environ: Mapping[str, str], name: str) -> str:
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
                f"{present} without {name} in the environment",
                "a launcher sets all of torch's variables, or none",
                f"start with deepspeed or torchrun; for plain python: unset {present.replace(',', '')}",
            )
        )
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not value.isdigit():
        seen = f"{name}={value} in the environment"
        raise ConfigError(
            Problem(name, seen, f"{name} is a whole number", "start with deepspeed or torchrun")
        )
    return int(value)
