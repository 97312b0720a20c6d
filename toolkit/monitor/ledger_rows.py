"""The time ledger: all ranks' parts of one step -> one row. Vectors in, rows out; who gathers them is ``observe/ledger.py``.

A row tells minimum, median and maximum over ranks. Ranks differ: in a pipeline by their stage, elsewhere by what is wrong with one of them.
A median of one part and that of another may be of different ranks, so medians need not add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.layout.axes import Axes, axis_names
from toolkit.monitor.recorder import StepTime
from toolkit.monitor.sink import Row
from toolkit.monitor.step_parts import CHECKPOINT, DATA, EVALUATION, PARTS, UNEXPLAINED, communication

STEP, WALL, BUSY = 0, 1, 2  # places in a vector; the seconds of delays and parts follow
DELAYS = {"starved": 3, "stopped": 4, "crowded": 5}  # the fields of ``Delays``
HEAD = 6
EMPTY = -1.0  # in STEP's place: no step
DIGITS = 6  # microseconds
MAX_GATHERS = 3  # gathers that a step waits for ranks whose clocks had not passed it
OCCASIONAL = (CHECKPOINT, EVALUATION)  # asking whether it is time for one is none
NEGLIGIBLE = 1e-3  # of a step


def part_names(axes: Axes) -> tuple[str, ...]:
    """Every part that a step of this layout can have, in an order that all ranks agree on: a collective may go along any set of the axes
    that have several ranks."""
    return (*PARTS, *(communication(name) for name in axis_names(axes)))


@dataclass(frozen=True)
class StepVectors:
    """How steps travel: float32, ``HEAD`` numbers and the seconds of each part of ``names``.

    Steps are told by how far they lie before ``base``, which all ranks know: float32 counts no further than 16.7 million.
    """

    names: Sequence[str]

    @property
    def width(self) -> int:
        return HEAD + len(self.names)

    def pack(self, steps: Sequence[StepTime], base: int, slots: int) -> np.ndarray:
        """``steps``, at most ``slots`` of them, as [slots, width]. A part without a name here is unexplained: who invents one shows up."""
        assert len(steps) <= slots, f"{len(steps)} steps for {slots} slots"
        places = {name: HEAD + number for number, name in enumerate(self.names)}
        block = np.zeros((slots, self.width), dtype=np.float32)
        block[:, STEP] = EMPTY
        for row, step in zip(block, steps, strict=False):
            row[STEP], row[WALL], row[BUSY] = base - step.step, step.wall, step.busy
            for name, place in DELAYS.items():
                row[place] = getattr(step.delays, name)
            for name, seconds in step.parts.items():
                row[places.get(name, places[UNEXPLAINED])] += seconds
        return block


class LedgerAssembler:
    """Puts the ranks' vectors of each step together. On rank 0.

    A step is told when all ranks have sent it; after ``patience`` further gathers, of those that have. What is kept is bounded by the
    steps of so many gathers.
    """

    def __init__(self, vectors: StepVectors, ranks: int, patience: int = MAX_GATHERS) -> None:
        self._vectors, self._ranks, self._patience = vectors, ranks, patience
        self._waiting: dict[int, np.ndarray] = {}  # by step: [ranks, width], NaN where a rank has not sent it
        self._gathers: dict[int, int] = {}  # by step: how many there were since its first rank

    def add(self, base: int, blocks: np.ndarray) -> list[Row]:
        """The rows of the steps that are complete with one more gather.

        Args:
            blocks: [ranks, slots, width], as :meth:`Vectors.pack` makes them for ``base``.
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
        return self._tell(ready)

    def rest(self) -> list[Row]:
        """The rows of what is left when there is no further gather."""
        return self._tell(list(self._waiting))

    def _tell(self, steps: Iterable[int]) -> list[Row]:
        for step in steps:
            del self._gathers[step]
        return [ledger_row(step, self._waiting.pop(step), self._vectors.names) for step in sorted(steps)]


def ledger_row(step: int, table: np.ndarray, names: Sequence[str]) -> Row:
    """One ``Kind.LEDGER`` row.

    Args:
        table: [ranks, width], as ``Vectors`` has it; NaN for a rank that did not send.

    Returns:
        ``step``; ``ranks`` that sent; ``wall_seconds`` of the median rank, from one wait for samples to the next, so with evaluation and
        the save that followed the step; ``parts``: seconds as [minimum, median, maximum] over ranks by name, without those that took no
        time anywhere, and without evaluation and saving where there was none; ``slowest_rank``, which was busy longest even without the
        time in which it was starved or stopped, with that time as ``slowest_busy_seconds``, and ``median_busy_seconds``, from which nothing
        is taken; ``data_rank``, which waited longest for its samples; ``delays``: by name the seconds of the rank that has most of it, and
        that rank, without those that are negligible; ``unexplained_share`` of the median rank.
    """
    present = np.flatnonzero(~np.isnan(table[:, STEP]))
    assert len(present), f"step {step} of no rank"
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
            name: [_short(high[place - 1]), int(present[seconds[:, place - 1].argmax()])]
            for name, place in DELAYS.items()
            if high[place - 1] > NEGLIGIBLE * middle[wall]
        },
        "unexplained_share": _short(middle[first + names.index(UNEXPLAINED)] / middle[wall])
        if middle[wall] > 0
        else 0.0,
    }


def _short(number: np.floating) -> float:
    return round(float(number), DIGITS)


def part_shares(row: Row) -> dict[str, float]:
    """The median rank's share of the step for each part of a row."""
    return {
        name: middle / row["wall_seconds"] if row["wall_seconds"] else 0.0
        for name, (_, middle, _) in row["parts"].items()
    }


def flatten_row(row: Row) -> dict[str, Any]:
    """For tables of one number a column: a part's own name has its median, ``forward/max`` its maximum."""
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
    """Where the time of many steps went: the sum of their medians."""

    def __init__(self) -> None:
        self.steps = 0
        self._wall = 0.0
        self._parts: dict[str, float] = {}

    def add(self, row: Row) -> None:
        self.steps += 1
        self._wall += row["wall_seconds"]
        for name, (_, middle, _) in row["parts"].items():
            self._parts[name] = self._parts.get(name, 0.0) + middle

    def words(self, least: float = 0.005) -> str:
        """The parts by size, those under ``least`` of the time left out; UNEXPLAINED always."""
        shares = {name: seconds / self._wall for name, seconds in self._parts.items()} if self._wall else {}
        large = sorted(
            (name for name in shares if shares[name] >= least and name != UNEXPLAINED),
            key=lambda name: -shares[name],
        )
        return ", ".join(f"{name} {shares.get(name, 0.0):.1%}" for name in (*large, UNEXPLAINED))
