"""Set the environment variables that libraries read in a rank's process. Those that the user has set stay."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

from toolkit.cluster.world.environment import Launch
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.cluster.world.network_interface import find_interface_to
from toolkit.config.kernels import CompileMode
from toolkit.plan.devices import HIDE_GPUS
from toolkit.plan.megatron import needs_single_cuda_queue
from toolkit.plan.types import Device, RunPlan, World

log = logging.getLogger(__name__)

CUDA_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# Names of one variable of torch: the current one, and that of releases before 2.9.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_defaults(
    environ: MutableMapping[str, str],
    launch: Launch,
    world: World,
    machine: MachineInfo,
    threads: int | None,
    *,
    compiles: bool = False,
) -> None:
    """Set environment variables that libraries read on import; call this before importing torch.

    Variables that the user has set keep their values, except OMP_NUM_THREADS if ``threads`` is given, and
    those that select GPUs in a run on CPUs.

    Args:
        threads: ``debug.threads``; None: divide the machine's cores among its ranks.
        compiles: whether the run uses torch.compile.
    """
    set_thread_default(environ, world.ranks_per_node, machine.cores, threads)
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads deadlock after a fork
    add_ninja_to_path(environ)
    if world.device is Device.CPU:
        if not compiles:
            # compiling optimizer helpers takes up to 10 s and brings no speedup on the CPU
            environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        environ.setdefault("DS_ACCELERATOR", "cpu")
        environ.update(HIDE_GPUS)  # with cluster.gpus_per_node=0 no library may use the GPUs
    elif "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environ:  # the older name, which PyTorch still reads
        # number of recent collectives that PyTorch records per rank, for hang reports
        environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if world.nodes == 1:
        # otherwise gloo looks up the host name, which may not resolve
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif (interface := find_interface_to(launch.address)) is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Libraries written for launchers read these variables even in a single-process run.
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


def set_run_defaults(
    environ: MutableMapping[str, str], launch: Launch, plan: RunPlan, machine: MachineInfo
) -> None:
    """Apply :func:`set_defaults` to a rank of ``plan``."""
    set_defaults(
        environ,
        launch,
        plan.world,
        machine,
        plan.config.debug.threads,
        compiles=plan.kernels.compile.name != CompileMode.none.value,
    )


def set_cuda_defaults(environ: MutableMapping[str, str], plan: RunPlan) -> None:
    """Set what CUDA and torch's allocator read when the process first uses a GPU, unless the user has set it.

    Expandable segments keep memory from being lost between blocks of different sizes (torch's notes on CUDA
    memory). They are incompatible with buffers that are registered with NCCL: Megatron-core refuses both
    together (``distributed/distributed_data_parallel_config.py``), but reads only the older name of the
    variable.
    """
    if plan.world.device is not Device.CUDA:
        return
    registered = plan.config.engine.megatron.get("nccl_ub")
    if not registered and not any(name in environ for name in ALLOCATOR_SETTINGS):
        environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    if not needs_single_cuda_queue(plan.config, plan.world):
        return
    found = environ.setdefault(CUDA_QUEUES, "1")
    if found != "1":
        log.warning(
            "%s=%s is set: Megatron-core with parallel.tensor=%d parallel.context=%d needs 1, so that "
            "collectives start before the matrix multiplications that hide them; unset it",
            CUDA_QUEUES,
            found,
            plan.axes.tensor,
            plan.axes.context,
        )


def add_ninja_to_path(environ: MutableMapping[str, str]) -> None:
    """Let torch find the ninja of this Python environment, with which DeepSpeed compiles its kernels.

    It runs the command ``ninja``, whose folder is in PATH only if the environment is activated.
    """
    if shutil.which("ninja", path=environ.get("PATH")) is not None:
        return
    for folder in (Path(sys.executable).parent, *(Path(entry) / "bin" for entry in sys.path)):
        if (folder / "ninja").exists():
            environ["PATH"] = os.pathsep.join(filter(None, (environ.get("PATH"), str(folder))))
            return


def set_thread_default(
    environ: MutableMapping[str, str], ranks_per_node: int, cores: int, threads: int | None = None
) -> None:
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks_per_node)))
