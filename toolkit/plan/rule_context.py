"""What a rule looks at. Parts that could not be settled are None; their own problem is reported already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import Problem, Severity
from toolkit.families import FAMILIES
from toolkit.families.base import FamilyTraits, ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan.types import BatchPlan, MemoryPlan, World


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    config: RunConfig
    world: World
    shape: ModelShape | None = None
    parameters: tuple[ParameterSpec, ...] = ()
    axes: Axes | None = None
    batch: BatchPlan | None = None
    memory: MemoryPlan | None = None

    @property
    def deepspeed(self) -> bool:
        return self.config.engine.name is EngineName.deepspeed

    @property
    def megatron(self) -> bool:
        return self.config.engine.name is EngineName.megatron

    @property
    def has_experts(self) -> bool:
        return self.traits is not None and self.traits.experts

    @property
    def traits(self) -> FamilyTraits | None:
        """Of the model's family; None where there is none, or none of that name."""
        family = FAMILIES.get(self.config.model.family or "")
        return None if family is None else family.traits

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.parameters)

    @property
    def sizes_are_free(self) -> bool:
        """Whether a remedy may suggest other sizes of the model. A pretrained model keeps its own."""
        return self.config.model.pretrained is None


Rule = Callable[[RuleContext], Iterator[Problem]]


def seen(config: RunConfig, *keys: str) -> str:
    """``zero.stage=3, parallel.pipeline=2``: keys with their values, as they would be typed."""
    return ", ".join(f"{key}={_typed(_value(config, key))}" for key in keys)


def refuse(config: RunConfig, keys: str, rule: str, remedy: str) -> Problem:
    """A problem about the space-separated ``keys``, the first of which is at fault."""
    names = keys.split()
    return Problem(names[0], seen(config, *names), rule, remedy)


def warn(config: RunConfig, keys: str, rule: str, remedy: str) -> Problem:
    names = keys.split()
    return Problem(names[0], seen(config, *names), rule, remedy, Severity.WARNING)


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def _typed(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return "null" if value is None else value
