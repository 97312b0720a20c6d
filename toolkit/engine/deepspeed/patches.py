"""Import DeepSpeed 0.19 and work around its defects. Each docstring explains why the patch is needed."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from toolkit.engine.deepspeed import host_reads
from toolkit.engine.step_read import StepRead
from toolkit.plan.types import Device


def import_deepspeed(device: Device, local_rank: int) -> ModuleType:
    """Import DeepSpeed for ``device`` and let it adopt the existing process group. Returns the package."""
    assert dist.is_initialized(), "the process group is created before the engine"
    os.environ["LOCAL_RANK"] = str(local_rank)  # read by ``zero.Init`` and required by the engine
    deepspeed = import_package(device)
    if deepspeed.comm.comm.cdb is not None and not _adopted_group_is_current():
        _release_stale_groups()
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)
    _adopted_group.append(dist.group.WORLD)
    return deepspeed


def import_package(device: Device) -> ModuleType:
    """Import and patch DeepSpeed for ``device``, without a process group."""
    # Otherwise DeepSpeed guesses the accelerator from installed packages: a CPU run on a GPU machine would
    # not start.
    os.environ.setdefault("DS_ACCELERATOR", str(device))

    import deepspeed
    import deepspeed.comm
    import deepspeed.ops

    # Disable the shared-memory collectives. They are compiled on first use, which takes 50 s, fails without a
    # compiler and hangs on the lock file of a killed build. Even probing for them runs a compiler.
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    if device is Device.CPU:
        _import_muon_without_compiling()
        _allow_fp16_on_any_cpu(deepspeed.DeepSpeedEngine)
    silence_memory_reports()
    host_reads.mask_norms_on_device()
    return deepspeed


_adopted_group: list[object] = []  # the process group that DeepSpeed's caches belong to


def _adopted_group_is_current() -> bool:
    return bool(_adopted_group) and _adopted_group[-1] is dist.group.WORLD


def _release_stale_groups() -> None:
    """Clear the groups cached in DeepSpeed's module globals, which a new process group invalidates."""
    import deepspeed.comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
    _adopted_group.clear()


def release_parallel_groups() -> None:
    """Clear the groups of this engine's axes, which the next engine in this process would use.

    The process groups themselves exist until the default group is destroyed.
    """
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.utils import groups

    groups._release_process_group_references()
    set_autotp_mode(training=False)


def _import_muon_without_compiling() -> None:
    """Import the Muon optimizer with ``torch.compile`` disabled.

    ZeRO 3 imports it for any optimizer, and the import decorates kernels with ``torch.compile``: seconds of
    start-up without a benefit on CPUs.
    """
    if "deepspeed.runtime.zero.muon.original_muon" in sys.modules:
        return
    from deepspeed.runtime import compiler

    original, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - imported for its side effect on sys.modules
    finally:
        compiler.compile = original


def _allow_fp16_on_any_cpu(engine: Any) -> None:
    """Let DeepSpeed's sanity check accept fp16 on CPUs without fast oneDNN kernels.

    Only the sanity check sees the changed answer, because Muon chooses the precision of its arithmetic by it
    too.
    """
    from deepspeed.accelerator import get_accelerator

    if hasattr(engine._do_sanity_check, "__wrapped__"):
        return
    check, accelerator = engine._do_sanity_check, get_accelerator()

    @functools.wraps(check)
    def check_with_fp16(self: Any) -> None:
        accelerator.is_fp16_supported = lambda: True
        try:
            check(self)
        finally:
            del accelerator.is_fp16_supported

    engine._do_sanity_check = check_with_fp16


