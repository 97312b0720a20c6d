"""Rules about the machine: precision, offload and memory."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.schema import OffloadDevice, Precision
from toolkit.errors import Problem, Severity
from toolkit.plan.devices import GPUS, find_gpu, memory_bytes
from toolkit.plan.rule_context import Rule, RuleContext, refuse, warn
from toolkit.plan.types import Device

USABLE_SHARE = 0.92  # of the device's memory, after fragmentation and the workspaces of libraries
GB = 1e9


def gpu_is_known(ctx: RuleContext) -> Iterator[Problem]:
    name = ctx.config.cluster.gpu
    if name is not None and find_gpu(name) is None:
        yield warn(
            ctx.config,
            "cluster.gpu",
            "memory and speed are known only for the GPUs in toolkit/plan/devices.py",
            f"write one of {', '.join(GPUS)}; otherwise the plan does not check memory and metrics have no "
            f"utilisation",
        )


def price_needs_gpus(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.monitor.price_per_gpu_hour is not None and ctx.world.device is Device.CPU:
        yield refuse(
            ctx.config,
            "monitor.price_per_gpu_hour",
            "cost is computed from GPU-hours, and this run has only CPU ranks",
            "write monitor.price_per_gpu_hour=null",
        )


def precision_fits_device(ctx: RuleContext) -> Iterator[Problem]:
    precision, gpu = ctx.config.precision.name, find_gpu(ctx.world.gpu)
    if precision is Precision.bf16 and gpu is not None and not gpu.has_bf16:
        yield Problem(
            "precision.name",
            f"precision.name=bf16 on {ctx.world.gpu}",
            "bf16 needs a GPU of compute capability 8.0 (Ampere) or later",
            "write precision=fp16, which uses loss scaling",
        )
    if precision is Precision.fp16 and ctx.world.device is Device.CPU:
        yield Problem(
            "precision.name",
            "precision.name=fp16 on a CPU",
            "fp16 is slow on CPUs, and many emulate it in software",
            "write precision=bf16, or precision=fp32 for small models",
            Severity.WARNING,
        )
    if precision is Precision.fp32 and ctx.world.device is Device.CUDA and ctx.numel > 100_000_000:
        yield Problem(
            "precision.name",
            f"precision.name=fp32 with {ctx.numel / GB:.1f} B parameters on a GPU",
            "fp32 does not use the 16-bit matrix units: it is several times slower and doubles the memory of "
            "activations",
            "write precision=bf16",
            Severity.WARNING,
        )


def offload_fits_stage(ctx: RuleContext) -> Iterator[Problem]:
    offload, stage = ctx.config.offload, ctx.config.zero.stage
    if not ctx.deepspeed:
        if offload.optimizer is not OffloadDevice.none or offload.parameters is not OffloadDevice.none:
            why = (
                "; Megatron-core can offload its optimizer only on GPUs, and those states are not saved"
                if ctx.megatron
                else ""
            )
            yield refuse(
                ctx.config,
                "offload.optimizer offload.parameters engine.name",
                f"only DeepSpeed has offload{why}",
                "write offload=none, or engine=deepspeed",
            )
        return
    if offload.parameters is not OffloadDevice.none and stage != 3:
        yield refuse(
            ctx.config,
            "offload.parameters zero.stage",
            "parameters can be offloaded only under ZeRO 3",
            "write zero=stage3, or offload=cpu_optimizer to offload only the optimizer",
        )
    if offload.optimizer is OffloadDevice.cpu and stage == 0:
        yield refuse(
            ctx.config,
            "offload.optimizer zero.stage",
            "optimizer states can be offloaded under ZeRO 1 to 3",
            "write zero=stage1 or higher, or offload=none",
        )
    if offload.optimizer is OffloadDevice.nvme and stage != 3:
        yield refuse(
            ctx.config,
            "offload.optimizer zero.stage",
            "NVMe offload needs ZeRO 3: under the other stages DeepSpeed silently keeps the states in host "
            "memory",
            "write zero=stage3, or offload=cpu_optimizer",
        )


def offload_to_nvme(ctx: RuleContext) -> Iterator[Problem]:
    offload = ctx.config.offload
    if OffloadDevice.nvme not in (offload.optimizer, offload.parameters):
        if offload.nvme_path is not None:
            yield warn(
                ctx.config,
                "offload.nvme_path offload.optimizer offload.parameters",
                "the path is used only for offload to nvme",
                "write offload=nvme, or leave out offload.nvme_path",
            )
        return
    if offload.nvme_path is None:
        yield refuse(
            ctx.config,
            "offload.nvme_path offload.optimizer offload.parameters",
            "NVMe offload needs a folder on a local disk",
            "write offload.nvme_path=/local_nvme",
        )
    if not ctx.world.has_libaio:
        yield Problem(
            "offload.optimizer" if offload.optimizer is OffloadDevice.nvme else "offload.parameters",
            "offload to nvme on a machine without libaio",
            "DeepSpeed reads and writes NVMe through libaio",
            "install libaio's headers (apt-get install libaio-dev), or write offload=cpu",
        )
    if not ctx.world.has_compiler:
        yield Problem(
            "offload.nvme_path",
            "offload to nvme on a machine without a C++ compiler",
            "DeepSpeed compiles its NVMe module on first use",
            "install g++, or write offload=cpu",
        )


def states_fit(ctx: RuleContext) -> Iterator[Problem]:
    memory, have = ctx.memory, memory_bytes(ctx.world)
    if memory is None or have is None or ctx.world.device is Device.CPU:
        return
    name = ctx.world.gpu or "this GPU"
    if memory.states > have:
        yield Problem(
            "zero.stage",
            f"{memory.states / GB:.1f} GB of parameters, gradients and optimizer states a rank; "
            f"{name} has {have / GB:.1f} GB",
            "the states of a rank fit on its device",
            _more_room(ctx),
        )
    elif memory.device_total > USABLE_SHARE * have:
        needed = f"{memory.device_total / GB:.1f} GB a rank with activations and buffers"
        seen = f"{needed}; {name} has {have / GB:.1f} GB"
        if memory.device_total > have:
            yield Problem(
                "train.micro_batch",
                seen,
                "states, activations and buffers of a rank fit on its device",
                _smaller_batch(ctx),
            )
        else:
            yield Problem(
                "train.micro_batch",
                seen,
                f"a device usually runs out of memory above {USABLE_SHARE:.0%}",
                _smaller_batch(ctx),
                Severity.WARNING,
            )


def host_fits(ctx: RuleContext) -> Iterator[Problem]:
    memory, have = ctx.memory, ctx.world.host_memory_bytes
    if memory is None or have is None:
        return
    ranks = min(ctx.world.ranks, ctx.world.ranks_per_node)
    needed = memory.host * ranks
    if ctx.world.device is Device.CPU:
        needed += memory.device_total * ranks
    if needed > have:
        fewer = "use fewer cluster.cpu_ranks, a smaller model or a smaller train.micro_batch"
        yield Problem(
            "offload.optimizer" if memory.host else "cluster.cpu_ranks",
            f"{needed / GB:.1f} GB on a node of {ranks} ranks, which has {have / GB:.1f} GB of memory",
            "the host memory of all ranks of a node fits in its memory",
            fewer
            if ctx.world.device is Device.CPU
            else "use more nodes, a smaller model, or offload=nvme with zero=stage3",
        )


def _smaller_batch(ctx: RuleContext) -> str:
    """The remedy if the states of a rank fit and its activations do not."""
    options = []
    if ctx.batch is not None and ctx.batch.micro_batch > 1:
        options.append(f"train.micro_batch={max(1, ctx.batch.micro_batch // 2)} or smaller")
    if not ctx.config.train.activation_checkpointing:
        options.append("train.activation_checkpointing=true")
    return f"write {', or '.join(options)}" if options else _more_room(ctx)


def _more_room(ctx: RuleContext) -> str:
    stage, offload, megatron = ctx.config.zero.stage, ctx.config.offload, ctx.megatron
    options = []
    if ctx.config.precision.name is Precision.fp32:
        options.append("precision=bf16")
    if megatron:
        options += ["zero=stage1"] if stage == 0 and ctx.world.ranks > 1 else []
        options += ["a larger parallel.tensor or parallel.pipeline"]
        return f"write {', or '.join(options)}, or use more GPUs"
    if stage < 3 and ctx.world.ranks > 1 and ctx.config.parallel.pipeline == 1:
        options.append("zero=stage3")
    if offload.optimizer is OffloadDevice.none:
        options.append("offload=cpu_optimizer" + (" zero=stage2" if stage == 0 else ""))
    elif offload.parameters is OffloadDevice.none:
        options.append("zero=stage3 offload=cpu")
    options.append("more GPUs" if stage == 3 else "more GPUs with zero=stage3")
    return f"write {', or '.join(options[:-1])}, or use {options[-1]}"


RULES: tuple[Rule, ...] = (
    gpu_is_known,
    price_needs_gpus,
    precision_fits_device,
    offload_fits_stage,
    offload_to_nvme,
    states_fit,
    host_fits,
)
