"""The plan of a run and its parts, all frozen. After ``make_plan`` nothing about a run is decided again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from toolkit.config.schema import RunConfig
from toolkit.errors import Problem
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan.trace import ModuleTrace, NotTraced


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The machines of a run: detected by ``cluster/world/environment.py`` or described by ``cluster.*``."""

    ranks: int
    ranks_per_node: int
    device: Device
    gpu: str | None = None  # a name in plan/devices.py; None: unknown
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    has_libaio: bool = False
    has_compiler: bool = False
    lacking_for_compile: tuple[str, ...] = ()  # of what torch.compile needs: INSTALL in plan/rules_compile.py
    has_nvcc: bool = False  # CUDA's compiler, of the same major version as torch's CUDA
    nvcc: str | None = None  # its version of CUDA, if it is known
    torch_cuda: str | None = None  # the version of CUDA that torch was built with, if it is known
    transformer_engine: str | None = None  # the installed version; plan/transformer_engine.py has the range

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def hardware(self) -> str:
        """The kind of devices, for people."""
        return self.gpu or "GPUs of unknown kind" if self.device is Device.CUDA else "CPU ranks"


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step: ``first_sample .. first_sample + size`` in the run's order."""

    step: int
    first_sample: int
    size: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class RampStage:
    """``steps`` optimizer steps with global batches of one size; ``steps`` is None in the last stage."""

    size: int
    first_step: int
    first_sample: int
    steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    micro_batch: int  # sequences
    global_batch: int  # sequences, after the ramp
    data_parallel: int
    stages: tuple[RampStage, ...]  # one if there is no ramp

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step after the ramp."""
        return self._micro_batches(self.global_batch)

    @property
    def accumulations(self) -> tuple[int, ...]:
        """Micro-batches of a rank in a step of each stage."""
        return tuple(self._micro_batches(stage.size) for stage in self.stages)

    def at(self, step: int) -> GlobalBatch:
        """Return the global batch of optimizer step ``step``; the first step is 0."""
        stage = next(stage for stage in reversed(self.stages) if stage.first_step <= step)
        first = stage.first_sample + (step - stage.first_step) * stage.size
        return GlobalBatch(step, first, stage.size, self._micro_batches(stage.size))

    def _micro_batches(self, size: int) -> int:
        return size // (self.micro_batch * self.data_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the rank with the most memory, at the peak of a step.

    Attributes:
        parameters, gradients, optimizer: model states (plan/memory_zero.py, plan/memory_megatron.py).
        activations: what the backward pass needs (plan/activations.py, plan/activations_megatron.py); None if
            it is unknown, as for a model without a family that was not traced.
        host, nvme: offloaded there.
        buffers: reduction buckets, and parameters or activations that ranks have gathered.
        temporaries: gradients inside a block, copies in the optimizer's step (plan/temporaries.py). These and
            the following are planned for GPUs only.
        messages: activations and gradients on their way between pipeline stages (plan/temporaries.py).
        cuda_context, nccl, cublas, fragmentation: what no tensor occupies (plan/device_overhead.py).
    """

    parameters: int
    gradients: int
    optimizer: int  # master weights and moments
    activations: int | None
    host: int
    nvme: int
    buffers: int = 0
    temporaries: int = 0
    messages: int = 0
    cuda_context: int = 0
    nccl: int = 0
    cublas: int = 0
    fragmentation: int = 0

    @property
    def states(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def working(self) -> int:
        """Bytes of tensors that are allocated and freed in every step."""
        return self.buffers + (self.activations or 0) + self.temporaries + self.messages

    @property
    def allocated(self) -> int:
        """Bytes of tensors: what ``torch.cuda.max_memory_allocated`` measures."""
        return self.states + self.working + self.cublas

    @property
    def device_total(self) -> int:
        """Bytes that the process needs on the device: what nvidia-smi shows."""
        return self.allocated + self.fragmentation + self.cuda_context + self.nccl


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The decision on how checkpoints are written (plan/saves.py).

    Attributes:
        background: whether training continues while a save is written from a copy in host memory.
        reason: for it, as half a sentence.
        copy_bytes: of the copy on each rank; 0 without one, or if it is not known.
        staging_bytes: the most that a rank copies; one with more state saves in the foreground.
        snapshot_bytes: host memory that snapshots take for each rank of a node; 0 without them, or if not
            known.
    """

    background: bool
    reason: str
    copy_bytes: int
    staging_bytes: int
    snapshot_bytes: int


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """``name`` of an implementation, and the ``reason`` for it as half a sentence."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The implementations that a run uses (plan/kernels.py).

    Attributes:
        layers: who implements the decoder layers.
        attention: the attention kernel.
        loss: how the loss is computed from hidden states.
        compile: what torch.compile compiles.
        optimizer: the implementation of the optimizer's update.
    """

    layers: KernelChoice
    attention: KernelChoice
    loss: KernelChoice
    compile: KernelChoice
    optimizer: KernelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    config: RunConfig
    world: World
    axes: Axes
    identity: str  # 8 hex digits
    run_dir: str
    batch: BatchPlan
    shape: ModelShape | None  # None for model.target
    parameters: tuple[ParameterSpec, ...]  # empty for model.target
    vocab_size: int | None  # rows of the embedding; None if they are not known
    memory: MemoryPlan | None  # None for model.target without a trace
    kernels: Kernels
    saves: SavePlan
    deepspeed: Mapping[str, Any] | None  # the exact dictionary given to deepspeed.initialize
    megatron: Mapping[str, Mapping[str, Any]] | None  # sections of Megatron-core's settings: plan/megatron.py
    warnings: tuple[Problem, ...]
    task_unit: str | None = None  # of task.target, in the plural; the run sets it once it has the class
    flops_per_unit: float | None = None  # of task.target
    trace: ModuleTrace | NotTraced | None = None  # of a model without a family; None if it was not tried

    @property
    def known_parameters(self) -> tuple[ParameterSpec, ...]:
        """``parameters``, or those of the trace; empty if neither is known."""
        if self.parameters or not isinstance(self.trace, ModuleTrace):
            return self.parameters
        return self.trace.parameters

    @property
    def unit(self) -> str:
        """The unit of mean losses and of throughput, in the plural."""
        if self.task_unit is not None:
            return self.task_unit
        if self.config.task.target is None and self.config.data.is_arrays:
            return "images"
        return "tokens" if self.config.task.target is None and self.config.data.is_text else "samples"

    @property
    def loss_unit(self) -> str:
        """The unit of mean losses, for people."""
        unit = self.unit.removesuffix("s")
        per = f"an {unit}" if unit[0] in "aeiou" else f"a {unit}"
        return f"nats {per}" if self.unit in ("tokens", "images") else per

    @property
    def units_per_step(self) -> int:
        """Tokens, images or samples of one optimizer step, including masked tokens."""
        return self.batch.global_batch * self.units_per_sample

    @property
    def units_per_sample(self) -> int:
        return self.config.train.sequence_length if self.unit == "tokens" else 1
