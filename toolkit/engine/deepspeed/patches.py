"""What DeepSpeed 0.19 does to a process, and its defects that are mended from outside. Each entry says why it is here."""

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

from toolkit.plan.types import Device


def import_deepspeed(device: Device, local_rank: int) -> ModuleType:
    """Import DeepSpeed for ``device`` and make it adopt the process group that exists. Returns the package."""
    assert dist.is_initialized(), "the process group is made before the engine"
    # Without it the accelerator is guessed from what happens to be installed: a CPU run on a GPU machine would not start.
    os.environ.setdefault("DS_ACCELERATOR", str(device))
    os.environ["LOCAL_RANK"] = str(
        local_rank
    )  # ``zero.Init`` takes its device from it, and the engine refuses to start without

    import deepspeed
    import deepspeed.comm
    import deepspeed.ops

    # The shared-memory collectives are compiled on first use: 50 s cold, an exception without a compiler, and a stale lock
    # file of a killed build hangs the start for ever. Probing for them also runs a compiler, hence no ``__getattr__`` here.
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    if device is Device.CPU:
        _import_muon_without_compiling()
        _allow_fp16_on_any_cpu(deepspeed.DeepSpeedEngine)
    silence_memory_reports()
    if deepspeed.comm.comm.cdb is not None and not _adopted_group_is_current():
        _release_stale_groups()
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)
    _adopted_group.append(dist.group.WORLD)
    return deepspeed


_adopted_group: list[object] = []  # the process group that DeepSpeed's caches belong to


def _adopted_group_is_current() -> bool:
    return bool(_adopted_group) and _adopted_group[-1] is dist.group.WORLD


def _release_stale_groups() -> None:
    """DeepSpeed caches its groups in module globals; after a new ``init_process_group`` they name dead ones."""
    import deepspeed.comm
    from deepspeed.utils import groups

    groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
    _adopted_group.clear()


def release_parallel_groups() -> None:
    """DeepSpeed keeps the groups of an engine's axes for the process: the next engine in it, of other axes, would reduce its
    gradients over them. Their process groups live as long as the world's."""
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.utils import groups

    groups._release_process_group_references()
    set_autotp_mode(training=False)


def _import_muon_without_compiling() -> None:
    """ZeRO-3 imports the Muon optimizer whatever the optimizer is, and that import decorates kernels with
    ``torch.compile``: seconds of start-up for nothing on CPU, where Muon's kernels gain nothing from it."""
    if "deepspeed.runtime.zero.muon.original_muon" in sys.modules:
        return
    from deepspeed.runtime import compiler

    original, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - imported for its side effect on sys.modules
    finally:
        compiler.compile = original


def _allow_fp16_on_any_cpu(engine: Any) -> None:
    """An engine refuses fp16 where oneDNN has no fast kernels for it (most CPUs without AVX512-FP16); torch computes it everywhere.

    Nobody but its sanity check is told so: Muon chooses the precision of its own arithmetic by the same answer.
    """
    from deepspeed.accelerator import get_accelerator

    if hasattr(engine._do_sanity_check, "__wrapped__"):
        return
    check, accelerator = engine._do_sanity_check, get_accelerator()

    @functools.wraps(check)
    def allowing(self: Any) -> None:
        accelerator.is_fp16_supported = lambda: True
        try:
            check(self)
        finally:
            del accelerator.is_fp16_supported

    engine._do_sanity_check = allowing


@contextmanager
def capture_muon_update_norms() -> Iterator[list[torch.Tensor]]:
    """Around a step without ZeRO: the norm of each matrix's update, in the list when the step is done.

    ZeRO 1 to 3 replace gradients by Muon's updates before they take the norm. Without ZeRO the updates exist only inside the step.
    """
    from deepspeed.runtime.zero.muon import muon_optimizer

    norms: list[torch.Tensor] = []
    make = muon_optimizer.muon_update

    def making(*arguments: Any, **settings: Any) -> torch.Tensor:
        update: torch.Tensor = make(*arguments, **settings)
        norms.append(update.float().norm())
        return update

    muon_optimizer.muon_update = making
    try:
        yield norms
    finally:
        muon_optimizer.muon_update = make


def defer_loss_scale_growth(optimizer: Any) -> Callable[[], None]:
    """Keep the loss scale unchanged while a step uses it; the returned function, called after the step, lets it grow.

    ZeRO updates the scale before it unscales and clips the gradients. In the step in which the scale doubles, gradients that
    carry the old scale are divided by the new one: that step moves the weights by half (and ZeRO 3 reports half the norm).

    An overflow at the smallest scale is skipped like any other; DeepSpeed would raise, on its own terms.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return lambda: None
    scaler.raise_error_at_min_scale = False
    due: list[None] = []

    def update(has_overflow: bool = False) -> None:
        if has_overflow:
            scaler.update_scale(True)  # the step is skipped: nothing is unscaled after this
        else:
            due.append(None)

    def settle() -> None:
        if due:
            due.clear()
            scaler.update_scale(False)

    optimizer._update_scale = update
    return settle


def allow_skipping_steps(optimizer: Any) -> None:
    """Without ZeRO: skip the update while ``optimizer.overflow`` is true. DeepSpeed's engine reads it after each step.

    ZeRO's optimizers have that attribute and skip a step whose gradient norm is not finite; a plain optimizer has not.
    """
    update = optimizer.step

    def step(*args: Any, **settings: Any) -> Any:
        return None if optimizer.overflow else update(*args, **settings)

    optimizer.overflow, optimizer.step = False, step


def drop_secondary_partitions(module: torch.nn.Module) -> None:
    """Under ZeRO++'s hpZ each group of ranks keeps a second copy of the weights, and a parameter that has one is gathered from it.

    DeepSpeed fills the copies whenever it cuts parameters, so those made before ``engine.load`` hold what the memory held before (NaN
    from the first step), and drops them after each optimizer step; here that is done after a load. Frozen parameters too, which
    DeepSpeed's own ``invalidate_secondary_tensor`` leaves out.
    """
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def divide_loss_scale(optimizer: Any, ranks: int) -> None:
    """Let an fp16 optimizer hold the run's loss scale divided by the ``ranks`` whose gradients DeepSpeed averages.

    The engine multiplies the loss by ``ranks`` to undo that mean. With the run's whole scale on top of it, gradients would be ``ranks``
    times those of the local engine and overflow that much earlier.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        scaler.cur_scale /= ranks
        scaler.min_scale /= ranks


