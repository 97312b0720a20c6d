"""Every key of ``launch/reshard.py``. The string under a field is its documentation, which ``--help`` shows.

Two tables list which keys each action and format uses; a key without effect is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from toolkit.config.checks import at_least, check
from toolkit.config.model import ModelConfig
from toolkit.config.schema import Precision
from toolkit.errors import ConfigError, Problem


class ReshardAction(Enum):
    convert = "convert"
    plan = "plan"
    inspect = "inspect"
    verify = "verify"
    diff = "diff"


class TargetFormat(Enum):
    """Formats that a checkpoint can be written in."""

    native = "native"
    deepspeed = "deepspeed"
    universal = "universal"
    megatron = "megatron"
    huggingface = "huggingface"


class TargetZeroStage(Enum):
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
        at_least(
            "target.parallel",
            1,
            data=self.data,
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
        )


@dataclass(kw_only=True, slots=True)
class TargetOptimConfig:
    """Settings that DeepSpeed and Megatron-core load from a checkpoint instead of the run. Null: as
    recorded in the source."""

    lr: float | None = None
    """The learning rate."""
    betas: list[float] | None = None
    """Adam's averaging factors of gradient and squared gradient."""
    eps: float | None = None
    """Adam's epsilon."""
    weight_decay: float | None = None
    """Weight decay of the parameters that have it: those of more than one dim."""


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    path: str | None = None
    """Folder to create; with action=diff, the checkpoint to compare with. ``target=PATH`` is short for it."""
    format: TargetFormat = TargetFormat.native
    """native (this toolkit's, layout-independent), deepspeed, universal (DeepSpeed's), megatron
    (torch_dist), huggingface."""
    parallel: TargetParallelConfig = field(default_factory=TargetParallelConfig)
    optim: TargetOptimConfig = field(default_factory=TargetOptimConfig)
    zero: TargetZeroStage = TargetZeroStage.stage1
    """The ZeRO stage whose files are written. Other formats have files for any."""
    precision: Precision | None = None
    """Precision of the weights; 16-bit weights get fp32 master weights. Null: as the source's weights."""
    optimizer: bool | None = None
    """Whether the optimizer's state is written. Null: if the source has it; for huggingface, false."""


@dataclass(kw_only=True, slots=True)
class ReshardConfig:
    """One conversion or inspection of a checkpoint."""

    source: str | None = None
    """A checkpoint in any format, or a path that leads to one: a run's folder, a folder with a tracker file
    (latest, ...), or the URL of a checkpoint in a store (s3://...)."""
    action: ReshardAction = ReshardAction.convert
    """convert; plan (bytes, reads, memory, time; moves nothing); inspect (describe source); verify (check
    every byte of source); diff (compare source with target, tensor by tensor)."""
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    workers: int = 2
    """Threads that read, check and write at once."""
    examine: bool = True
    """convert: reject non-finite values, negative second moments, and weights that differ from their cast
    master weights."""
    rate: float | None = None
    """plan: gigabytes a second that can be copied there, for the estimate of time. Null: measured by
    copying 64 MiB, once."""

    def __post_init__(self) -> None:
        at_least("", 1, workers=self.workers)
        check(
            self.rate is None or self.rate > 0,
            "rate",
            self.rate,
            "rate is more than 0 GB/s",
            "write rate=0.5",
        )


# Keys that have an effect, in addition to source, action and model. A section stands for all its keys.
ACTION_KEYS: Mapping[ReshardAction, tuple[str, ...]] = {
    ReshardAction.convert: ("target", "workers", "examine"),
    ReshardAction.plan: ("target", "workers", "examine", "rate"),
    ReshardAction.inspect: (),
    ReshardAction.verify: ("workers",),
    ReshardAction.diff: ("target.path", "workers"),
}
# Keys of ``target`` that have an effect, in addition to path and format.
FORMAT_KEYS: Mapping[TargetFormat, tuple[str, ...]] = {
    TargetFormat.native: ("precision", "optimizer"),
    TargetFormat.deepspeed: (
        "parallel.data",
        "parallel.tensor",
        "parallel.pipeline",
        "zero",
        "precision",
        "optimizer",
        "optim",
    ),
    TargetFormat.universal: (),  # whole fp32 tensors with optimizer state: one folder for every layout
    TargetFormat.megatron: (
        "parallel.tensor",
        "parallel.pipeline",
        "parallel.expert",
        "precision",
        "optimizer",
        "optim",
    ),
    TargetFormat.huggingface: ("precision", "optimizer"),
}
_ALWAYS = ("source", "action", "model")
_NEEDS_TARGET = (ReshardAction.convert, ReshardAction.diff)


def check_together(config: ReshardConfig, typed: Iterable[str]) -> None:
    """Reject inconsistent settings.

    Args:
        config: The settings.
        typed: The overrides as written by the user: ``KEY=VALUE``.

    Raises:
        ConfigError: Lists every problem.
    """
    problems = [problem for text in typed for problem in _unused_key(config, text)]
    action = f"action={config.action.name}"
    if config.source is None:
        problems.append(
            Problem(
                "source", "source=null", "a source is required", "write source=PATH; --help shows examples"
            )
        )
    if config.target.path is None and config.action in _NEEDS_TARGET:
        use = (
            "the checkpoint to compare with"
            if config.action is ReshardAction.diff
            else "the folder to create"
        )
        problems.append(Problem("target", "target=null", f"{action} needs {use}", "write target=PATH"))
    if config.model.target is not None or config.model.arguments:
        problems.append(
            Problem(
                "model.target",
                f"model.target={config.model.target}",
                "a custom model has only the names in its checkpoint",
                "remove it: native checkpoints contain everything",
            )
        )
    if problems:
        raise ConfigError(*problems)


def _unused_key(config: ReshardConfig, text: str) -> Iterator[Problem]:
    """Yield a problem if ``text`` sets a key that has no effect."""
    name = text.lstrip("+~").partition("=")[0]
    action, form = config.action.name, config.target.format
    of_action = ACTION_KEYS[config.action]
    if not _matches_any(name, (*_ALWAYS, *of_action)):
        uses = ", ".join(("source", *of_action, "model"))
        yield Problem(
            name,
            f"{text} with action={action}",
            f"action={action} uses {uses}",
            "remove it, or choose another action",
        )
    elif name.startswith("target.") and "target" in of_action:
        counting = FORMAT_KEYS[form]
        if not _matches_any(name, [f"target.{key}" for key in ("path", "format", *counting)]):
            yield Problem(
                name,
                f"{text} with target.format={form.name}",
                f"{form.name} takes "
                f"{', '.join(f'target.{key}' for key in counting) or 'no key except target.path'}",
                "remove it: it has no effect on what is written",
            )


def _matches_any(name: str, keys: Iterable[str]) -> bool:
    return any(name == key or name.startswith(key + ".") or key.startswith(name + ".") for key in keys)
