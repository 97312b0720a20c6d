"""How much slower one of two jobs is that ran in slices (slices.py), by the parts of their steps (marks.py). Pure.

A part is what lies between two marks. Those count that ran whole within a slice: what a stop cut in two has waited, and a job that goes
on finds all clocks late and its caches gone, which no job does that runs. In a slice of S seconds a part of d seconds has room to begin
in S - d of them, so each counts as one over its room in all slices (Horvitz and Thompson, 1952), or long parts would be too few.

A job's slowness over some slices is the time that its parts took in them, over the time that these parts usually take; a pair's figure is
the ratio of both jobs' slowness, over slices in turns. What holds a step up for longer than any slice is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sides.marks import Marks

Floats = npt.NDArray[np.float64]

SETTLED_SECONDS = 0.005  # of a slice before parts count
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Parts:
    """Each that ran whole within a slice: of which place in a step, in which slice, for how many seconds, of what weight."""

    places: npt.NDArray[np.int64]
    slices: npt.NDArray[np.int64]
    seconds: Floats
    weights: Floats


def whole_parts(marks: Marks, slices: Sequence[tuple[float, float]]) -> Parts:
    """Args: slices: begin and end, in order, in seconds of the marks' clock."""
    begins, ends = np.array(slices).T
    begins = begins + SETTLED_SECONDS
    times = marks.ravel()
    places = np.arange(1, len(times)) % marks.shape[1]
    within = np.searchsorted(begins, times[:-1], side="right") - 1
    whole = (within >= 0) & (times[1:] <= ends[within])
    seconds = np.diff(times)[whole]
    return Parts(places[whole], within[whole], seconds, 1 / room(seconds, ends - begins))


def room(parts: Floats, slices: Floats) -> Floats:
    """For how many seconds, of all slices, a part could begin so as to be whole. Args: both in seconds."""
    lengths = np.sort(slices)
    longer = np.searchsorted(lengths, parts)  # the first that is
    of_longer = np.append(np.cumsum(lengths[::-1])[::-1], 0.0)[longer]
    return np.asarray(of_longer - parts * (len(lengths) - longer))


def usual_seconds(parts: Parts, places: int) -> Floats:
    """The mean of each place, ``(places,)``.

    Raises:
        SystemExit: a place was not seen.
    """
    seen = np.bincount(parts.places, parts.weights, places)
    if not seen.all():
        raise SystemExit(
            f"too few slices: {int((seen == 0).sum())} of a step's {places} parts were never seen whole"
        )
    return np.bincount(parts.places, parts.weights * parts.seconds, places) / seen


def ratios(ours: Parts, theirs: Parts, usual: Floats, slices: int, slices_a_pair: int) -> Floats:
    """Our slowness over theirs, of each ``slices_a_pair`` slices one after the other; what is left over at the end is left out."""
    count = slices // slices_a_pair * slices_a_pair

    def slowness(parts: Parts) -> Floats:
        took, usually = (
            np.bincount(parts.slices, parts.weights * seconds, slices)[:count]
            .reshape(-1, slices_a_pair)
            .sum(1)
            for seconds in (parts.seconds, usual[parts.places])
        )
        return np.asarray(took / usually)

    return slowness(ours) / slowness(theirs)


def median_over_launches(launches: Sequence[Floats]) -> tuple[float, float, float]:
    """The median over all pairs, and its bounds, each of 95% alone: the bootstrap (Efron, 1979) draws launches and then pairs of each, as
    the same job is a little faster or slower each time that it is started."""
    draw = np.random.default_rng(0)

    def drawn() -> float:
        chosen = draw.integers(len(launches), size=len(launches))
        return float(
            np.median(
                np.concatenate([draw.choice(launches[launch], len(launches[launch])) for launch in chosen])
            )
        )

    lower, upper = np.quantile([drawn() for _ in range(RESAMPLES)], [0.05, 0.95])
    return float(np.median(np.concatenate(list(launches)))), float(lower), float(upper)
