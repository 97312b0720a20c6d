"""The decisions of adopting a configuration: one ``AdoptedKey`` for each key of each file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    DEEPSPEED = "DeepSpeed JSON"
    TRAINER = "TrainingArguments"
    ACCELERATE = "accelerate YAML"
    MEGATRON = "Megatron-LM arguments"


class Outcome(StrEnum):
    EXACT = "mapped exactly"
    CHANGED = "mapped with a changed meaning"
    DEFAULT = "already the default"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Source:
    """The keys of one file by dotted name. ``conditions`` are those of keys that a script sets in an if."""

    format: Format
    name: str
    keys: Mapping[str, Any]
    conditions: Mapping[str, str] = field(default_factory=dict)


Targets = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one key, without its name. A target is a key or group of this toolkit with its value."""

    outcome: Outcome
    targets: Targets = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class AdoptedKey:
    """The decision about one key of a file.

    Attributes:
        source: the file's name; empty for a default of the other tool that no key sets.
        key, value: as in the file, with a dotted name.
        targets: keys and groups of this toolkit, with their values.
        note: the changed meaning, or the reason of a refusal.
    """

    source: str
    key: str
    value: Any
    outcome: Outcome
    targets: Targets = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts of all files together.

    Attributes:
        keys: the keys of the file that is being decided.
        formats: the formats of all files.
        ranks: number of processes, if a file or the user names it.
        micro_batch, accumulation, global_batch: as far as files name them.
        model_ranks: ranks that share one copy of the model (tensor x pipeline x context).
        steps: optimizer steps of the run, if a file names them.
    """

    keys: Mapping[str, Any]
    formats: frozenset[Format]
    ranks: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    model_ranks: int = 1
    steps: int | None = None

    @property
    def data_ranks(self) -> int | None:
        return None if self.ranks is None else max(1, self.ranks // self.model_ranks)


Rule = Callable[[Any, Context], Decision]

WARMUP = "the first step has lr / steps of warm-up, and not 0: the curve is one step ahead"


def exact(*targets: tuple[str, Any], note: str = "") -> Decision:
    return Decision(Outcome.EXACT, targets, note)


def changed(note: str, *targets: tuple[str, Any]) -> Decision:
    return Decision(Outcome.CHANGED, targets, note)


def default(note: str = "") -> Decision:
    return Decision(Outcome.DEFAULT, (), note)


def refused(reason: str) -> Decision:
    return Decision(Outcome.REFUSED, (), reason)


# -- rules that tables are made of


def same(target: str, note: str = "") -> Rule:
    """Return a rule for a key that means the same as ``target``; with a ``note``, for one whose meaning
    changes.
    """
    return lambda value, ctx: (
        default("not set")
        if value is None
        else changed(note, (target, value))
        if note
        else exact((target, value))
    )


def reject(reason: str) -> Rule:
    """Refuse every value."""
    return lambda value, ctx: refused(reason)


def expect(*values: Any, otherwise: str) -> Rule:
    """Return a rule that accepts only these values, which are what this toolkit does by default."""
    return lambda value, ctx: default() if _plain(value) in values else refused(otherwise)


def choose(by_value: Mapping[Any, Targets], otherwise: str) -> Rule:
    """Return a rule that looks up the targets of a value; other values are refused."""

    def rule(value: Any, ctx: Context) -> Decision:
        found = by_value.get(_plain(value))
        if found is None:
            return refused(otherwise)
        return exact(*found) if found else default()

    return rule


def _plain(value: Any) -> Any:
    """Return text in lower case, and lists as tuples, so that values can be compared and looked up."""
    if isinstance(value, str):
        return value.lower()
    return tuple(value) if isinstance(value, list) else str(value) if isinstance(value, dict) else value
