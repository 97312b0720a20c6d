"""The loss curve as a picture, drawn anew from the files each time: it shows all attempts, and can be drawn of any run.

python -c "from toolkit.monitor.loss_plot import plot_loss; plot_loss('runs/RUN')"
"""

from __future__ import annotations

import math
from collections import defaultdict
from io import BytesIO
from pathlib import Path

from toolkit.files import write_whole
from toolkit.rows import float_of, read_rows

POINTS = 2000  # of a line; more cannot be seen
SMOOTHED = 50  # the smoothed curve's window is this part of all steps


def plot_loss(run: str | Path, unigram: float | None = None, per: str = "a token") -> Path | None:
    """Draw ``plots/loss.png`` of a run directory: training loss a step, its mean over a window, each evaluation set.

    Args:
        unigram: the unigram model's loss on the validation tokens, drawn as a line.
        per: what the loss is a mean over: "a token", "an image".

    Returns:
        The picture, which appears whole; None while there is no step to show.
    """
    folder = Path(run)
    steps, losses = read_train_losses(folder / "metrics.jsonl")
    if not steps:
        return None
    # The object interface rather than pyplot: no global figures, so a thread may draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    stride = -(-len(steps) // POINTS)
    axes.plot(steps[::stride], losses[::stride], color="C0", alpha=0.35, linewidth=1, label="training")
    axes.plot(
        steps[::stride], running_mean(losses, len(steps) // SMOOTHED)[::stride], color="C0", linewidth=2
    )
    for number, (name, points) in enumerate(sorted(read_eval_losses(folder / "eval.jsonl").items()), 1):
        axes.plot(
            *zip(*points, strict=True),
            color=f"C{number}",
            marker="o",
            markersize=4,
            linewidth=1.5,
            label=name,
        )
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle="--", linewidth=1, label=f"unigram model {unigram:.3f}")
    axes.set(xlabel="step", ylabel=f"loss (nats {per})", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "plots" / "loss.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_whole(path, picture.getvalue(), durable=False)
    return path


def read_train_losses(file: Path) -> tuple[list[int], list[float]]:
    """Steps and losses; a step without a finite loss is a gap."""
    rows = [
        (row["step"], float_of(row["loss"])) for row in read_rows(file) if "step" in row and "loss" in row
    ]
    return [step for step, _ in rows], [loss if math.isfinite(loss) else math.nan for _, loss in rows]


def read_eval_losses(file: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of each set."""
    sets: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in read_rows(file):
        sets[row["set"]].append((row["step"], float_of(row["loss"])))
    return dict(sets)


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it, without those that are not finite."""
    means: list[float] = []
    total, count = 0.0, 0
    for index, value in enumerate(values):
        if math.isfinite(value):
            total, count = total + value, count + 1
        if index >= max(1, window) and math.isfinite(values[index - max(1, window)]):
            total, count = total - values[index - max(1, window)], count - 1
        means.append(total / count if count else math.nan)
    return means
