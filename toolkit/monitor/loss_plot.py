"""Plot the loss curve of a run from its files, over all attempts.

python -c "from toolkit.monitor.loss_plot import plot_loss; plot_loss('runs/RUN')"
"""

from __future__ import annotations

import math
from collections import defaultdict
from io import BytesIO
from pathlib import Path

from toolkit.files import write_whole
from toolkit.rows import float_or_nan, read_rows

POINTS = 2000  # per line
SMOOTHED = 50  # the smoothing window is the number of steps divided by this


def plot_loss(run: str | Path, unigram: float | None = None, unit: str = "nats a token") -> Path | None:
    """Draw ``plots/loss.png`` of a run directory: training loss, its running mean, and each evaluation set.

    Args:
        unigram: the unigram model's loss on the validation tokens, drawn as a horizontal line.
        unit: of the loss: "nats a token", "nats an image", "a sample".

    Returns:
        The path of the image, written atomically; None if there is no step yet.
    """
    folder = Path(run)
    steps, losses = read_train_losses(folder / "metrics.jsonl")
    if not steps:
        return None
    # The object interface instead of pyplot has no global figures, so a thread may draw.
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
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "plots" / "loss.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_whole(path, picture.getvalue(), durable=False)
    return path


def read_train_losses(file: Path) -> tuple[list[int], list[float]]:
    """Return steps and losses; a loss that is not finite is NaN."""
    rows = [
        (row["step"], float_or_nan(row["loss"])) for row in read_rows(file) if "step" in row and "loss" in row
    ]
    return [step for step, _ in rows], [loss if math.isfinite(loss) else math.nan for _, loss in rows]


def read_eval_losses(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, loss) pairs by evaluation set."""
    sets: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in read_rows(file):
        sets[row["set"]].append((row["step"], float_or_nan(row["loss"])))
    return dict(sets)


def running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` before it, ignoring values that are not
    finite.
    """
    means: list[float] = []
    total, count = 0.0, 0
    for index, value in enumerate(values):
        if math.isfinite(value):
            total, count = total + value, count + 1
        if index >= max(1, window) and math.isfinite(values[index - max(1, window)]):
            total, count = total - values[index - max(1, window)], count - 1
        means.append(total / count if count else math.nan)
    return means
