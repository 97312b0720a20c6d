"""The elements of a page: sections with charts, tables and collapsed texts, and the formatting of numbers.

The template and the script depend only on these types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from toolkit.monitor.report.downsample import Curves

UNKNOWN = "\u2013"


class AxisFormat(StrEnum):
    """The format in which the script shows the numbers of an axis."""

    NUMBER = "number"
    PERCENT = "percent"  # of fractions: 1 is 100%
    BYTES = "bytes"
    SECONDS = "seconds"
    STEP = "step"
    TIME = "time"  # Unix time, shown in UTC
    RANKS = "ranks"  # base-2 logarithms of numbers of ranks, which are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line with its band, or a layer of a stack. ``colour`` names a variable of page.css, without
    ``--c-``.
    """

    name: str
    colour: str
    x: Sequence[float]
    mid: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    dots: bool = False  # whether to draw a circle at each point

    def spread(self) -> tuple[float, float] | None:
        """Return the minimum and maximum of everything drawn; None if there is nothing."""
        values = [
            value
            for part in (self.mid, self.low or (), self.high or ())
            for value in part
            if value is not None
        ]
        return (min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A vertical line: an alert, or the border between two attempts.

    Attributes:
        level: ``warning``, ``error`` or ``attempt``.
        label: shown next to the line; ``text`` is shown on hover.
    """

    x: float
    level: str
    text: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart; ``alt`` describes it in text. Charts of one ``x_format`` are zoomed together."""

    id: str
    title: str
    alt: str
    series: tuple[Series, ...]
    y_label: str
    y_format: AxisFormat = AxisFormat.NUMBER
    x_format: AxisFormat = AxisFormat.STEP
    stacked: bool = False  # whether layers of shares that add up to 1 are stacked
    from_zero: bool = False
    marks: tuple[ChartMark, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return the data for the script: plain JSON types without NaN."""
        return {
            "id": self.id,
            "title": self.title,
            "yLabel": self.y_label,
            "yFormat": self.y_format,
            "xFormat": self.x_format,
            "stacked": self.stacked,
            "fromZero": self.from_zero,
            "marks": [asdict(mark) for mark in self.marks],
            "series": [
                {
                    "name": line.name,
                    "colour": line.colour,
                    "dots": line.dots,
                    "x": list(line.x),
                    "mid": list(line.mid),
                    "low": None if line.low is None else list(line.low),
                    "high": None if line.high is None else list(line.high),
                }
                for line in self.series
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table. ``align`` has one letter per column: l, r, or n for left without line breaks. ``note`` is
    shown below.
    """

    caption: str
    head: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        assert {len(self.align), *map(len, self.rows)} <= {len(self.head)}, f"columns of {self.caption!r}"


@dataclass(frozen=True, slots=True)
class CollapsedText:
    """A verbatim text, collapsed until it is opened."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A section; ``intro`` consists of paragraphs, which explain the reason if there is nothing to show."""

    id: str
    title: str
    intro: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    texts: tuple[CollapsedText, ...] = ()


def curve_series(curves: Curves, figure: str, name: str, colour: str) -> Series | None:
    """Return a metric as a line, with a band if its points have several rows; None if there is no finite
    value.
    """
    curve = curves.curves.get(figure)
    if curve is None:
        return None
    banded = any(low != high for low, high in zip(curve.low, curve.high, strict=True))
    low, high = (curve.low, curve.high) if banded else (None, None)
    return Series(name=name, colour=colour, x=curves.x, mid=curve.mid, low=low, high=high)


def format_number(value: float | None, digits: int = 4) -> str:
    """Format as ``4.671``, ``12.3k`` or ``1.2e-05``; a dash if unknown."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if 1e4 <= size < 1e18:
        for prefix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= unit:
                return f"{value / unit:.3g}{prefix}"
    return f"{value:.{digits}g}"


def format_percent(share: float | None) -> str:
    if share is None:
        return UNKNOWN
    return f"{share:.2%}" if abs(share) < 0.0995 else f"{share:.1%}"


def format_gigabytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e9:,.3f} GB"


def format_seconds(value: float | None) -> str:
    """Format as ``1.23 s``, ``45.6 ms`` or ``7.89 µs``."""
    if value is None:
        return UNKNOWN
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if abs(value / size) < 1000 else f"{value / size:,.0f} {unit}"
    return f"{value / 1e-6:.3g} µs" if value else "0 s"
