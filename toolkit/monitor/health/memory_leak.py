"""Memory that grows steadily: robust lines through windows of several lengths. Pure, of bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

POINTS = 16  # of a window
SCALES = (1, 8, 64, 512)  # samples a point: windows of 3 min, 21 min, 3 h and 23 h at 10 s a sample
GROWN_SHARE = 0.02  # of the memory that is available, within a window: it is full after at most fifty of them
NOISE = 6.0  # median deviations from the line that the growth has to exceed
QUARTER = 0.4  # of its part of the growth that each quarter of the window has to have: a jump has all in one


@dataclass(frozen=True, slots=True)
class GrowthEstimate:
    first: float  # bytes, at the window's ends, on the line through its points
    last: float
    seconds: float  # from one to the other

    @property
    def per_second(self) -> float:
        return (self.last - self.first) / self.seconds


def steady_growth(points: Sequence[tuple[float, float]]) -> GrowthEstimate | None:
    """How memory grew, if it did so steadily: (seconds, bytes) in order; None for a flat, jumping or noisy curve.

    The slope is the median of those between all pairs of points (Theil 1950, Sen 1968), which three of ten odd points do not move.
    Steadily: each quarter of the window adds its share, and the whole is many times what the points scatter about the line.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    if not slopes or points[-1][0] <= points[0][0]:  # the clock was set back
        return None
    slope = median(slopes)
    offset = median(size - slope * at for at, size in points)
    found = GrowthEstimate(
        offset + slope * points[0][0], offset + slope * points[-1][0], points[-1][0] - points[0][0]
    )
    grown = found.last - found.first
    length = len(points) // 4
    quarters = [
        median(size for _, size in points[first : first + length]) for first in range(0, 4 * length, length)
    ]
    steady = all(after - before >= QUARTER * grown / 4 for before, after in pairwise(quarters))
    scatter = median(abs(size - offset - slope * at) for at, size in points)
    return found if grown > 0 and steady and grown > NOISE * scatter else None


class GrowthTracker:
    """Windows of several lengths over one series, of ``POINTS`` points each: the lowest of so many samples, since what a process holds
    rises and falls, and a leak lifts the floor."""

    def __init__(self) -> None:
        self._windows: dict[int, deque[tuple[float, float]]] = {
            scale: deque(maxlen=POINTS) for scale in SCALES
        }
        self._lowest: dict[int, list[tuple[float, float]]] = {scale: [] for scale in SCALES}

    def add(self, seconds: float, size: float, available: float) -> GrowthEstimate | None:
        """Growth by a share of ``available`` bytes, in the shortest window that shows it. The window begins anew then."""
        found = None
        for scale, window in self._windows.items():
            samples = self._lowest[scale]
            samples.append((seconds, size))
            if len(samples) < scale:
                continue
            window.append((samples[-1][0], min(size for _, size in samples)))
            samples.clear()
            grown = steady_growth(tuple(window)) if len(window) == POINTS and found is None else None
            if grown is not None and grown.last - grown.first > GROWN_SHARE * available:
                found = grown
                window.clear()
        return found
