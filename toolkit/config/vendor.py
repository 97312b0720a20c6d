"""The engines' own keys, ``+engine.deepspeed.a.b=v`` and ``+engine.megatron.x=v``: refused where they are unknown, removed, of the
wrong type, or derived.

DeepSpeed ignores unknown top-level keys silently, so every key is checked against the schema of the installed version, which
``vendors/`` reads from its source. A key that the plan derives is refused by naming the run's own key: one thing is said in one place.
What is derived, and why, stands in ``vendor_deepspeed.py`` and ``vendor_megatron.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.config import vendor_deepspeed, vendor_megatron
from toolkit.config.keys import flatten
from toolkit.config.schema import EngineName, RunConfig
from toolkit.config.vendors.cache import deepspeed_schema
from toolkit.config.vendors.node import Node
from toolkit.errors import Problem

DTYPES = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """An engine with keys of its own.

    Attributes:
        schema: its keys; None where it is not installed.
        own: its key -> the run's own key with the same meaning and values.
        derived: a key or section that is not given here -> (why, what to do).
        instead: a removed key -> what does its work now; without an entry, nothing does.
        dtype_keys: keys whose values its functions check, which the schema does not see.
    """

    engine: EngineName
    title: str
    install: str
    schema: Callable[[], Node | None]
    own: Mapping[str, str]
    derived: Mapping[str, tuple[str, str]]
    instead: Mapping[str, str] = field(default_factory=dict)
    dtype_keys: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        return f"engine.{self.engine.value}"

    def given(self, config: RunConfig) -> dict[str, Any]:
        keys: dict[str, Any] = getattr(config.engine, self.engine.value)
        return keys

    def not_selected(self, config: RunConfig) -> Iterator[Problem]:
        for name, value in flatten(self.given(config)).items() if self.given(config) else ():
            key = f"{self.root}.{name}"
            yield Problem(
                key,
                f"{key}={show(value)}, engine.name={config.engine.name.value}",
                "keys of an engine that does not run have no effect",
                f"leave it out, or write engine={self.engine.value}",
            )

    def check(self, given: Mapping[Any, Any], schema: Node, above: str = "") -> Iterator[Problem]:
        for part, value in given.items():
            name = f"{above}{part}"
            node = (schema.fields or {}).get(str(part))
            if isinstance(value, Mapping) and (name in self.own or name in self.derived):
                for leaf, inner in flatten(value, name + ".").items():
                    yield self._derived(leaf, name, inner)
            elif name in self.own or name in self.derived:
                yield self._derived(name, name, value)
            elif node is None:
                if not schema.open:
                    yield self._unknown(name, value, schema, above)
            elif node.removed is not None:
                yield self.problem(
                    name,
                    value,
                    f"{self.title} has it no longer: {_first_sentence(node.removed)}",
                    self.instead.get(name, "leave it out"),
                )
            elif node.deprecated is not None or node.internal:
                why = (
                    f"{self.title} sets it itself"
                    if node.internal
                    else f"{self.title} calls it deprecated and reads {node.deprecated}"
                )
                remedy = (
                    "leave it out"
                    if node.internal
                    else f"write +{self.root}.{above}{node.deprecated}={show(value)}"
                )
                yield self.problem(name, value, why, remedy)
            elif name in self.dtype_keys and value not in (*DTYPES, None):
                yield self.problem(
                    name, value, f"{name} is one of {', '.join(DTYPES)}", f"write +{self.root}.{name}=fp32"
                )
            elif node.fields is not None and isinstance(value, Mapping):
                yield from self.check(value, node, name + ".")
            elif (rule := node.wrong(value)) is not None:
                below = f": {', '.join(list(node.fields)[:3])}, ..." if node.fields else ""
                yield self.problem(
                    name, value, f"{name} is {rule}{below}", f"write +{self.root}.{name}{node.example()}"
                )

    def problem(self, name: str, value: Any, rule: str, remedy: str) -> Problem:
        """Of a section, what was typed: its values, not the section."""
        seen = "; ".join(
            f"{self.root}.{leaf}={show(inner)}" for leaf, inner in flatten(value, name + ".").items()
        )
        return Problem(f"{self.root}.{name}", seen, rule, remedy)

    def _derived(self, name: str, entry: str, value: Any) -> Problem:
        """``name`` is what was written; ``entry`` the row of ``own`` or ``derived`` that covers it."""
        own = self.own.get(name) or self.own.get(entry)
        if own is not None:
            return self.problem(name, value, f"the plan derives it from {own}", f"write {own}={show(value)}")
        if name == "zero_optimization.stage" and value in (0, 1, 2, 3):
            return self.problem(name, value, self.derived[name][0], f"write zero=stage{value}")
        return self.problem(name, value, *self.derived.get(name, self.derived[entry]))

    def _unknown(self, name: str, value: Any, schema: Node, above: str) -> Problem:
        known = [key for key, node in (schema.fields or {}).items() if node.removed is None]
        part = name.removeprefix(above)
        near = next(iter(difflib.get_close_matches(part, known, 1, 0.6)), None)
        where = f"{self.title}'s {above.rstrip('.')} has" if above else f"{self.title} has"
        meant = f"{above}{near}"
        if near is None:
            remedy = f"leave it out; there are {', '.join(known[:5])}, ..."
        elif meant in self.own:
            remedy = f"write {self.own[meant]}={show(value)}"
        else:
            remedy = (
                self.derived[meant][1] if meant in self.derived else f"did you mean +{self.root}.{meant}?"
            )
        return self.problem(name, value, f"{where} no key {part}, and would not do what it says", remedy)


# The schemas are looked up when they are asked for: reading them costs a tenth of a second.
DEEPSPEED = Vendor(
    engine=EngineName.deepspeed,
    title="DeepSpeed",
    install="pip install deepspeed",
    schema=lambda: deepspeed_schema(),
    own=vendor_deepspeed.OWN,
    derived=vendor_deepspeed.DERIVED,
    instead=vendor_deepspeed.INSTEAD,
    dtype_keys=vendor_deepspeed.DTYPE_KEYS,
)
MEGATRON = Vendor(
    engine=EngineName.megatron,
    title="Megatron-core",
    install="pip install 'megatron-core==0.16.*'",
    schema=vendor_megatron.flat_schema,
    own=vendor_megatron.OWN,
    derived=vendor_megatron.DERIVED,
)
VENDORS = (DEEPSPEED, MEGATRON)


def problems(config: RunConfig) -> list[Problem]:
    """Every problem of ``engine.deepspeed.*`` and ``engine.megatron.*``, in the order in which the keys stand."""
    found: list[Problem] = []
    for vendor in VENDORS:
        given = vendor.given(config)
        if vendor.engine is not config.engine.name:
            found += vendor.not_selected(config)
        elif given:
            schema = vendor.schema()
            if schema is None:
                name, value = next(iter(flatten(given).items()))
                found.append(
                    vendor.problem(
                        name,
                        value,
                        f"{vendor.title}'s keys are checked against the installed {vendor.title}, "
                        "and there is none",
                        f"install it: {vendor.install}",
                    )
                )
            else:
                found += vendor.check(given, schema)
    if config.engine.name is EngineName.deepspeed:
        found += [DEEPSPEED.problem(*answer) for answer in vendor_deepspeed.muon(config)]
    return found


def usable(config: RunConfig) -> RunConfig:
    """``config`` without the sections of own keys that have problems: what remains can be planned, and its problems told too."""
    wrong = {problem.key for problem in problems(config)}
    if not wrong:
        return config
    engine: Any = config.engine
    for vendor in VENDORS:
        parts = {
            key.removeprefix(f"{vendor.root}.").split(".")[0] for key in wrong if key.startswith(vendor.root)
        }
        kept = {
            part: value
            for part, value in vendor.given(config).items()
            if part not in parts and vendor.schema() is not None
        }
        engine = replace(engine, **{vendor.engine.value: kept})
    return replace(config, engine=engine)


def show(value: Any) -> str:
    """As it would be typed."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].strip().rstrip(".")
