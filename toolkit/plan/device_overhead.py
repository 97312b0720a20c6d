"""Bytes on a GPU that no tensor of the run occupies: what nvidia-smi shows beyond torch's allocated memory.

    CUDA context     the driver's state and the loaded kernels of a process, more on newer GPUs
    NCCL             buffers of each communicator, from its first collective to the end of the run
    cuBLAS           a workspace of torch for each stream that multiplies matrices
    fragmentation    memory that torch's allocator has reserved and cannot use for the next tensor

On CPUs there is none of them, and the plan counts tensors only.

Sources: NVIDIA/nccl issue 964 (4 A100 with NVLink: 544 MiB for a communicator of two ranks, 688 MiB for more)
and issue 1685 (8 H100: the first all-to-all takes another 3.3 GB, because it connects every pair of ranks);
torch's aten/src/ATen/cuda/CublasHandlePool.cpp (getChosenWorkspaceSize) for cuBLAS; and for rounding and
fragmentation c10/cuda/CUDACachingAllocator.cpp: blocks are multiples of 512 bytes, and requests of more than
10 MiB are rounded up to 2 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolkit.config.schema import EngineName, RunConfig
from toolkit.layout.axes import Axes
from toolkit.plan.devices import BLACKWELL, HOPPER, Architecture, find_gpu
from toolkit.plan.types import Device, MemoryPlan, World

MIB = 2**20
# As nvidia-smi shows after a process has run its first kernels of torch, cuBLAS and NCCL (CUDA 12).
CUDA_CONTEXT = 450 * MIB
CUDA_CONTEXTS: Mapping[Architecture | None, int] = {HOPPER: 550 * MIB, BLACKWELL: 700 * MIB}
PAIR, RING, ALL_TO_ALL = 544 * MIB, 688 * MIB, 3300 * MIB
WORKSPACE, WORKSPACE_OF_HOPPER = 8320 * 1024, 32 * MIB
STREAMS = 2  # the default stream, and that of side computations
# Share of the bytes that are allocated and freed in every step. A process grows its expandable segments in
# place, page by page; without them freed blocks of one size are of no use for another size.
FRAGMENTATION = 0.1
FRAGMENTATION_OF_SEGMENTS = 0.04


def add_device_overhead(memory: MemoryPlan, config: RunConfig, world: World, axes: Axes) -> MemoryPlan:
    """Return ``memory`` with the bytes of the CUDA context, NCCL, cuBLAS and fragmentation on a GPU."""
    if world.device is not Device.CUDA:
        return memory
    gpu = find_gpu(world.gpu)
    architecture = None if gpu is None else gpu.architecture
    share = FRAGMENTATION_OF_SEGMENTS if uses_expandable_segments(config) else FRAGMENTATION
    return replace(
        memory,
        cuda_context=CUDA_CONTEXTS.get(architecture, CUDA_CONTEXT),
        nccl=nccl_bytes(config, axes),
        cublas=STREAMS * (WORKSPACE_OF_HOPPER if architecture in (HOPPER, BLACKWELL) else WORKSPACE),
        fragmentation=int(share * memory.working),
    )


def uses_expandable_segments(config: RunConfig) -> bool:
    """Return whether a rank on a GPU lets torch's allocator use expandable segments.

    They are incompatible with buffers that are registered with NCCL.
    """
    return not config.engine.megatron.get("nccl_ub")


def nccl_bytes(config: RunConfig, axes: Axes) -> int:
    """Return the bytes of NCCL's buffers on a rank: one communicator for each process group of more than one
    rank.

    All engines have one group of all ranks. DeepSpeed adds one for each axis other than data. Megatron-core
    has groups of data, data x context, tensor, pipeline, context and model (tensor x pipeline) ranks, and
    those of experts.
    """
    ranks = axes.data * axes.tensor * axes.pipeline * axes.context
    groups = [ranks]
    if config.engine.name is EngineName.megatron:
        groups += [axes.tensor, axes.pipeline, axes.context, axes.data * axes.context]
        groups += [axes.tensor * axes.pipeline] if axes.tensor > 1 and axes.pipeline > 1 else []
    elif config.engine.name is EngineName.deepspeed:
        others = [axes.tensor, axes.pipeline, axes.context]
        groups += [*others, axes.data] if max(others) > 1 else []
    found = sum((PAIR if size == 2 else RING) for size in groups if size > 1)
    return found + (ALL_TO_ALL if axes.expert > 1 else 0)