@contextmanager
def capture_muon_update_norms() -> Iterator[list[torch.Tensor]]:
    """Collect the norm of each matrix's update during a step without ZeRO.

    ZeRO 1 to 3 replace gradients by Muon's updates before they compute the norm. Without ZeRO the updates
    exist only inside the step.
    """
    from deepspeed.runtime.zero.muon import muon_optimizer

    norms: list[torch.Tensor] = []
    muon_update = muon_optimizer.muon_update

    def muon_update_with_norm(*arguments: Any, **settings: Any) -> torch.Tensor:
        update: torch.Tensor = muon_update(*arguments, **settings)
        norms.append(update.float().norm())
        return update

    muon_optimizer.muon_update = muon_update_with_norm
    try:
        yield norms
    finally:
        muon_optimizer.muon_update = muon_update


def defer_loss_scale_growth(optimizer: Any) -> Callable[[], None]:
    """Keep the loss scale constant during a step; the returned function, called after it, lets it grow.

    ZeRO updates the scale before it unscales and clips gradients. In the step in which the scale doubles,
    gradients with the old scale would be divided by the new one: the update is halved, and ZeRO 3 reports
    half the norm. An overflow at the smallest scale is skipped like any other, while DeepSpeed would raise.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return lambda: None
    scaler.raise_error_at_min_scale = False
    growth_due = False

    def update(has_overflow: bool = False) -> None:
        nonlocal growth_due
        if has_overflow:
            scaler.update_scale(True)  # the step is skipped: nothing is unscaled after this
        else:
            growth_due = True

    def grow() -> None:
        nonlocal growth_due
        if growth_due:
            growth_due = False
            scaler.update_scale(False)

    optimizer._update_scale = update
    return grow


def allow_skipping_steps(optimizer: Any) -> None:
    """Let a plain optimizer skip the update while ``optimizer.overflow`` is true, as ZeRO's optimizers do.

    DeepSpeed's engine reads the attribute after each step.
    """
    update = optimizer.step

    def step(*args: Any, **settings: Any) -> Any:
        return None if optimizer.overflow else update(*args, **settings)

    optimizer.overflow, optimizer.step = False, step


def drop_secondary_partitions(module: torch.nn.Module) -> None:
    """Drop the second copies of weights that groups of ranks keep under ZeRO++ hpZ.

    DeepSpeed fills the copies whenever it partitions parameters, and gathers from them. Those created before
    ``engine.load`` contain uninitialized memory (NaN from the first step). DeepSpeed drops them after each
    optimizer step; this does it after a load, also for frozen parameters, which
    ``invalidate_secondary_tensor`` leaves out.
    """
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def divide_loss_scale(optimizer: Any, ranks: int) -> None:
    """Divide the loss scale of an fp16 optimizer by the ``ranks`` whose gradients DeepSpeed averages.

    The engine multiplies the loss by ``ranks`` to undo the mean. With the whole scale on top, gradients would
    be ``ranks`` times larger than those of the local engine and overflow earlier.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        scaler.cur_scale /= ranks
        scaler.min_scale /= ranks


def run_loss_scale(optimizer: Any, ranks: int) -> float:
    """Return the run's loss scale, after :func:`divide_loss_scale`; 1 without loss scaling."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(scaler.cur_scale) * ranks if scaler is not None and scaler.dynamic else 1.0


def silence_memory_reports() -> None:
    """Silence the memory reports that ``BF16_Optimizer`` prints at construction at any log level."""
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *_args, **_settings: None


def reset_zero3_counters() -> None:
    """Number ZeRO 3's modules and parameters from zero for each engine.

    The counters run over all engines of a process, and ranks compare them: ranks that created different
    numbers of engines would raise that their models differ.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = (
        0  # the counter is a default argument
    )
    Init.param_id = 0


