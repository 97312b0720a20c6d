"""Show a sweep, best point first: a terminal table, results.csv and a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cluster.sweep.store import PointRow, PointState
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
MAX_PLOTTED = 40  # in the plot; the table has all points
MAX_NAMED_POINTS = 4  # points named per reason; the table has all points
MAX_REASON_LINES = 8  # per reason
MAX_LINE_LENGTH = 300  # of a reason; sweep.json has the full text


def rank_rows(rows: Sequence[PointRow], maximize: bool) -> list[PointRow]:
    """Sort best first; points without a result follow by state."""

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
    for position, row in enumerate(rank_rows(rows, maximize), 1):
        done = row.number is not None
        shown.add_row(
            str(position) if done else "",
            Text(" ".join(row.swept) or row.name),
            f"{row.number:.6g}" if done else "",
            "" if row.step is None else str(row.step),
            Text(row.state.value, style=STYLES.get(row.state, "")),
        )
    return shown


def group_reasons(rows: Sequence[PointRow]) -> list[str]:
    """Group the points by reason, and list each reason once."""
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
                    f"{len(names)} point{'s' * (len(names) > 1)} {state}: "
                    f"{', '.join(names[:MAX_NAMED_POINTS])}{more}",
                    *lines,
                ]
            )
        )
    return texts


def write_csv(file: Path, rows: Sequence[PointRow], metric: str, maximize: bool) -> None:
    """Write a table with one column per swept key."""
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
    """Plot one line per point, best on top; None if fewer than two points have a result."""
    best = [row for row in rank_rows(rows, maximize) if row.number is not None][:MAX_PLOTTED]
    if len(best) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = [row.number for row in best if row.number is not None]
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(best)), layout="constrained")
    axes = figure.add_subplot()
    # Dots instead of bars from zero, since the losses of a sweep are close to each other.
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
