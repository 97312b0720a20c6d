"""Rules about the machine: precision, offload and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from toolkit.config.schema import OffloadDevice, Precision, RunConfig
from toolkit.errors import Problem, Severity
from toolkit.plan.devices import GPUS, find_gpu, memory_bytes
from toolkit.plan.memory_verdict import DOES_NOT_FIT, MAY_NOT_FIT, Fit, judge_memory
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.saves import GIB
from toolkit.plan.types import Device

GB = 1e9


def gpu_is_known(ctx: RuleContext) -> Iterator[Problem]:
    name = ctx.config.cluster.gpu
    if name is not None and find_gpu(name) is None:
        similar = [f"cluster.gpu={gpu}" for gpu in GPUS if gpu.startswith(f"{name.lower()}-")]
        yield make_warning(
            ctx.config,
            "cluster.gpu",
            "memory and speed are known only for the GPUs in toolkit/plan/devices.py; of other GPUs the "
            "plan checks no memory and predicts no time",
            f"write {' or '.join(similar)}" if similar else f"write one of {', '.join(GPUS)}",
        )


def price_needs_gpus(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.monitor.price_per_gpu_hour is not None and ctx.world.device is Device.CPU:
        yield make_error(
            ctx.config,
            "monitor.price_per_gpu_hour",
            "cost is computed from GPU-hours, and this run has only CPU ranks",
            "write monitor.price_per_gpu_hour=null",
        )


def budget_has_price(ctx: RuleContext) -> Iterator[Problem]:
    """Money is compared with the price of GPU-hours, which is never assumed."""
    config = ctx.config
    if config.budget.usd is None:
        return
    if ctx.world.device is Device.CPU:
        yield Problem(
            "budget.usd",
            f"budget.usd={config.budget.usd:g} on CPU ranks",
            "only hours of GPUs have a price; a budget of CPU ranks counts the hours of ranks",
            "write budget.usd=null budget.gpu_hours=10",
        )
    elif not config.monitor.price_per_gpu_hour:
        yield missing_price(config)


def missing_price(config: RunConfig) -> Problem:
    """The error about ``budget.usd`` without a price."""
    return make_error(
        config,
        "budget.usd monitor.price_per_gpu_hour",
        "a budget is compared with the price of GPU-hours, which is never assumed",
        "write monitor.price_per_gpu_hour=2.5, your price",
    )


def spares_have_repairs(ctx: RuleContext) -> Iterator[Problem]:
    cluster = ctx.config.cluster
    if cluster.spare_nodes and cluster.repair_hours is None and cluster.min_nodes is None:
        yield make_warning(
            ctx.config,
            "cluster.spare_nodes cluster.repair_hours",
            "the predicted goodput counts spare nodes only if repairs take time, and only a job with "
            "cluster.min_nodes takes them",
            "write cluster.repair_hours=24, or leave out cluster.spare_nodes",
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
            yield make_error(
                ctx.config,
                "offload.optimizer offload.parameters engine.name",
                f"only DeepSpeed has offload{why}",
                "write offload=none, or engine=deepspeed",
            )
        return
    if offload.parameters is not OffloadDevice.none and stage != 3:
        yield make_error(
            ctx.config,
            "offload.parameters zero.stage",
            "parameters can be offloaded only under ZeRO 3",
            "write zero=stage3, or offload=cpu_optimizer to offload only the optimizer",
        )
    if offload.optimizer is OffloadDevice.cpu and stage == 0:
        yield make_error(
            ctx.config,
            "offload.optimizer zero.stage",
            "optimizer states can be offloaded under ZeRO 1 to 3",
            "write zero=stage1 or higher, or offload=none",
        )
    if offload.optimizer is OffloadDevice.nvme and stage != 3:
        yield make_error(
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
            yield make_warning(
                ctx.config,
                "offload.nvme_path offload.optimizer offload.parameters",
                "the path is used only for offload to nvme",
                "write offload=nvme, or leave out offload.nvme_path",
            )
        return
    if offload.nvme_path is None:
        yield make_error(
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


def kernels_can_be_compiled(ctx: RuleContext) -> Iterator[Problem]:
    """DeepSpeed compiles kernels for CUDA when they are first used (deepspeed/ops/op_builder, 0.19.8).

    ``async_io`` and ``quantizer`` run ``nvcc --version`` and are linked with the toolkit's CUDA runtime; the
    C++ code of DeepSpeedCPUAdam needs only a C++ compiler. Compilers of another major version of CUDA would
    load a second CUDA runtime into the process.
    """
    offload, world = ctx.config.offload, ctx.world
    if not ctx.deepspeed or world.device is Device.CPU:
        return
    needs = []
    if OffloadDevice.nvme in (offload.optimizer, offload.parameters):
        name = "offload.optimizer" if offload.optimizer is OffloadDevice.nvme else "offload.parameters"
        needs.append((name, f"{name}=nvme", "write offload=cpu"))
    zero, own = ctx.config.zero, ctx.config.engine.deepspeed.get("zero_optimization")
    nontrainable = "engine.deepspeed.zero_optimization.zero_quantized_nontrainable_weights"
    quantised = {
        "zero.quantized_weights": zero.quantized_weights,
        "zero.quantized_gradients": zero.quantized_gradients,
        nontrainable: isinstance(own, Mapping) and own.get("zero_quantized_nontrainable_weights"),
    }
    for key in (key for key, used in quantised.items() if used):
        needs.append((key, f"{key}=true", "leave it out"))
        if not world.has_compiler:
            yield Problem(
                key,
                f"{key}=true on a machine without a C++ compiler",
                "DeepSpeed compiles its kernels on first use",
                "install g++, or leave it out",
            )
    if world.has_nvcc:
        return
    toolkit = f"the CUDA toolkit {world.torch_cuda or 'of the version of torch.version.cuda'}"
    has = "no nvcc" if world.nvcc is None else f"nvcc of CUDA {world.nvcc}"
    torch = "" if world.torch_cuda is None else f", and torch was built with CUDA {world.torch_cuda}"
    for key, seen, otherwise in needs:
        yield Problem(
            key,
            f"{seen} on a machine with {has}{torch}",
            "DeepSpeed compiles the kernels for it on first use, with nvcc of torch's major version of CUDA",
            f"install {toolkit} and set CUDA_HOME to its folder, or {otherwise}",
        )


def memory_fits(ctx: RuleContext) -> Iterator[Problem]:
    memory, have = ctx.memory, memory_bytes(ctx.world)
    verdict = judge_memory(memory, ctx.world)
    if verdict is None or verdict.fit is Fit.yes:
        return
    assert memory is not None
    assert have is not None
    states = memory.states > have
    kinds = "parameters, gradients and optimizer states" if states else "states, activations and buffers"
    needed = memory.states if states else memory.device_total
    yield Problem(
        "zero.stage" if states else "train.micro_batch",
        f"{needed / GB:.1f} GB of {kinds} a rank; {ctx.world.gpu or 'this GPU'} has {have / GB:.1f} GB",
        DOES_NOT_FIT if verdict.fit is Fit.no else MAY_NOT_FIT,
        _more_room(ctx) if states else _smaller_batch(ctx),
        Severity.ERROR if verdict.fit is Fit.no else Severity.WARNING,
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


def background_saves_fit(ctx: RuleContext) -> Iterator[Problem]:
    checkpoint = ctx.config.checkpoint
    if not checkpoint.background:
        return
    size = ctx.state_bytes
    if size is not None and size > checkpoint.staging_gib * GIB:
        yield make_error(
            ctx.config,
            "checkpoint.background checkpoint.staging_gib",
            f"a save in the background copies the {size / GIB:.3g} GiB of a rank's state to host memory",
            f"write checkpoint.staging_gib={-(-size // GIB)}, or checkpoint.background=false",
        )


def _smaller_batch(ctx: RuleContext) -> str:
    """The remedy if the states of a rank fit and its activations do not."""
    options = []
    if ctx.batch is not None and ctx.batch.micro_batch > 1:
        options.append(f"train.micro_batch={max(1, ctx.batch.micro_batch // 2)} or smaller")
    recomputation = ctx.config.train.recomputation
    if not recomputation.full or recomputation.every > 1:
        options.append("train.activation_checkpointing=full")
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
    budget_has_price,
    spares_have_repairs,
    precision_fits_device,
    offload_fits_stage,
    offload_to_nvme,
    kernels_can_be_compiled,
    memory_fits,
    host_fits,
    background_saves_fit,
)
