"""Write the table, docs/streaming.md and its picture from benchmarks/results/streaming.json."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS = "toolkit"
FLOOR = "floor"
SLICE = "slice"
AIM = 1.6  # ratio to the floor

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ReportColumn:
    """A column; ``value`` returns a number for which less is better, or None."""

    title: str
    value: Callable[[Row, Mapping[str, Row]], float | None]
    text: Callable[[float], str]
    better_by: float = 1.05  # the spread of a quiet machine


def median_of(row: Row, key: str) -> float:
    return statistics.median(speed[key] for speed in row["speed"])


def round_ratios(row: Row, rows: Mapping[str, Row], other: str) -> list[float]:
    """Return the ratio of each round; both sides are ratios to slices in their own process."""
    base = rows.get(other)
    if not base or base["failed"]:
        return []
    return [mine["ratio"] / theirs["ratio"] for mine, theirs in zip(row["speed"], base["speed"], strict=True)]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _above_floor(row: Row, rows: Mapping[str, Row]) -> float | None:
    if not rows.get(FLOOR) or rows[FLOOR]["failed"]:
        return None
    return max(speed["peak_bytes"] for speed in row["speed"]) - max(
        speed["peak_bytes"] for speed in rows[FLOOR]["speed"]
    )


def _inexact(answer: Mapping[str, Any]) -> float:
    return 0.0 if answer["exact"] else 1.0


COLUMNS = (
    ReportColumn("CPU ns/token", lambda row, rows: median_of(row, "cpu_ns"), lambda value: f"{value:.2f}"),
    ReportColumn(
        "x floor", lambda row, rows: _median(round_ratios(row, rows, FLOOR)), lambda value: f"{value:.2f}"
    ),
    ReportColumn(
        "x slice", lambda row, rows: _median(round_ratios(row, rows, SLICE)), lambda value: f"{value:.2f}"
    ),
    ReportColumn(
        "first batch s", lambda row, rows: median_of(row, "first_seconds"), lambda value: f"{value:.4f}"
    ),
    ReportColumn(
        "resume s", lambda row, rows: statistics.median(row["resume_seconds"]), lambda value: f"{value:.4f}"
    ),
    ReportColumn(
        "resume exact", lambda row, rows: _inexact(row["resume"]), lambda value: "no" if value else "yes"
    ),
    ReportColumn(
        "exact on 2 ranks", lambda row, rows: _inexact(row["elastic"]), lambda value: "no" if value else "yes"
    ),
    ReportColumn("MiB above floor", _above_floor, lambda value: f"{round(value / 2**20)}"),
    ReportColumn("state bytes", lambda row, rows: row["state_bytes"], lambda value: f"{value:,.0f}"),
    ReportColumn("chi2/df", lambda row, rows: row["chi2_per_df"], lambda value: f"{value:.2f}"),
)


def format_cells(row: Row, rows: Mapping[str, Row]) -> Iterator[str]:
    for column in COLUMNS:
        value = column.value(row, rows)
        text = "" if value is None else column.text(value)
        if column.title == "x floor" and (ratios := round_ratios(row, rows, FLOOR)):
            text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
        yield text


def list_shortcomings(rows: Mapping[str, Row]) -> list[str]:
    """Return sentences: where another loader is ahead, and where this toolkit misses its aim."""
    ours = rows.get(OURS)
    if not ours or ours["failed"]:
        return []
    sentences = []
    for own in (row for row in rows.values() if row["label"].startswith(ours["label"]) and not row["failed"]):
        ratio = _median(round_ratios(own, rows, FLOOR))
        if ratio is not None and ratio > AIM:
            sentences.append(f"{own['label']}: {ratio:.2f} times the floor, the aim is {AIM}.")
    for column in COLUMNS:
        mine = column.value(ours, rows)
        for row in rows.values():
            theirs = column.value(row, rows) if row["peer"] and not row["failed"] else None
            if mine is not None and theirs is not None and theirs * column.better_by < mine:
                sentences.append(
                    f"{column.title}: {row['label']} has {column.text(theirs)}, "
                    f"this toolkit {column.text(mine)}."
                )
    return sentences


def print_table(results: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = results["rows"]
    console = Console(width=max(170, Console().width))  # wrapped lines are more readable than narrow columns
    table = Table(
        title=f"{results['settings']['tokens']:,} tokens, a {'busy' if results['busy'] else 'quiet'} machine"
    )
    table.add_column("loader")
    for column in COLUMNS:
        table.add_column(column.title, justify="right")
    for row in rows.values():
        if row["failed"]:
            table.add_row(row["label"], f"[red]failed: {row['failed']}[/red]", *[""] * (len(COLUMNS) - 1))
        else:
            table.add_row(row["label"], *format_cells(row, rows), style=None if row["peer"] else "bold")
    console.print(table)
    for line in format_layouts(results.get("layouts")):
        if line.startswith("| "):
            console.print(line)
    for sentence in list_shortcomings(rows):
        console.print(f"not ahead: {sentence}")


def write_page(results: Mapping[str, Any]) -> None:
    (DOCS / "streaming.md").write_text(format_page(results))
    plot(results, DOCS / "images" / "streaming.png")


def format_page(results: Mapping[str, Any]) -> str:
    """Return docs/streaming.md."""
    rows, settings, machine = results["rows"], results["settings"], results["machine"]
    there = {name: row for name, row in rows.items() if not row["failed"]}
    versions = dict(results["versions"])
    for row in there.values():
        versions |= row["versions"]
    busy = (
        ""
        if not results["busy"]
        else (
            f" **Measured on a busy machine** (load {results['load_before']:.1f} before): "
            "compare ratios only."
        )
    )
    scale = results["at_scale"]
    lines = [
        "# Data loading cost",
        "",
        "The CPU time of a token on its way to the model, for this toolkit and other loaders.",
        "Generated by `python benchmarks/streaming.py --peers-venv FOLDER` (`--report`: from the JSON in",
        "`benchmarks/results/streaming.json`).",
        "",
        "![CPU time per token, first batch and resume of each loader](images/streaming.png)",
        "",
        "| loader | " + " | ".join(column.title for column in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *(f"| {_strong(row)} | " + " | ".join(format_cells(row, rows)) + " |" for row in there.values()),
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f"; {results['date']}.{busy}",
        "",
    ]
    for row in rows.values():
        if row["failed"]:
            lines += [f"Not measured: {row['label']}: {row['failed']}", ""]
    sentences = list_shortcomings(rows)
    lines += [
        "This toolkit is not ahead here:" if sentences else "In no column is a peer ahead by more than 5%.",
        "",
    ]
    lines += [*(f"- {one}" for one in sentences), ""] if sentences else []
    lines += [
        f"- {row['label']} on two ranks: {_describe_elastic(row['elastic'])}"
        for row in there.values()
        if not row["elastic"]["exact"]
    ]
    lines += [
        "",
        "## What was measured",
        "",
        _explained(settings),
        "",
        "## At any size",
        "",
        "The cost of order, thread and state on synthetic corpora without files, each in its own process:",
        "",
        "| sources | samples | first batch ms | resume ms | peak bytes allocated | state bytes |",
        "|---|---|---|---|---|---|",
        *(
            f"| {3 if one['mixed'] else 1} | {one['samples']:.0e} | {one['first_batch_seconds'] * 1e3:.1f} | "
            f"{one['resume_seconds'] * 1e3:.1f} | {one['peak_bytes']:,} | {one['state_bytes']:,} |"
            for one in results["flat"]
        ),
        "",
        "Mixing of 4 million windows of 4 KiB (16 GB) in 64 sorted domains, as chi2/df of domain counts per "
        "batch of 1,024 (1.0: a full permutation; orders are computed, not read): "
        + ", ".join(f"{name} {value:.2f}" for name, value in scale.items())
        + ".",
        "",
        *format_layouts(results.get("layouts")),
        "## Settings",
        "",
        *(f"- **{row['label']}**: {row['settings']}." for row in rows.values()),
        "",
    ]
    return "\n".join(lines)


def format_layouts(layouts: Mapping[str, Any] | None) -> list[str]:
    """Return the section about shards, mixtures and dtypes; empty if they were not measured."""
    if layouts is None:
        return []
    busy = f", **on a busy machine** (load {layouts['load_before']:.1f} before)" if layouts["busy"] else ""
    lines = [
        "## Shards, mixtures, dtypes",
        "",
        f"This toolkit on {layouts['tokens']:,} uniform tokens in other layouts. Each case alternates in one",
        "process with its own baseline: windows of the same length and dtype, sliced in sequence from one",
        "memory map and widened into a batch. In brackets the smallest and the largest turn;",
        f"{layouts['machine']['cpu']}, {layouts['date']}{busy}.",
        "",
        "| layout | CPU ns/token | floor ns/token | x floor | aim |",
        "|---|---|---|---|---|",
    ]
    for case in layouts["cases"]:
        aim = (
            "none"
            if case["aim"] is None
            else f"{case['aim']:.1f}" + ("" if case["ratio"] <= case["aim"] else " **missed**")
        )
        lines.append(
            f"| {case['name']} | {case['cpu_ns']:.2f} | {case['floor_cpu_ns']:.2f} | "
            f"{case['ratio']:.2f} ({case['least']:.2f} to {case['most']:.2f}) | {aim} |"
        )
    return [*lines, ""]


def _strong(row: Row) -> str:
    return row["label"] if row["peer"] else f"**{row['label']}**"


def _describe_elastic(answer: Mapping[str, Any]) -> str:
    if "refused" in answer:
        return f"`{answer['refused']}`"
    return (
        f"other global batches; {answer['taken_before']:.0%} of their samples had been used before the stop"
    )


def _explained(settings: Mapping[str, Any]) -> str:
    return f"""\
