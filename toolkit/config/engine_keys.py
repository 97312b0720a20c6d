"""Check the engines' own keys, ``+engine.deepspeed.a.b=v`` and ``+engine.megatron.x=v``.

DeepSpeed ignores unknown top-level keys silently. Every key is therefore checked against a schema generated
from the engine (``vendors/``). Keys that are unknown, removed or of the wrong type are refused, and so are
keys that the plan derives: the error names the run's own key. ``engine_keys_deepspeed.py`` and
``engine_keys_megatron.py`` list the derived keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.config import engine_keys_deepspeed, engine_keys_megatron
from toolkit.config.keys import flatten
from toolkit.config.schema import EngineName, RunConfig
from toolkit.config.vendors import installed
from toolkit.config.vendors.key_schema import KeySchema
from toolkit.errors import Problem

DTYPES = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """An engine with keys of its own.

    Attributes:
        title: name of the engine in errors.
        install: command that installs it.
        package: the installed package.
        schema: returns the engine's keys; None if the engine is not installed.
        own: engine key -> the run's key with the same meaning and values.
        derived: engine key or section that the plan derives -> (reason, remedy).
        instead: removed engine key -> remedy. A removed key without an entry has no replacement.
        dtype_keys: keys whose values the engine checks in functions, which the schema does not show.
    """

    engine: EngineName
    title: str
    install: str
    package: installed.EnginePackage
    schema: Callable[[], KeySchema | None]
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

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """Every problem of this engine's keys in ``config``."""
        given = self.given(config)
        if self.engine is not config.engine.name:
            yield from self._not_selected(config)
        elif given:
            schema = self.schema()
            if schema is None:
                name, value = next(iter(flatten(given).items()))
                rule = (
                    f"{self.title}'s keys are checked against the installed {self.title}, and there is none"
                )
                yield self.problem(name, value, rule, f"install it: {self.install}")
            else:
                yield from self.check(given, schema)

    def _not_selected(self, config: RunConfig) -> Iterator[Problem]:
        for name, value in flatten(self.given(config)).items() if self.given(config) else ():
            key = f"{self.root}.{name}"
            yield Problem(
                key,
                f"{key}={show(value)}, engine.name={config.engine.name.value}",
                "keys of an engine that does not run have no effect",
                f"leave it out, or write engine={self.engine.value}",
            )

    def check(self, given: Mapping[Any, Any], schema: KeySchema, above: str = "") -> Iterator[Problem]:
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
                    f"{self.title} no longer has it: {_first_sentence(node.removed)}",
                    self.instead.get(name, "leave it out"),
                )
            elif node.deprecated is not None or node.internal:
                why = (
                    f"{self.title} sets it itself"
                    if node.internal
                    else f"{self.title} has deprecated it and reads {node.deprecated}"
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
            elif (rule := node.broken_rule(value)) is not None:
                below = f": {', '.join(list(node.fields)[:3])}, ..." if node.fields else ""
                yield self.problem(
                    name, value, f"{name} is {rule}{below}", f"write +{self.root}.{name}{node.example()}"
                )

    def problem(self, name: str, value: Any, rule: str, remedy: str) -> Problem:
        """A problem of ``name``. If it is a section, the error shows the values that were typed."""
        seen = "; ".join(
            f"{self.root}.{leaf}={show(inner)}" for leaf, inner in flatten(value, name + ".").items()
        )
        return Problem(f"{self.root}.{name}", seen, rule, remedy)

    def _derived(self, name: str, entry: str, value: Any) -> Problem:
        """A problem of the key ``name``, which the row ``entry`` of ``own`` or ``derived`` covers."""
        own = self.own.get(name) or self.own.get(entry)
        if own is not None:
            return self.problem(name, value, f"the plan derives it from {own}", f"write {own}={show(value)}")
        if name == "zero_optimization.stage" and value in (0, 1, 2, 3):
            return self.problem(name, value, self.derived[name][0], f"write zero=stage{value}")
        return self.problem(name, value, *self.derived.get(name, self.derived[entry]))

    def _unknown(self, name: str, value: Any, schema: KeySchema, above: str) -> Problem:
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
        note = self.package.version_note()
        return self.problem(name, value, f"{where} no key {part}", f"{remedy}; {note}" if note else remedy)


# The schemas are loaded only if a run has keys of the engine.
DEEPSPEED = EngineKeys(
    engine=EngineName.deepspeed,
    title="DeepSpeed",
    install="pip install deepspeed",
    package=installed.DEEPSPEED,
    schema=installed.deepspeed_schema,
    own=engine_keys_deepspeed.OWN,
    derived=engine_keys_deepspeed.DERIVED,
    instead=engine_keys_deepspeed.INSTEAD,
    dtype_keys=engine_keys_deepspeed.DTYPE_KEYS,
)
MEGATRON = EngineKeys(
    engine=EngineName.megatron,
    title="Megatron-core",
    install="pip install 'megatron-core==0.16.*'",
    package=installed.MEGATRON,
    schema=engine_keys_megatron.flat_schema,
    own=engine_keys_megatron.OWN,
    derived=engine_keys_megatron.DERIVED,
)
ENGINES = (DEEPSPEED, MEGATRON)


def problems(config: RunConfig) -> list[Problem]:
    """Every problem of ``engine.deepspeed.*`` and ``engine.megatron.*``, in the order of the keys."""
    found = [problem for keys in ENGINES for problem in keys.problems(config)]
    if config.engine.name is EngineName.deepspeed:
        found += [DEEPSPEED.problem(*row) for row in engine_keys_deepspeed.muon_problems(config)]
    return found


def without_wrong_keys(config: RunConfig, found: Sequence[Problem]) -> RunConfig:
    """``config`` without the engine sections named in ``found``, so that the rest can be planned."""
    wrong = {problem.key for problem in found}
    if not wrong:
        return config
    engine: Any = config.engine
    for keys in ENGINES:
        parts = {
            key.removeprefix(f"{keys.root}.").split(".")[0] for key in wrong if key.startswith(keys.root)
        }
        right = {
            part: value
            for part, value in keys.given(config).items()
            if part not in parts and keys.schema() is not None
        }
        engine = replace(engine, **{keys.engine.value: right})
    return replace(config, engine=engine)


def show(value: Any) -> str:
    """``value`` as a user would type it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].strip().rstrip(".")
