"""Decide what becomes of each key of each file: pure, without reading or writing files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.adopt import accelerate, deepspeed, megatron, trainer
from toolkit.adopt.batch import read_context
from toolkit.adopt.shell import unresolved
from toolkit.adopt.types import AdoptedKey, Context, Decision, Format, Outcome, Source, refused
from toolkit.errors import ConfigError, Problem

DECIDE: Mapping[Format, Callable[[str, Any, Context], Decision]] = {
    Format.DEEPSPEED: deepspeed.decide,
    Format.TRAINER: trainer.decide,
    Format.ACCELERATE: accelerate.decide,
    Format.MEGATRON: megatron.decide,
}
FP16_AND_BF16_NEED_A_STAGE = (
    "in 16 bits DeepSpeed's stage 0 takes a hidden step at the start; stage 1 computes what it should"
)


@dataclass(frozen=True, slots=True)
class Adoption:
    """The decisions about all keys of all files.

    Attributes:
        keys: one for each key of the files, in order.
        unset_defaults: defaults of the other tools that no key sets.
        context: facts of all files.
    """

    keys: tuple[AdoptedKey, ...]
    unset_defaults: tuple[AdoptedKey, ...]
    context: Context

    @property
    def settings(self) -> dict[str, Any]:
        """Keys and groups of the experiment with their values. A key of a file wins over a default."""
        found: dict[str, Any] = {}
        for key in (*self.unset_defaults, *self.keys):
            found |= dict(key.targets)
        return found

    def count(self, outcome: Outcome) -> int:
        return sum(key.outcome is outcome for key in self.keys)


def adopt(sources: Sequence[Source], ranks: int | None = None) -> Adoption:
    """Decide about every key of ``sources``.

    Args:
        ranks: number of processes; None: as the files name it.

    Raises:
        ConfigError: two files give a setting different values, or no family here has the model.
    """
    known = [replace(source, keys=_known(source)) for source in sources]
    context = read_context(known, ranks)
    keys = [
        _decide(source, name, value, replace(context, keys=plain.keys))
        for source, plain in zip(sources, known, strict=True)
        for name, value in source.keys.items()
    ]
    _check_agreement(keys)
    _check_family(known)
    decided = {target for key in keys for target, _ in key.targets}
    unset_defaults = [
        key for key in _unset_defaults(known, context) if not {name for name, _ in key.targets} <= decided
    ]
    adoption = Adoption(tuple(keys), tuple(unset_defaults), context)
    return _with_engine(adoption)


def refuse_keys(adoption: Adoption, problems: Sequence[Problem]) -> Adoption:
    """``adoption`` without the engines' keys that the plan of this run refuses: {key: reason}."""
    reasons = {problem.key: problem.rule for problem in problems}

    def settled(key: AdoptedKey) -> AdoptedKey:
        reason = next((reasons[name] for name, _ in key.targets if name in reasons), None)
        return key if reason is None else replace(key, outcome=Outcome.REFUSED, targets=(), note=reason)

    return replace(adoption, keys=tuple(settled(key) for key in adoption.keys))


def _known(source: Source) -> dict[str, Any]:
    """Return the keys whose values do not depend on a script's environment, arguments or conditions."""
    script = source.format is Format.MEGATRON
    return {
        name: value
        for name, value in source.keys.items()
        if name not in source.conditions and not (script and unresolved(value))
    }


def _decide(source: Source, name: str, value: Any, context: Context) -> AdoptedKey:
    condition, variable = source.conditions.get(name), unresolved(value)
    if condition is not None:
        decision = refused(f"the script adds it only in: {condition[:80]}")
    elif variable is not None and source.format is Format.MEGATRON:
        decision = refused(f"the script takes {variable} from its arguments or its environment")
    else:
        decision = DECIDE[source.format](name, value, context)
    return AdoptedKey(source.name, name, value, decision.outcome, decision.targets, decision.note)


