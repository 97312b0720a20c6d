"""Parse and check ``data.sources`` and ``data.phases``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from toolkit.config.urls import url_problem
from toolkit.errors import Problem

RAREST = Fraction(1, 1_000_000)
EXAMPLE = "+data.sources.web={path: FOLDER, weight: 0.7}"


@dataclass(frozen=True, slots=True)
class SourceSetting:
    path: str
    weight: Fraction


@dataclass(frozen=True, slots=True)
class PhaseSetting:
    """The weights of all sources from a step on."""

    from_step: int
    weights: Mapping[str, Fraction]


def parse_sources(written: Mapping[str, Any]) -> dict[str, SourceSetting]:
    """Sources by name, sorted: their order in the configuration has no meaning.

    ``written`` must have no :func:`problems`.
    """
    return {
        name: SourceSetting(str(source["path"]), _exact(source.get("weight", 1)))
        for name, source in sorted(written.items())
    }


def parse_phases(sources: Mapping[str, Any], phases: Sequence[Any]) -> list[PhaseSetting]:
    """Return all phases. The first has the weights of ``data.sources`` unless ``data.phases`` begins at step
    0.

    The arguments must have no :func:`problems`.
    """
    later = [
        PhaseSetting(phase["from_step"], {name: _exact(phase["weights"][name]) for name in sorted(sources)})
        for phase in phases
    ]
    if later and later[0].from_step == 0:
        return later
    weights = {name: source.weight for name, source in parse_sources(sources).items()}
    return [PhaseSetting(0, weights), *later]


def problems(sources: Mapping[str, Any], phases: Sequence[Any]) -> Iterator[Problem]:
    """Yield every problem of the two keys."""
    for name, source in sources.items():
        key = f"data.sources.{name}"
        if not name or not all(c.isalnum() or c in "._-" for c in name):
            yield Problem(key, key, "a source's name has only letters, digits, '.', '_' and '-'", "rename it")
        url = (
            url_problem(f"{key}.path", source["path"])
            if isinstance(source, Mapping) and isinstance(source.get("path"), str)
            else None
        )
        if url is not None:  # other problems would show the path
            yield url
            continue
        if (
            not isinstance(source, Mapping)
            or not isinstance(source.get("path"), str)
            or source.keys() - {"path", "weight"}
        ):
            seen = (
                f"{key} has {', '.join(map(str, source))}"
                if isinstance(source, Mapping)
                else f"{key} is not a dictionary"
            )
            yield Problem(
                key,
                seen,
                "a source has a path and optionally a weight, and nothing else",
                f"write '{EXAMPLE}'",
            )
        elif not _is_weight(source.get("weight", 1)):
            yield _wrong_weight(f"{key}.weight", source["weight"])
    phase_problems = list(_phase_problems(sources, phases))
    if not phase_problems:
        for number, weights in enumerate(_all_weights(sources, phases)):
            yield from _total_problems("data.phases" if number else "data.sources", weights)
    yield from phase_problems


def _phase_problems(sources: Mapping[str, Any], phases: Sequence[Any]) -> Iterator[Problem]:
    example = "[{from_step: 1000, weights: {" + ", ".join(f"{name}: 1" for name in sorted(sources)) + "}}]"
    for phase in phases:
        shaped = (
            isinstance(phase, Mapping)
            and phase.keys() == {"from_step", "weights"}
            and isinstance(phase["weights"], Mapping)
        )
        if (
            not shaped
            or not isinstance(phase["from_step"], int)
            or isinstance(phase["from_step"], bool)
            or phase["from_step"] < 0
        ):
            yield Problem(
                "data.phases",
                f"data.phases has {phase}",
                "a phase has a from_step, a whole number of at least 0, and weights",
                f"write 'data.phases={example}'",
            )
            return
        if phase["weights"].keys() != sources.keys():
            unknown, missing = (
                phase["weights"].keys() - sources.keys(),
                sources.keys() - phase["weights"].keys(),
            )
            differences = [
                f"{what} {', '.join(sorted(names))}"
                for what, names in (("unknown:", unknown), ("missing:", missing))
                if names
            ]
            yield Problem(
                "data.phases",
                f"data.phases from step {phase['from_step']} on: {'; '.join(differences)}",
                "each phase names every source of data.sources and no other; a weight of 0 pauses a source",
                f"write 'data.phases={example}'",
            )
        for name, weight in phase["weights"].items():
            if not _is_weight(weight):
                yield _wrong_weight(f"data.phases weights.{name}", weight)
    steps = [phase["from_step"] for phase in phases]
    if any(a >= b for a, b in pairwise(steps)):
        yield Problem(
            "data.phases",
            f"data.phases from the steps {steps}",
            "phases are in the order of their steps, at most one per step",
            f"write them in the order of the steps {sorted(set(steps))}",
        )


def _all_weights(sources: Mapping[str, Any], phases: Sequence[Any]) -> Iterator[dict[str, Any]]:
    yield {name: source.get("weight", 1) for name, source in sources.items() if isinstance(source, Mapping)}
    yield from (dict(phase["weights"]) for phase in phases)


def _total_problems(key: str, weights: Mapping[str, Any]) -> Iterator[Problem]:
    if not weights or not all(map(_is_weight, weights.values())):
        return
    exact = {name: _exact(weight) for name, weight in weights.items()}
    total = sum(exact.values())
    if not total:
        yield Problem(
            key,
            f"{key}: all weights are 0",
            "at least one source gives samples",
            "give one of them a weight above 0",
        )
        return
    for name, weight in exact.items():
        if 0 < weight < RAREST * total:
            yield Problem(
                key,
                f"{key}: {name} has {float(weight / total):.2g} of the weights",
                "a source that is not paused gives at least one sample in a million",
                "raise its weight, or write 0",
            )


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _wrong_weight(key: str, value: Any) -> Problem:
    return Problem(
        key,
        f"{key}={value}",
        "a weight is a number of at least 0; only the ratios of weights matter",
        f"write {key}=0.5",
    )


def _exact(weight: float) -> Fraction:
    """Return the exact decimal number that was written: 0.1 is 1/10."""
    return Fraction(str(weight))
