"""``data.sources`` and ``data.phases`` as typed values. What the user wrote stands in the configuration as it
is; here it is read.
"""

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
    """``weights``: of every source, by name."""

    from_step: int
    weights: Mapping[str, Fraction]


def sources_of(written: Mapping[str, Any]) -> dict[str, SourceSetting]:
    """By name, sorted: the order in which sources are written has no meaning. ``written`` has no
    ``problems``.
    """
    return {
        name: SourceSetting(str(one["path"]), _exact(one.get("weight", 1)))
        for name, one in sorted(written.items())
    }


def phases_of(sources: Mapping[str, Any], phases: Sequence[Any]) -> list[PhaseSetting]:
    """The first from step 0 on, with the weights of ``data.sources`` unless ``data.phases`` begins there. No
    ``problems`` in them.
    """
    later = [
        PhaseSetting(one["from_step"], {name: _exact(one["weights"][name]) for name in sorted(sources)})
        for one in phases
    ]
    if later and later[0].from_step == 0:
        return later
    return [PhaseSetting(0, {name: one.weight for name, one in sources_of(sources).items()}), *later]


def problems(sources: Mapping[str, Any], phases: Sequence[Any]) -> Iterator[Problem]:
    """Everything wrong with what was written, each key with its own."""
    for name, one in sources.items():
        key = f"data.sources.{name}"
        if not name or not all(c.isalnum() or c in "._-" for c in name):
            yield Problem(
                key, key, "a source's name is made of letters, digits, '.', '_' and '-'", "rename it"
            )
        url = (
            url_problem(f"{key}.path", one["path"])
            if isinstance(one, Mapping) and isinstance(one.get("path"), str)
            else None
        )
        if url is not None:  # what else is wrong would show the path
            yield url
            continue
        if (
            not isinstance(one, Mapping)
            or not isinstance(one.get("path"), str)
            or one.keys() - {"path", "weight"}
        ):
            seen = (
                f"{key} has {', '.join(map(str, one))}"
                if isinstance(one, Mapping)
                else f"{key} is no dictionary"
            )
            yield Problem(
                key, seen, "a source has a path and may have a weight, and nothing else", f"write '{EXAMPLE}'"
            )
        elif not _is_weight(one.get("weight", 1)):
            yield _no_weight(f"{key}.weight", one["weight"])
    if not list(_of_phases(sources, phases)):
        for number, weights in enumerate(_all_weights(sources, phases)):
            key = "data.sources" if not number else "data.phases"
            yield from _together(key, weights)
    yield from _of_phases(sources, phases)


def _of_phases(sources: Mapping[str, Any], phases: Sequence[Any]) -> Iterator[Problem]:
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
                "a phase has a from_step, a whole number from 0 on, and weights",
                f"write 'data.phases={example}'",
            )
            return
        if phase["weights"].keys() != sources.keys():
            unknown, missing = (
                phase["weights"].keys() - sources.keys(),
                sources.keys() - phase["weights"].keys(),
            )
            said = [
                f"{what} {', '.join(sorted(names))}"
                for what, names in (("unknown:", unknown), ("missing:", missing))
                if names
            ]
            yield Problem(
                "data.phases",
                f"data.phases from step {phase['from_step']} on: {'; '.join(said)}",
                "each phase names every source of data.sources and no other; a weight of 0 lets one rest",
                f"write 'data.phases={example}'",
            )
        for name, weight in phase["weights"].items():
            if not _is_weight(weight):
                yield _no_weight(f"data.phases weights.{name}", weight)
    steps = [phase["from_step"] for phase in phases]
    if any(a >= b for a, b in pairwise(steps)):
        yield Problem(
            "data.phases",
            f"data.phases from the steps {steps}",
            "phases stand in the order of their steps, one a step",
            f"write them from the steps {sorted(set(steps))}",
        )


def _all_weights(sources: Mapping[str, Any], phases: Sequence[Any]) -> Iterator[dict[str, Any]]:
    yield {name: one.get("weight", 1) for name, one in sources.items() if isinstance(one, Mapping)}
    yield from (dict(phase["weights"]) for phase in phases)


def _together(key: str, weights: Mapping[str, Any]) -> Iterator[Problem]:
    if not weights or not all(map(_is_weight, weights.values())):
        return
    exact = {name: _exact(weight) for name, weight in weights.items()}
    total = sum(exact.values())
    if not total:
        yield Problem(
            key, f"{key}: all weights are 0", "some source gives samples", "give one of them a weight above 0"
        )
        return
    for name, weight in exact.items():
        if 0 < weight < RAREST * total:
            yield Problem(
                key,
                f"{key}: {name} has {float(weight / total):.2g} of the weights",
                "a source that is not resting gives at least one sample in a million",
                "raise its weight, or write 0",
            )


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _no_weight(key: str, value: Any) -> Problem:
    return Problem(
        key,
        f"{key}={value}",
        "a weight is a number from 0 on; only the ratios of weights matter",
        f"write {key}=0.5",
    )


def _exact(weight: float) -> Fraction:
    """The number as it was written: 0.1 is a tenth."""
    return Fraction(str(weight))