def restore_linear() -> None:
    """Restore ``torch.nn.functional.linear``, which ZeRO 3 replaces for the whole process."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

    if hasattr(Patched, "linear_bk"):
        torch.nn.functional.linear = Patched.linear_bk


def remove_from_module_stack(parts: Collection[torch.nn.Module]) -> None:
    """Remove ``parts`` from ZeRO 3's global stack of running modules.

    A module is pushed before its forward and popped after it. Activation checkpointing stops recomputation
    early, so each block leaves an entry per micro-batch. The whole model is never popped, which keeps a
    closed engine's weights alive.
    """
    from deepspeed.runtime.zero import parameter_offload

    stack, gone = parameter_offload.FWD_MODULE_STACK, set(parts)
    stack[:] = [entry for entry in stack if entry not in gone]


def release_zero3_engine(engine: Any) -> None:
    """Remove weights, optimizer and groups from a closed engine of ZeRO 3.

    ZeRO 3 defines autograd functions for every module, which reference module and engine and are never freed.
    A process that creates many engines would keep all of them; under gloo each group has threads that wake a
    hundred times a second.
    """
    for parameter in engine.module.parameters():
        parameter.__dict__.clear()
    for holder in (engine, *engine.module.modules()):
        groups = [name for name, value in vars(holder).items() if isinstance(value, dist.ProcessGroup)]
        vars(holder).update(dict.fromkeys(groups))
        holder._parameters.clear()
    engine.optimizer.parameter_offload.__dict__.clear()
    engine.optimizer.__dict__.clear()
    vars(engine).update(optimizer=None, mpu=None)


def clip_by_pipeline_norm(engine: Any, read: StepRead) -> Callable[[], float]:
    """Without ZeRO, clip by the gradient norm of the whole pipeline, and skip steps whose norm is not finite.

    DeepSpeed takes a stage for a tensor-parallel rank and counts unsharded parameters on the first one only,
    so it clips all stages by the norm of the first (3e-3 of the loss after 20 steps), and reports no norm
    without clipping.

    Returns:
        A function that returns the last step's norm before clipping.
    """
    norm = 0.0
    take_model_step, clip = engine._take_model_step, engine.gradient_clipping()
    allow_skipping_steps(engine.optimizer)

    def clip_and_step(lr_kwargs: Any = None) -> None:
        nonlocal norm
        parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        # A tied weight is on two stages, with the same gradient.
        square = (
            torch.nn.utils.get_total_norm([p.grad for p in parameters if not p.ds_pipe_replicated])
            .double()
            .square()
        )
        dist.all_reduce(square, group=engine.grid.get_pipe_parallel_group())
        (norm,) = read.norms(square.sqrt())
        engine.optimizer.overflow = not math.isfinite(norm)
        if clip > 0 and not engine.optimizer.overflow:
            factor = 1.0 / max((norm + 1e-6) / clip, 1.0)
            for parameter in parameters:
                parameter.grad.mul_(factor)
        take_model_step(lr_kwargs)

    engine.clip_fp32_gradients = lambda: None
    engine._take_model_step = clip_and_step
    return lambda: norm


def disable_timers(engine: Any) -> None:
    """Disable timers, which append to lists that are emptied only when the times are printed."""
    from deepspeed.utils.timer import NoopTimer

    if not engine.wall_clock_breakdown():
        engine.timers = NoopTimer()


def set_gradient_accumulation(engine: Any, micro_batches: int) -> None:
    """Change the number of micro-batches per step, in a batch ramp.

    DeepSpeed does not update ZeRO's copy of it.
    """
    engine.set_train_batch_size(
        engine.train_micro_batch_size_per_gpu() * micro_batches * engine.dp_world_size
    )
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = micro_batches


def drop_last_step(engine: Any) -> None:
    """Drop the last micro-batch's loss and buffers.

    A hook of the loss references the engine. The garbage collector does not see this cycle, so a closed
    engine and its groups would never be freed.
    """
    engine.loss = engine.total_loss = None
    for buffers in engine.pipe_buffers.values():
        buffers.clear()


def drop_pipeline_grid() -> None:
    """Drop the last engine's grid and groups, which the pipeline's send module keeps."""
    from deepspeed.runtime.pipe import p2p

    p2p._grid = p2p._groups = None