def _unset_defaults(sources: Sequence[Source], context: Context) -> list[AdoptedKey]:
    """Return defaults of the other tools. TrainingArguments decide what a DeepSpeed configuration leaves
    open.
    """
    found: list[AdoptedKey] = []

    def add(name: str, value: Any, decision: Decision) -> None:
        found.append(AdoptedKey("", name, value, decision.outcome, decision.targets, decision.note))

    for source in sources:
        ctx = replace(context, keys=source.keys)
        if source.format is Format.DEEPSPEED and Format.TRAINER not in context.formats:
            for name, value, decision in deepspeed.unset_defaults(source.keys):
                add(name, value, decision)
        elif source.format is Format.TRAINER:
            given = {**trainer.DEFAULTS, **source.keys}
            for name, value in trainer.DEFAULTS.items():
                if name not in source.keys:
                    add(
                        name,
                        value,
                        trainer.decide(name, value, replace(_with_default_batch(ctx), keys=given)),
                    )
        elif source.format is Format.MEGATRON:
            for name, value, decision in megatron.unset_defaults(ctx):
                add(name, value, decision)
    return found


def _with_default_batch(ctx: Context) -> Context:
    return replace(ctx, micro_batch=ctx.micro_batch or trainer.DEFAULTS["per_device_train_batch_size"])


def _with_engine(adoption: Adoption) -> Adoption:
    """Name the engine, and a ZeRO stage if 16-bit training under DeepSpeed needs one."""
    formats, settings = adoption.context.formats, adoption.settings
    more: list[AdoptedKey] = []

    def add(note: str, *targets: tuple[str, Any]) -> None:
        more.append(AdoptedKey("", targets[0][0], targets[0][1], Outcome.EXACT, targets, note))

    model_ranks = math.prod(settings.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context"))
    if adoption.context.ranks is not None and "train.global_batch" not in settings:
        data_ranks = max(1, adoption.context.ranks // model_ranks)
        add("the files name no batch: one sequence per data rank", ("train.global_batch", data_ranks))
    engine = settings.get("engine") or ("megatron" if Format.MEGATRON in formats else "deepspeed")
    if "engine" not in settings:
        add("", ("engine", engine))
    if (
        engine == "deepspeed"
        and settings.get("precision") in ("bf16", "fp16")
        and settings.get("zero", "stage0") == "stage0"
    ):
        keys = tuple(
            replace(
                key,
                outcome=Outcome.CHANGED,
                note=FP16_AND_BF16_NEED_A_STAGE,
                targets=tuple((name, "stage1" if name == "zero" else value) for name, value in key.targets),
            )
            if ("zero", "stage0") in key.targets
            else key
            for key in adoption.keys
        )
        if keys == adoption.keys:
            add(FP16_AND_BF16_NEED_A_STAGE, ("zero", "stage1"))
        adoption = replace(adoption, keys=keys)
    return replace(adoption, unset_defaults=(*adoption.unset_defaults, *more))


def _check_agreement(keys: Sequence[AdoptedKey]) -> None:
    seen: dict[str, tuple[Any, AdoptedKey]] = {}
    problems = []
    for key in keys:
        for target, value in key.targets:
            other = seen.setdefault(target, (value, key))
            if other[0] != value:
                first = other[1]
                problems.append(
                    Problem(
                        target,
                        f"{first.key}={first.value} in {first.source}, {key.key}={key.value} in {key.source}",
                        f"all files give {target} one value",
                        f"correct one ({target}={other[0]} or {value}), or write auto in the DeepSpeed JSON",
                    )
                )
    if problems:
        raise ConfigError(*problems)


def _check_family(sources: Sequence[Source]) -> None:
    for source in sources:
        if source.format is Format.MEGATRON:
            name, missing = megatron.family(source.keys)
            if name is None:
                raise ConfigError(
                    Problem(
                        "model",
                        f"{source.name}: {missing}",
                        "the families are gpt2, llama, qwen2, qwen3 and mixtral",
                        "change these arguments, add a family (docs/families.md), or train your own module: "
                        "model=custom model.target=my.package.Model",
                    )
                )