def run_loss_scale(optimizer: Any, ranks: int) -> float:
    """The run's, after :func:`divide_loss_scale`; 1 where nothing is scaled."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return float(scaler.cur_scale) * ranks if scaler is not None and scaler.dynamic else 1.0


def silence_memory_reports() -> None:
    """``BF16_Optimizer`` prints a dozen memory reports while it is made, whatever the log level."""
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *_args, **_settings: None


def reset_zero3_counters() -> None:
    """ZeRO 3 numbers modules and parameters over all engines that a process ever made, and ranks compare the numbers: ranks
    with different pasts (tests that share them) would be told that their models differ."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = (
        0  # a mutable default argument is the counter
    )
    Init.param_id = 0


def restore_linear() -> None:
    """ZeRO-3 replaces ``torch.nn.functional.linear`` for the whole process and never puts it back."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

    if hasattr(Patched, "linear_bk"):
        torch.nn.functional.linear = Patched.linear_bk


def remove_from_module_stack(parts: Collection[torch.nn.Module]) -> None:
    """Take ``parts`` off ZeRO 3's global stack of running modules.

    A module is pushed before its forward and popped after it, but activation checkpointing stops its recomputation as soon as it
    has what it needs: each block leaves an entry a micro-batch, for ever. The whole model is pushed at the start and never
    popped, which keeps a closed engine's weights alive.
    """
    from deepspeed.runtime.zero import parameter_offload

    stack, gone = parameter_offload.FWD_MODULE_STACK, set(parts)
    stack[:] = [entry for entry in stack if entry not in gone]


def release_zero3_engine(engine: Any) -> None:
    """Take out of a closed engine of ZeRO 3 what is large: weights, optimizer, groups.

    It defines classes of autograd functions for every module, which hold the module and the engine and which torch never lets go. A
    process that makes many engines would keep all of them, and under gloo each group is threads that wake a hundred times a second.
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


def clip_by_pipeline_norm(engine: Any) -> Callable[[], float]:
    """Without ZeRO: clip by the gradient norm of the whole model, and skip the step if it is not finite. The returned
    function gives the last step's norm, before clipping.

    DeepSpeed takes a stage for a rank of tensor parallelism and counts what is not cut on its first rank: it clips all stages by the
    norm of the first one (3e-3 of the loss after 20 steps), and without clipping reports none.
    """
    norm = 0.0
    take, clip = engine._take_model_step, engine.gradient_clipping()
    allow_skipping_steps(engine.optimizer)

    def measured(lr_kwargs: Any = None) -> None:
        nonlocal norm
        parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
        # A tied weight is on two stages, with the same gradient.
        square = (
            torch.nn.utils.get_total_norm([p.grad for p in parameters if not p.ds_pipe_replicated])
            .double()
            .square()
        )
        dist.all_reduce(square, group=engine.grid.get_pipe_parallel_group())
        norm = float(square.sqrt())
        engine.optimizer.overflow = not math.isfinite(norm)
        if clip > 0 and not engine.optimizer.overflow:
            factor = 1.0 / max((norm + 1e-6) / clip, 1.0)
            for parameter in parameters:
                parameter.grad.mul_(factor)
        take(lr_kwargs)

    engine.clip_fp32_gradients = lambda: None
    engine._take_model_step = measured
    return lambda: norm


def disable_timers(engine: Any) -> None:
    """Every step adds to a list of times that is emptied when they are printed, and they are not printed."""
    from deepspeed.utils.timer import NoopTimer

    if not engine.wall_clock_breakdown():
        engine.timers = NoopTimer()


def set_gradient_accumulation(engine: Any, micro_batches: int) -> None:
    """For the next steps, in a batch ramp. ZeRO has a copy of the number that DeepSpeed forgets."""
    engine.set_train_batch_size(
        engine.train_micro_batch_size_per_gpu() * micro_batches * engine.dp_world_size
    )
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = micro_batches


def drop_last_step(engine: Any) -> None:
    """The last stage keeps the last micro-batch's loss, a hook of which holds the engine: a circle that torch hides from Python, so that
    no closed engine would go, nor its groups."""
    engine.loss = engine.total_loss = None
    for buffers in engine.pipe_buffers.values():
        buffers.clear()


def drop_pipeline_grid() -> None:
    """The module that sends activations keeps the grid of the last engine, and its groups with it: the process's threads add up."""
    from deepspeed.runtime.pipe import p2p

    p2p._grid = p2p._groups = None
