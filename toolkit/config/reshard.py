"""Every key of ``launch/reshard.py``. The string under a field is its documentation; ``--help`` shows it.

Which keys count for which action and format is said here, in two tables: a key that was written where nothing
uses it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from toolkit.config.checks import at_least, check
from toolkit.config.schema import ModelConfig, Precision
from toolkit.errors import ConfigError, Problem


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
    """What DeepSpeed and Megatron-core take over from a checkpoint, whatever the run says. Null: as the
    source says.
    """

    lr: float | None = None
    """The learning rate."""
    betas: list[float] | None = None
    """Adam's averaging factors of gradient and squared gradient."""
    eps: float | None = None
    """Adam's epsilon."""
    weight_decay: float | None = None
    """Of the parameters that decay: those of more than one dim."""


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    path: str | None = None
    """Folder that is made; with action=diff, the checkpoint to compare with. ``target=PATH`` is short for it.
    """
    format: Format = Format.native
    """native (this toolkit's, of no layout), deepspeed, universal (DeepSpeed's), megatron (torch_dist),
    huggingface.
    """
    parallel: TargetParallelConfig = field(default_factory=TargetParallelConfig)
    optim: TargetOptimConfig = field(default_factory=TargetOptimConfig)
    zero: Stage = Stage.stage1
    """The ZeRO stage whose files are written. Other formats have files for any."""
    precision: Precision | None = None
    """Of the weights; 16 bits have fp32 master weights beside them. Null: as the source's weights."""
    optimizer: bool | None = None
    """Whether the optimizer's state is written. Null: where the source has it; in huggingface, only if asked.
    """


@dataclass(kw_only=True, slots=True)
class ReshardConfig:
    """One conversion, or one look at a checkpoint."""

    source: str | None = None
    """A checkpoint in any format, or what points to one: a run's folder, or a folder with a tracker file
    (latest, ...).
    """
    action: Action = Action.convert
    """convert; plan (bytes, reads, memory, time: moves nothing); inspect (what source is); verify (look at
    every byte of source); diff (source against target, tensor by tensor).
    """
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    workers: int = 2
    """Threads that read, check and write at once."""
    examine: bool = True
    """convert: refuse values that no sound run has: not finite, negative averages of squares, weights that
    are not their masters cast.
    """
    rate: float | None = None
    """plan: gigabytes a second that can be copied there, for the estimate of time. Null: measured by copying
    64 MiB, once.
    """

    def __post_init__(self) -> None:
        at_least("", 1, workers=self.workers)
        check(
            self.rate is None or self.rate > 0,
            "rate",
            self.rate,
            "rate is more than 0 GB/s",
            "write rate=0.5",
        )


# Keys that count, beside source, action and model. A section stands for all of its keys.
OF_ACTION: Mapping[Action, tuple[str, ...]] = {
    Action.convert: ("target", "workers", "examine"),
    Action.plan: ("target", "workers", "examine", "rate"),
    Action.inspect: (),
    Action.verify: ("workers",),
    Action.diff: ("target.path", "workers"),
}
# Keys of ``target`` that count, beside path and format.
OF_FORMAT: Mapping[Format, tuple[str, ...]] = {
    Format.native: ("precision", "optimizer"),
    Format.deepspeed: (
        "parallel.data",
        "parallel.tensor",
        "parallel.pipeline",
        "zero",
        "precision",
        "optimizer",
        "optim",
    ),
    Format.universal: (),  # whole tensors in fp32, with the optimizer's state: one folder for every layout
    Format.megatron: (
        "parallel.tensor",
        "parallel.pipeline",
        "parallel.expert",
        "precision",
        "optimizer",
        "optim",
    ),
    Format.huggingface: ("precision", "optimizer"),
}
_ALWAYS = ("source", "action", "model")
_NEEDS_TARGET = (Action.convert, Action.diff)


def check_together(config: ReshardConfig, typed: Iterable[str]) -> None:
    """Refuse what does not fit together.

    Args:
        typed: what the user wrote: ``KEY=VALUE``.

    Raises:
        ConfigError: with every such key.
    """
    problems = [problem for text in typed for problem in _idle(config, text)]
    action = f"action={config.action.name}"
    if config.source is None:
        problems.append(
            Problem("source", "source=null", "something is read", "write source=PATH; --help shows examples")
        )
    if config.target.path is None and config.action in _NEEDS_TARGET:
        use = "the checkpoint to compare with" if config.action is Action.diff else "the folder to make"
        problems.append(Problem("target", "target=null", f"{action} needs {use}", "write target=PATH"))
    if config.model.target is not None or config.model.arguments:
        problems.append(
            Problem(
                "model.target",
                f"model.target={config.model.target}",
                "a model of your own has no names but those of the checkpoint",
                "leave it out: native checkpoints say all",
            )
        )
    if problems:
        raise ConfigError(*problems)


def _idle(config: ReshardConfig, text: str) -> Iterator[Problem]:
    """The problem of a key that nothing uses, if ``text`` is one."""
    name = text.lstrip("+~").partition("=")[0]
    action, form = config.action.name, config.target.format
    of_action = OF_ACTION[config.action]
    if not _among(name, (*_ALWAYS, *of_action)):
        uses = ", ".join(("source", *of_action, "model"))
        yield Problem(
            name,
            f"{text} with action={action}",
            f"action={action} uses {uses}",
            "leave it out, or choose another action",
        )
    elif name.startswith("target.") and "target" in of_action:
        counting = OF_FORMAT[form]
        if not _among(name, [f"target.{key}" for key in ("path", "format", *counting)]):
            yield Problem(
                name,
                f"{text} with target.format={form.name}",
                f"{form.name} takes "
                f"{', '.join(f'target.{key}' for key in counting) or 'no key beside target.path'}",
                "leave it out: it decides nothing of what is written",
            )


def _among(name: str, keys: Iterable[str]) -> bool:
    return any(name == key or name.startswith(key + ".") or key.startswith(name + ".") for key in keys)
