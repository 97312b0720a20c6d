"""The input of a rule, and helpers that build its problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.config.keys import format_value
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import Problem, Severity
from toolkit.families.base import Family, FamilyTraits, ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan.hugging_face import HuggingFaceModel
from toolkit.plan.types import BatchPlan, Kernels, MemoryPlan, World


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """A run as far as it could be decided.

    Parts that could not be decided are None; their problem is reported already.
    """

    config: RunConfig
    world: World
    family: Family | None = None
    shape: ModelShape | None = None
    hugging_face_model: HuggingFaceModel | None = None  # of model.hf
    parameters: tuple[ParameterSpec, ...] = ()
    axes: Axes | None = None
    batch: BatchPlan | None = None
    memory: MemoryPlan | None = None
    state_bytes: int | None = None  # of a rank, that a save writes
    kernels: Kernels | None = None
    engine_problems: tuple[Problem, ...] = ()  # of engine.deepspeed.* and engine.megatron.*

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
        """FamilyTraits of the model's family; None if there is no family of that name."""
        return None if self.family is None else self.family.traits

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.parameters)

    @property
    def of_a_family(self) -> bool:
        return self.config.model.source_key == "model.family"

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None if they are not known."""
        described = self.hugging_face_model if self.shape is None else self.shape
        return None if described is None else described.vocab_size

    @property
    def max_position_embeddings(self) -> int | None:
        described = self.hugging_face_model if self.shape is None else self.shape
        return None if described is None else described.max_position_embeddings

    def size_key(self, name: str) -> str:
        """Return the key of the size ``name``, as a user types it for this kind of model."""
        prefixes = {"model.target": "+model.arguments", "model.hf.architecture": "+model.hf.config"}
        return f"{prefixes.get(self.config.model.source_key, 'model')}.{name}"

    @property
    def sizes_are_free(self) -> bool:
        """Whether a remedy may suggest other sizes of the model; a pretrained model has fixed sizes."""
        return self.config.model.pretrained is None


Rule = Callable[[RuleContext], Iterator[Problem]]


def format_keys(config: RunConfig, *keys: str) -> str:
    """``zero.stage=3, parallel.pipeline=2``: keys with their values, as a user would type them."""
    return ", ".join(f"{key}={format_value(_value(config, key))}" for key in keys)


def make_error(config: RunConfig, keys: str, rule: str, remedy: str) -> Problem:
    """Return an error about the space-separated ``keys``; the first one is at fault."""
    names = keys.split()
    return Problem(names[0], format_keys(config, *names), rule, remedy)


def make_warning(config: RunConfig, keys: str, rule: str, remedy: str) -> Problem:
    """Return a warning about the space-separated ``keys``; the first one is at fault."""
    names = keys.split()
    return Problem(names[0], format_keys(config, *names), rule, remedy, Severity.WARNING)


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value
