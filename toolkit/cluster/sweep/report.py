"""A sweep shown, best first: a table for the terminal, results.csv for programs, a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cluster.sweep.store import PointState, PointRow
from toolkit.files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType

ORDER = (
    PointState.DONE,
    PointState.RUNNING,
    PointState.STOPPED,
    PointState.WAITING,
    PointState.DIVERGED,
    PointState.FAILED,
    PointState.REFUSED,
)
STYLES = {
    PointState.DONE: "green",
    PointState.DIVERGED: "red",
    PointState.FAILED: "red",
    PointState.REFUSED: "yellow",
}
MAX_PLOTTED = 40  # of the picture; worse points are in the table
MAX_NAMED_POINTS = 4  # points named of those with one reason; all are in the table
MAX_REASON_LINES = 8  # of a reason, and
MAX_LINE_LENGTH = 300  # of a line; the whole reason is in sweep.json


def rank_rows(rows: Sequence[PointRow], maximize: bool) -> list[PointRow]:
    """Best first; then what has no number, by how far it is."""

    def key(row: PointRow) -> tuple[int, int, float]:
        number = row.number
        return (
            ORDER.index(row.state),
            number is None,
            0.0 if number is None else -number if maximize else number,
        )

    return sorted(rows, key=key)


def format_table(rows: Sequence[PointRow], metric: str, maximize: bool) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    shown = Table()
    shown.add_column("", justify="right", no_wrap=True)
    shown.add_column("point", overflow="fold")
    shown.add_column(metric, justify="right", no_wrap=True)
    shown.add_column("step", justify="right", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    for place, row in enumerate(rank_rows(rows, maximize), 1):
        done = row.number is not None
        shown.add_row(
            str(place) if done else "",
            Text(" ".join(row.swept) or row.name),
            f"{row.number:.6g}" if done else "",
            "" if row.step is None else str(row.step),
            Text(row.state.value, style=STYLES.get(row.state, "")),
        )
    return shown


def group_reasons(rows: Sequence[PointRow]) -> list[str]:
    """Each line of a reason once, below the points that have it."""
    points: dict[tuple[PointState, str], list[str]] = {}
    for row in rows:
        for line in list(dict.fromkeys((row.reason or "").splitlines()))[:MAX_REASON_LINES]:
            points.setdefault((row.state, line), []).append(" ".join(row.swept) or row.name)
    reasons: dict[tuple[PointState, tuple[str, ...]], list[str]] = {}
    for (state, line), having in points.items():
        reasons.setdefault((state, tuple(having)), []).append(
            line if len(line) <= MAX_LINE_LENGTH else line[:MAX_LINE_LENGTH] + " ..."
        )
    texts = []
    for (state, names), lines in reasons.items():
        more = f" and {len(names) - MAX_NAMED_POINTS} more" if len(names) > MAX_NAMED_POINTS else ""
        texts.append(
            "\n    ".join(
                [
                    f"{len(names)} point{'s' * (len(names) > 1)} {state}: {', '.join(names[:MAX_NAMED_POINTS])}{more}",
                    *lines,
                ]
            )
        )
    return texts


def write_csv(file: Path, rows: Sequence[PointRow], metric: str, maximize: bool) -> None:
    """A column for each key in which points differ."""
    keys = list(dict.fromkeys(word.partition("=")[0] for row in rows for word in row.swept))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["point", *keys, metric, "state", "step", "run_dir", "reason"])
    for row in rank_rows(rows, maximize):
        values = {word.partition("=")[0]: word.partition("=")[2] for word in row.swept}
        writer.writerow(
            [
                row.name,
                *(values.get(key, "") for key in keys),
                "" if row.number is None else repr(row.number),
                row.state.value,
                "" if row.step is None else row.step,
                row.run_dir,
                "; ".join((row.reason or "").splitlines()),
            ]
        )
    write_whole(file, text.getvalue(), durable=False)


def plot(file: Path, title: str, rows: Sequence[PointRow], metric: str, maximize: bool) -> Path | None:
    """A line a point, best on top. None where fewer than two have a number: there is nothing to compare."""
    best = [row for row in rank_rows(rows, maximize) if row.number is not None][:MAX_PLOTTED]
    if len(best) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = [row.number for row in best if row.number is not None]
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(best)), layout="constrained")
    axes = figure.add_subplot()
    # Dots, not bars from zero: losses of a sweep lie close together.
    axes.hlines(range(len(best)), min(numbers), numbers, color="C0", alpha=0.4)
    axes.plot(numbers, range(len(best)), "o", color="C0")
    axes.set_yticks(range(len(best)), [" ".join(row.swept) or row.name for row in best])
    axes.set_ylim(len(best) - 0.5, -0.5)
    axes.set(xlabel=metric, title=f"{title}: {'largest' if maximize else 'smallest'} first")
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_whole(file, picture.getvalue(), durable=False)
    return file
