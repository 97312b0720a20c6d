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
from toolkit.config.keys import flatten, format_value
from toolkit.config.schema import EngineName, RunConfig
from toolkit.config.synonyms import find_synonym
from toolkit.config.vendors import installed
from toolkit.config.vendors.key_schema import KeySchema
from toolkit.errors import Problem

DTYPES = ("fp32", "fp16", "bf16")
AUTO = "auto"  # Hugging Face's Trainer replaces it in a DeepSpeed configuration


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """An engine with keys of its own.

    Attributes:
        title: name of the engine in errors.
        install: command that installs it.
        package: the installed package.
        schema: returns the engine's keys; None if the engine is not installed.
        run_keys: engine key -> the run's key with the same meaning and values.
        derived: engine key or section that the plan derives -> (reason, remedy).
        replacements: removed engine key -> remedy. A removed key without an entry has no replacement.
        dtype_keys: keys whose values the engine checks in functions, which the schema does not show.
    """

    engine: EngineName
    title: str
    install: str
    package: installed.EnginePackage
    schema: Callable[[], KeySchema | None]
    run_keys: Mapping[str, str]
    derived: Mapping[str, tuple[str, str]]
    replacements: Mapping[str, str] = field(default_factory=dict)
    dtype_keys: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        return f"engine.{self.engine.value}"

    def user_keys(self, config: RunConfig) -> dict[str, Any]:
        keys: dict[str, Any] = getattr(config.engine, self.engine.value)
        return keys

    def problems(self, config: RunConfig) -> Iterator[Problem]:
        """Yield every problem of this engine's keys in ``config``."""
        given = self.user_keys(config)
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
                yield from self.find_problems(given, schema)

    def _not_selected(self, config: RunConfig) -> Iterator[Problem]:
        for name, value in flatten(self.user_keys(config)).items() if self.user_keys(config) else ():
            key = f"{self.root}.{name}"
            yield Problem(
                key,
                f"{key}={format_value(value)}, engine.name={config.engine.name.value}",
                "keys of an engine that does not run have no effect",
                f"leave it out, or write engine={self.engine.value}",
            )

    def is_derived(self, name: str) -> bool:
        """Return whether the plan derives the key ``name``, or a section that it is in."""
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(part in self.derived for part in above) or name in self.run_keys

    def known(self) -> KeySchema:
        """Return the keys of the installed version, or of the newest one if none is installed."""
        return installed.load_schema(self.package)

    def find_problems(
        self, given: Mapping[Any, Any], schema: KeySchema, above: str = ""
    ) -> Iterator[Problem]:
        for part, value in given.items():
            name = f"{above}{part}"
            node = (schema.fields or {}).get(str(part))
            if isinstance(value, Mapping) and (name in self.run_keys or name in self.derived):
                for leaf, inner in flatten(value, name + ".").items():
                    yield self._derived_key_problem(leaf, name, inner)
            elif name in self.run_keys or name in self.derived:
                yield self._derived_key_problem(name, name, value)
            elif node is None:
                if not schema.open:
                    yield self._unknown_key_problem(name, value, schema, above)
            elif node.removed is not None:
                yield self.problem(
                    name,
                    value,
                    f"{self.title} no longer has it: {_first_sentence(node.removed)}",
                    self.replacements.get(name, "leave it out"),
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
                    else f"write +{self.root}.{above}{node.deprecated}={format_value(value)}"
                )
                yield self.problem(name, value, why, remedy)
            elif value == AUTO and node.fields is None:
                yield self.problem(
                    name,
                    value,
                    f"{AUTO} is resolved by other tools; {self.title} has a default of its own",
                    "leave it out",
                )
            elif name in self.dtype_keys and value not in (*DTYPES, None):
                yield self.problem(
                    name, value, f"{name} is one of {', '.join(DTYPES)}", f"write +{self.root}.{name}=fp32"
                )
            elif node.fields is not None and isinstance(value, Mapping):
                yield from self.find_problems(value, node, name + ".")
            elif (rule := node.broken_rule(value)) is not None:
                below = f": {', '.join(list(node.fields)[:3])}, ..." if node.fields else ""
                yield self.problem(
                    name, value, f"{name} is {rule}{below}", f"write +{self.root}.{self._example(name, node)}"
                )

    def problem(self, name: str, value: Any, rule: str, remedy: str) -> Problem:
        """Return a problem of ``name``. If it is a section, the error shows the values that were typed."""
        seen = "; ".join(
            f"{self.root}.{leaf}={format_value(inner)}" for leaf, inner in flatten(value, name + ".").items()
        )
        return Problem(f"{self.root}.{name}", seen, rule, remedy)

    def _example(self, name: str, node: KeySchema) -> str:
        """``name=VALUE`` with a value that is accepted; for a section, one of its keys that may be set."""
        below = {
            f"{name}.{part}": inner
            for part, inner in (node.fields or {}).items()
            if not self.is_derived(f"{name}.{part}") and not inner.fields and inner.removed is None
        }
        inner = next(iter(below), name)
        return f"{inner}{below.get(inner, node).example()}"

    def _derived_key_problem(self, name: str, entry: str, value: Any) -> Problem:
        """Return a problem of the key ``name``, which the row ``entry`` of ``run_keys`` or ``derived``
        covers.
        """
        own = self.run_keys.get(name) or self.run_keys.get(entry)
        if value == AUTO:
            return self.problem(
                name, value, f"{AUTO} is resolved by other tools, and here by the plan", "leave it out"
            )
        if own is not None:
            return self.problem(
                name, value, f"the plan derives it from {own}", f"write {own}={format_value(value)}"
            )
        if name == "zero_optimization.stage" and value in (0, 1, 2, 3):
            return self.problem(name, value, self.derived[name][0], f"write zero=stage{value}")
        return self.problem(name, value, *self.derived.get(name, self.derived[entry]))

    def _unknown_key_problem(self, name: str, value: Any, schema: KeySchema, above: str) -> Problem:
        known = [key for key, node in (schema.fields or {}).items() if node.removed is None]
        part = name.removeprefix(above)
        near = next(iter(difflib.get_close_matches(part, known, 1, 0.6)), None)
        where = f"{self.title}'s {above.rstrip('.')} has" if above else f"{self.title} has"
        meant = f"{above}{near}"
        synonym = find_synonym(part, format_value(value)) if not isinstance(value, Mapping) else None
        if synonym is not None:
            why, word = synonym
            return self.problem(name, value, f"{where} no key {part}" + (f": {why}" if why else ""), word)
        if near is None:
            remedy = f"leave it out; there are {', '.join(known[:5])}, ..."
        elif meant in self.run_keys:
            remedy = f"write {self.run_keys[meant]}={format_value(value)}"
        else:
            remedy = (
                self.derived[meant][1]
                if meant in self.derived
                else f"did you mean +{self.root}.{meant}?"
                if isinstance(value, Mapping)
                else f"write +{self.root}.{meant}={format_value(value)}"
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
    run_keys=engine_keys_deepspeed.RUN_KEYS,
    derived=engine_keys_deepspeed.DERIVED,
    replacements=engine_keys_deepspeed.REPLACEMENTS,
    dtype_keys=engine_keys_deepspeed.DTYPE_KEYS,
)
MEGATRON = EngineKeys(
    engine=EngineName.megatron,
    title="Megatron-core",
    install="pip install 'megatron-core==0.16.*'",
    package=installed.MEGATRON,
    schema=engine_keys_megatron.flat_schema,
    run_keys=engine_keys_megatron.RUN_KEYS,
    derived=engine_keys_megatron.DERIVED,
)
ENGINES = (DEEPSPEED, MEGATRON)


def problems(config: RunConfig) -> list[Problem]:
    """Return every problem of ``engine.deepspeed.*`` and ``engine.megatron.*``, in the order of the keys."""
    return [problem for keys in ENGINES for problem in keys.problems(config)]


def drop_wrong_keys(config: RunConfig, problems: Sequence[Problem]) -> RunConfig:
    """``config`` without the engine sections named in ``problems``, so that the rest can be planned."""
    wrong = {problem.key for problem in problems}
    if not wrong:
        return config
    engine: Any = config.engine
    for keys in ENGINES:
        parts = {
            key.removeprefix(f"{keys.root}.").split(".")[0] for key in wrong if key.startswith(keys.root)
        }
        right = {
            part: value
            for part, value in keys.user_keys(config).items()
            if part not in parts and keys.schema() is not None
        }
        engine = replace(engine, **{keys.engine.value: right})
    return replace(config, engine=engine)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].strip().rstrip(".")
