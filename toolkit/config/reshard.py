"""Every key of ``launch/reshard.py``. The string under a field is its documentation; ``--help`` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from toolkit.config.checks import at_least
from toolkit.config.schema import Precision


class Action(Enum):
    convert = "convert"
    plan = "plan"
    inspect = "inspect"
    verify = "verify"
    diff = "diff"


class Format(Enum):
    """Formats that a checkpoint can be written in."""

    native = "native"
    deepspeed = "deepspeed"
    universal = "universal"
    megatron = "megatron"
    huggingface = "huggingface"


class Stage(Enum):
    stage0 = "stage0"
    stage1 = "stage1"
    stage2 = "stage2"
    stage3 = "stage3"


@dataclass(kw_only=True, slots=True)
class TargetParallelConfig:
    data: int = 1
    """Data-parallel ranks that the target is laid out for."""
    tensor: int = 1
    """Ranks that share each matrix."""
    pipeline: int = 1
    """Stages that the layers are cut into."""
    expert: int = 1
    """Ranks that the experts are spread over."""

    def __post_init__(self) -> None:
        at_least("target.parallel", 1, data=self.data, tensor=self.tensor, pipeline=self.pipeline, expert=self.expert)


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    path: str | None = None
    """Folder that is made. ``target=PATH`` is short for it."""
    format: Format = Format.native
    """native (this toolkit's, of no layout), deepspeed, universal (DeepSpeed's), megatron (torch_dist), huggingface."""
    parallel: TargetParallelConfig = field(default_factory=TargetParallelConfig)
    zero: Stage = Stage.stage1
    """deepspeed: the ZeRO stage whose files are written."""
    precision: Precision | None = None
    """Of the weights; 16 bits have fp32 master weights beside them. Null: as the source's weights."""
    optimizer: bool | None = None
    """Whether the optimizer's state is written. Null: where the source has it; in huggingface, only if asked."""
