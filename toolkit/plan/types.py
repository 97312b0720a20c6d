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


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The machines of a run: detected by ``cluster/environment.py`` or described by ``cluster.*``."""

    ranks: int
    ranks_per_node: int
    device: Device
    gpu: str | None = None  # a name in plan/devices.py; None: unknown
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    has_libaio: bool = False
    has_compiler: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


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

    def at(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step ``step``; the first step is 0."""
        stage = next(stage for stage in reversed(self.stages) if stage.first_step <= step)
        first = stage.first_sample + (step - stage.first_step) * stage.size
        return GlobalBatch(step, first, stage.size, stage.size // (self.micro_batch * self.data_parallel))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the rank with the most memory. The formulas and their sources are in plan/memory.py."""

    parameters: int
    gradients: int
    optimizer: int  # master weights and moments
    activations: int | None  # None for model.target
    host: int  # offloaded to host memory
    nvme: int
    buffers: int = 0  # reduction buckets, gathered parameters

    @property
    def states(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def device_total(self) -> int:
        return self.states + self.buffers + (self.activations or 0)


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
    memory: MemoryPlan | None  # None for model.target
    deepspeed: Mapping[str, Any] | None  # the exact dictionary given to deepspeed.initialize
    megatron: Mapping[str, Mapping[str, Any]] | None  # sections of Megatron-core's settings: plan/megatron.py
    warnings: tuple[Problem, ...]

    @property
    def unit(self) -> str:
        """The unit of mean losses and of throughput, in the plural."""
        return "images" if self.config.data.images else "tokens"

    @property
    def per(self) -> str:
        return "an image" if self.config.data.images else "a token"

    @property
    def units_per_step(self) -> int:
        """Tokens or images of one optimizer step, including masked tokens."""
        return self.batch.global_batch * self.units_per_sample

    @property
    def units_per_sample(self) -> int:
        return 1 if self.config.data.images else self.config.train.sequence_length