One synthetic corpus (seed {settings["seed"]}): {settings["documents"]:,} documents,
{settings["tokens"]:,} tokens of uint16, sorted by domain, in each contender's own format on a local
disk, in the page cache. Each delivers int64 torch tensors [8, {settings["length"]:,}] in the calling
process (no worker processes), with one torch thread.

- **CPU ns/token**: user and system time of the process tree. Each contender has {settings["rounds"]}
  processes, each of {settings["seconds"]:g} s of turns with slices of a memory map in the same
  process. **x floor, x slice**: medians over the rounds of (CPU time over that of the neighbouring
  slices) / (the same of the floor, of the slices); in brackets the smallest and the largest round.
  The floor reads windows, as all contenders do; no reader of windows can reach a slice of 8
  neighbours. The aim of {AIM} is over the floor.
- **first batch, resume**: from opening to the first batch, after imports, in a fresh process. Resume
  starts from the state of the middle of the epoch; it is **exact** if the next 64 global batches
  equal those of the uninterrupted run, on one rank and on two.
- **MiB above floor**: peak anonymous and shared memory of the process tree, including imports,
  without file maps.
- **state bytes**: JSON in a checkpoint. This toolkit's is a number and hashes of data, tokenizer and
  order, by which other data are refused; shorter states are a number alone.
- **chi2/df**: domain counts per batch of 1,024 samples over the epoch; 1.0 is a full permutation, 64
  domains."""


def plot(results: Mapping[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in results["rows"].items() if not row["failed"]}
    panels = [column for column in COLUMNS if column.title in ("x floor", "first batch s", "resume s")]
    titles = {
        "x floor": "CPU time per token, times the floor",
        "first batch s": "first batch, s",
        "resume s": "resume, s",
    }
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(13, 0.36 * len(rows) + 1.2), sharey=True, layout="constrained"
    )
    names = [row["label"] for row in rows.values()]
    colours = [
        "C7" if name in (SLICE, FLOOR, "floor-random") else "C0" if not row["peer"] else "C1"
        for name, row in rows.items()
    ]
    for panel, column in zip(axes, panels, strict=True):
        values = [column.value(row, rows) or 0.0 for row in rows.values()]
        bars = panel.barh(names, values, color=colours)
        panel.bar_label(bars, [column.text(value) for value in values], padding=3, fontsize=8)
        panel.set_xscale("log")
        panel.set_title(titles[column.title], fontsize=10)
        panel.margins(x=0.25)
    axes[0].invert_yaxis()
    axes[0].axvline(AIM, color="C3", linewidth=1, linestyle=":")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
