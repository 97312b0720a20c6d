"""What deciding yields. Everything is frozen: after ``make_plan`` nothing about a run is derived again."""

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
    """The machines a run is planned for: found by ``cluster/environment.py`` or described by ``cluster.*``."""

    ranks: int
    ranks_per_node: int
    device: Device
    gpu: str | None = None  # a name in plan/devices.py; None: unknown, then no memory verdict and no MFU
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    has_libaio: bool = False
    has_compiler: bool = False

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step: positions ``first_sample .. first_sample + size`` of the run's order."""

    step: int
    first_sample: int
    size: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class RampStage:
    """Global batches of one size: ``steps`` of them, the last stage without end (``steps`` is None)."""

    size: int
    first_step: int
    first_sample: int
    steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    micro_batch: int  # sequences
    global_batch: int  # sequences, after the ramp
    data_parallel: int
    stages: tuple[RampStage, ...]  # one where there is no ramp

    def at(self, step: int) -> GlobalBatch:
        """The global batch of optimizer step ``step`` (the first is 0), in O(stages)."""
        stage = next(stage for stage in reversed(self.stages) if stage.first_step <= step)
        first = stage.first_sample + (step - stage.first_step) * stage.size
        return GlobalBatch(step, first, stage.size, stage.size // (self.micro_batch * self.data_parallel))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the fullest rank. Formulas with their sources: plan/memory.py."""

    parameters: int
    gradients: int
    optimizer: int  # master weights and moments
    activations: int | None  # None for model.target
    host: int  # what offload keeps in host memory
    nvme: int
    buffers: int = 0  # what the engine works with besides: reduction buckets, gathered parameters

    @property
    def states(self) -> int:
        """What must fit whatever the batch is."""
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
        """What losses are means over, in the plural; what speed is counted in."""
        return "images" if self.config.data.images else "tokens"

    @property
    def per(self) -> str:
        return "an image" if self.config.data.images else "a token"

    @property
    def units_per_step(self) -> int:
        """Tokens or images of one optimizer step, masked ones included."""
        return self.batch.global_batch * self.units_per_sample

    @property
    def units_per_sample(self) -> int:
        return 1 if self.config.data.images else self.config.train.sequence_length
