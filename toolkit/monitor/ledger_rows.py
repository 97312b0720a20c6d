"""The time ledger: combine all ranks' step times into one row per step. ``observe/ledger.py`` gathers them.

A row has the minimum, median and maximum over ranks. The medians of different parts may belong to different
ranks, so they need not add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.layout.axes import Axes, axis_names
from toolkit.monitor.recorder import StepTime
from toolkit.monitor.sink import Row
from toolkit.step_parts import CHECKPOINT, DATA, EVALUATION, PARTS, UNEXPLAINED, communication

STEP, WALL, BUSY = 0, 1, 2  # indices in a vector; the seconds of delays and parts follow
DELAYS = {"starved": 3, "stopped": 4, "crowded": 5}  # the fields of ``ThreadDelays``
HEAD = 6
EMPTY = -1.0  # at STEP: no step
DIGITS = 6  # microseconds
MAX_GATHERS = 3  # gathers that a step waits for ranks whose clocks had not passed it
OCCASIONAL = (CHECKPOINT, EVALUATION)  # checking whether they are due does not count
NEGLIGIBLE = 1e-3  # of a step


def part_names(axes: Axes) -> tuple[str, ...]:
    """Return all parts that a step of this layout can have, in an order that all ranks agree on.

    A collective may involve any subset of the axes that have several ranks.
    """
    return (*PARTS, *(communication(name) for name in axis_names(axes)))


@dataclass(frozen=True)
class StepVectors:
    """The float32 encoding of steps: ``HEAD`` numbers and the seconds of each part of ``names``.

    Steps are encoded by their distance to ``base``, which all ranks know, because float32 is exact only up to
    16.7 million.
    """

    names: Sequence[str]

    @property
    def width(self) -> int:
        return HEAD + len(self.names)

    def pack(self, steps: Sequence[StepTime], base: int, slots: int) -> np.ndarray:
        """Encode at most ``slots`` steps as an array [slots, width]. Parts that are not in ``names`` count as
        unexplained.
        """
        assert len(steps) <= slots, f"{len(steps)} steps for {slots} slots"
        indices = {name: HEAD + number for number, name in enumerate(self.names)}
        block = np.zeros((slots, self.width), dtype=np.float32)
        block[:, STEP] = EMPTY
        for row, step in zip(block, steps, strict=False):
            row[STEP], row[WALL], row[BUSY] = base - step.step, step.wall, step.busy
            for name, index in DELAYS.items():
                row[index] = getattr(step.delays, name)
            for name, seconds in step.parts.items():
                row[indices.get(name, indices[UNEXPLAINED])] += seconds
        return block


class LedgerAssembler:
    """Assembles the ranks' vectors of each step on rank 0.

    A step's row is returned when all ranks have sent it, or after ``patience`` further gathers with the ranks
    that have. Memory is bounded by the steps of that many gathers.
    """

    def __init__(self, vectors: StepVectors, ranks: int, patience: int = MAX_GATHERS) -> None:
        self._vectors, self._ranks, self._patience = vectors, ranks, patience
        # by step: [ranks, width], NaN for a rank that has not sent it
        self._waiting: dict[int, np.ndarray] = {}
        self._gathers: dict[int, int] = {}  # by step: gathers since its first rank

    def add(self, base: int, blocks: np.ndarray) -> list[Row]:
        """Add one gather and return the rows of the steps that are complete.

        Args:
            blocks: array [ranks, slots, width] of :meth:`StepVectors.pack` for ``base``.
        """
        ranks, slots = np.nonzero(blocks[:, :, STEP] != EMPTY)
        steps = base - blocks[ranks, slots, STEP].astype(np.int64)
        for step in np.unique(steps).tolist():
            table = self._waiting.setdefault(
                step, np.full((self._ranks, self._vectors.width), np.nan, dtype=np.float32)
            )
            here = steps == step
            table[ranks[here]] = blocks[ranks[here], slots[here]]
        for step in self._waiting:
            self._gathers[step] = self._gathers.get(step, -1) + 1
        ready = [
            step
            for step, table in self._waiting.items()
            if self._gathers[step] >= self._patience or not np.isnan(table[:, STEP]).any()
        ]
        return self._pop_rows(ready)

    def flush(self) -> list[Row]:
        """Return the rows of the remaining steps after the last gather."""
        return self._pop_rows(list(self._waiting))

    def _pop_rows(self, steps: Iterable[int]) -> list[Row]:
        for step in steps:
            del self._gathers[step]
        return [ledger_row(step, self._waiting.pop(step), self._vectors.names) for step in sorted(steps)]


def ledger_row(step: int, table: np.ndarray, names: Sequence[str]) -> Row:
    """Build one ``Kind.LEDGER`` row.

    Args:
        table: array [ranks, width] of ``StepVectors``; NaN for a rank that did not send the step.

    Returns:
        ``step``; ``ranks``: how many sent it; ``wall_seconds`` of the median rank, from one wait for samples
        to the next, including the evaluation and save after the step; ``parts``: [minimum, median, maximum]
        seconds over ranks by name, without parts that took no time anywhere; ``slowest_rank``: the rank that
        was busy longest without starved and stopped time, which is ``slowest_busy_seconds``;
        ``median_busy_seconds``, uncorrected; ``data_rank``: the rank that waited longest for samples;
        ``delays``: by name the seconds of the rank with the most, and that rank, without negligible ones;
        ``unexplained_share`` of the median rank.
    """
    present = np.flatnonzero(~np.isnan(table[:, STEP]))
    assert len(present), f"no rank sent step {step}"
    seconds = table[present, 1:].astype(np.float64)
    low, middle, high = seconds.min(0), np.median(seconds, 0), seconds.max(0)
    wall, busy = WALL - 1, BUSY - 1
    own = np.maximum(
        0.0, seconds[:, busy] - seconds[:, DELAYS["starved"] - 1] - seconds[:, DELAYS["stopped"] - 1]
    )
    slowest = int(own.argmax())
    first = HEAD - 1
    least = dict.fromkeys(OCCASIONAL, NEGLIGIBLE * middle[wall])
    return {
        "step": step,
        "ranks": len(present),
        "wall_seconds": _short(middle[wall]),
        "parts": {
            name: [_short(low[first + number]), _short(middle[first + number]), _short(high[first + number])]
            for number, name in enumerate(names)
            if high[first + number] > least.get(name, 0.0)
        },
        "slowest_rank": int(present[slowest]),
        "slowest_busy_seconds": _short(own[slowest]),
        "median_busy_seconds": _short(middle[busy]),
        "data_rank": int(present[seconds[:, first + names.index(DATA)].argmax()]),
        "delays": {
            name: [_short(high[index - 1]), int(present[seconds[:, index - 1].argmax()])]
            for name, index in DELAYS.items()
            if high[index - 1] > NEGLIGIBLE * middle[wall]
        },
        "unexplained_share": _short(middle[first + names.index(UNEXPLAINED)] / middle[wall])
        if middle[wall] > 0
        else 0.0,
    }


def _short(number: np.floating) -> float:
    return round(float(number), DIGITS)


def flatten_row(row: Row) -> dict[str, Any]:
    """Flatten a row to one number per column: a part's median under its name, its maximum under
    ``forward/max``.
    """
    medians = {name: middle for name, (_, middle, _) in row["parts"].items()}
    maxima = {f"{name}/max": high for name, (_, _, high) in row["parts"].items()}
    delays = {name: seconds for name, (seconds, _) in row.get("delays", {}).items()}
    return {
        **{name: value for name, value in row.items() if name not in ("parts", "delays")},
        **medians,
        **maxima,
        **delays,
    }


class LedgerTotals:
    """Sums of the median seconds of many steps, by part."""

    def __init__(self) -> None:
        self.steps = 0
        self._wall = 0.0
        self._parts: dict[str, float] = {}

    def add(self, row: Row) -> None:
        self.steps += 1
        self._wall += row["wall_seconds"]
        for name, (_, middle, _) in row["parts"].items():
            self._parts[name] = self._parts.get(name, 0.0) + middle

    def format_shares(self, least: float = 0.005) -> str:
        """Format the parts by size, without those below ``least`` of the time but always with UNEXPLAINED."""
        shares = {name: seconds / self._wall for name, seconds in self._parts.items()} if self._wall else {}
        large = sorted(
            (name for name in shares if shares[name] >= least and name != UNEXPLAINED),
            key=lambda name: -shares[name],
        )
        return ", ".join(f"{name} {shares.get(name, 0.0):.1%}" for name in (*large, UNEXPLAINED))
