"""What benchmarks/results/streaming.json says: a table for the terminal, docs/streaming.md and its picture. Measures nothing."""

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
AIM = 1.6  # times the floor, in process

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """``value``: a number where less is better; None where there is nothing to compare."""

    title: str
    value: Callable[[Row, Mapping[str, Row]], float | None]
    text: Callable[[float], str]
    better_by: float = 1.05  # a peer counts as better from here on: the spread of a quiet machine


def median_of(row: Row, key: str) -> float:
    return statistics.median(speed[key] for speed in row["speed"])


def over(row: Row, rows: Mapping[str, Row], other: str) -> list[float]:
    """Of each round: both are ratios to slices in their own process, so that what the machine did meanwhile cancels."""
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
    Column("CPU ns/token", lambda row, rows: median_of(row, "cpu_ns"), lambda value: f"{value:.2f}"),
    Column("x floor", lambda row, rows: _median(over(row, rows, FLOOR)), lambda value: f"{value:.2f}"),
    Column("x slice", lambda row, rows: _median(over(row, rows, SLICE)), lambda value: f"{value:.2f}"),
    Column("first batch s", lambda row, rows: median_of(row, "first_seconds"), lambda value: f"{value:.4f}"),
    Column(
        "resume s", lambda row, rows: statistics.median(row["resume_seconds"]), lambda value: f"{value:.4f}"
    ),
    Column("resume exact", lambda row, rows: _inexact(row["resume"]), lambda value: "no" if value else "yes"),
    Column(
        "exact on 2 ranks", lambda row, rows: _inexact(row["elastic"]), lambda value: "no" if value else "yes"
    ),
    Column("MiB above floor", _above_floor, lambda value: f"{round(value / 2**20)}"),
    Column("state bytes", lambda row, rows: row["state_bytes"], lambda value: f"{value:,.0f}"),
    Column("chi2/df", lambda row, rows: row["chi2_per_df"], lambda value: f"{value:.2f}"),
)


def cells(row: Row, rows: Mapping[str, Row]) -> Iterator[str]:
    for column in COLUMNS:
        value = column.value(row, rows)
        text = "" if value is None else column.text(value)
        if column.title == "x floor" and (ratios := over(row, rows, FLOOR)):
            text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
        yield text


def behind(rows: Mapping[str, Row]) -> list[str]:
    """Where this toolkit is not ahead of every peer, and where it misses its aim: sentences."""
    ours = rows.get(OURS)
    if not ours or ours["failed"]:
        return []
    said = []
    for own in (row for row in rows.values() if row["label"].startswith(ours["label"]) and not row["failed"]):
        ratio = _median(over(own, rows, FLOOR))
        if ratio is not None and ratio > AIM:
            said.append(f"{own['label']}: {ratio:.2f} times the floor, where the aim is {AIM}.")
    for column in COLUMNS:
        mine = column.value(ours, rows)
        for row in rows.values():
            theirs = column.value(row, rows) if row["peer"] and not row["failed"] else None
            if mine is not None and theirs is not None and theirs * column.better_by < mine:
                said.append(
                    f"{column.title}: {row['label']} has {column.text(theirs)}, this toolkit {column.text(mine)}."
                )
    return said


def show(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = found["rows"]
    console = Console(
        width=max(170, Console().width)
    )  # rather lines that wrap than columns that nobody can read
    table = Table(
        title=f"{found['settings']['tokens']:,} tokens, {'a busy' if found['busy'] else 'a quiet'} machine"
    )
    table.add_column("loader")
    for column in COLUMNS:
        table.add_column(column.title, justify="right")
    for row in rows.values():
        if row["failed"]:
            table.add_row(row["label"], f"[red]failed: {row['failed']}[/red]", *[""] * (len(COLUMNS) - 1))
        else:
            table.add_row(row["label"], *cells(row, rows), style=None if row["peer"] else "bold")
    console.print(table)
    for line in layout_lines(found.get("layouts")):
        if line.startswith("| "):
            console.print(line)
    for sentence in behind(rows):
        console.print(f"not ahead: {sentence}")


def write(found: Mapping[str, Any]) -> None:
    (DOCS / "streaming.md").write_text(page(found))
    plot(found, DOCS / "streaming.png")


def page(found: Mapping[str, Any]) -> str:
    """docs/streaming.md."""
    rows, settings, machine = found["rows"], found["settings"], found["machine"]
    there = {name: row for name, row in rows.items() if not row["failed"]}
    versions = dict(found["versions"])
    for row in there.values():
        versions |= row["versions"]
    busy = (
        ""
        if not found["busy"]
        else (
            f" **Taken on a busy machine** (load {found['load_before']:.1f} before it): compare ratios, and repeat it on a quiet one."
        )
    )
    scale = found["at_scale"]
    lines = [
        "# What a token costs on its way to the model",
        "",
        "Written by `python benchmarks/streaming.py --peers-venv FOLDER` (`--report`: from the JSON); figures in",
        "`benchmarks/results/streaming.json`.",
        "",
        "![CPU time a token, first batch and resume of each loader](streaming.png)",
        "",
        "| loader | " + " | ".join(column.title for column in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
        *(f"| {_strong(row)} | " + " | ".join(cells(row, rows)) + " |" for row in there.values()),
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f"; {found['date']}.{busy}",
        "",
    ]
    for row in rows.values():
        if row["failed"]:
            lines += [f"Not measured: {row['label']}: {row['failed']}", ""]
    said = behind(rows)
    lines += [
        "Where this toolkit is not ahead:" if said else "In no column is a peer ahead by more than 5%.",
        "",
    ]
    lines += [*(f"- {one}" for one in said), ""] if said else []
    lines += [
        f"- {row['label']} on two ranks: {_elastic_words(row['elastic'])}"
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
        "This toolkit on fabricated corpora (no file; all that order, thread and state cost), each in a process of its own:",
        "",
        "| sources | samples | first batch ms | resume ms | peak bytes allocated | state bytes |",
        "|---|---|---|---|---|---|",
        *(
            f"| {3 if one['mixed'] else 1} | {one['samples']:.0e} | {one['first_batch_seconds'] * 1e3:.1f} | "
            f"{one['resume_seconds'] * 1e3:.1f} | {one['peak_bytes']:,} | {one['state_bytes']:,} |"
            for one in found["flat"]
        ),
        "",
        "Mixing 4 million windows of 4 KiB (16 GB) sorted into 64 domains, chi2/df of domain counts per batch of 1,024 (1.0: a full "
        "permutation; orders computed, not read): "
        + ", ".join(f"{name} {value:.2f}" for name, value in scale.items())
        + ".",
        "",
        *layout_lines(found.get("layouts")),
        "## What each was told",
        "",
        *(f"- **{row['label']}**: {row['settings']}." for row in rows.values()),
        "",
    ]
    return "\n".join(lines)


def layout_lines(layouts: Mapping[str, Any] | None) -> list[str]:
    """The section about shards, mixtures and dtypes; nothing if they were not measured."""
    if layouts is None:
        return []
    busy = f", **on a busy machine** (load {layouts['load_before']:.1f} before)" if layouts["busy"] else ""
    lines = [
        "## Shards, mixtures, dtypes",
        "",
        f"This toolkit on {layouts['tokens']:,} uniform tokens, arranged in other ways. Each case takes turns in one process with a floor",
        "of its own: windows of the same length and dtype, sliced in sequence from one memory map and widened into a batch. In",
        f"brackets the smallest and the largest turn; {layouts['machine']['cpu']}, {layouts['date']}{busy}.",
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


def _elastic_words(answer: Mapping[str, Any]) -> str:
    if "refused" in answer:
        return f"`{answer['refused']}`"
    return f"other global batches; {answer['taken_before']:.0%} of their samples had been trained on before the stop"


def _explained(settings: Mapping[str, Any]) -> str:
    return f"""\
One corpus, fabricated with seed {settings["seed"]}: {settings["documents"]:,} documents, {settings["tokens"]:,} tokens of uint16, sorted by
domain, in each contender's own format on a local disk, in the page cache. Each delivers int64 torch tensors [8, {settings["length"]:,}] in
the process that asks (no worker processes), one torch thread.

- **CPU ns/token**: user and system time of the process tree. Each contender has {settings["rounds"]} processes, each of
  {settings["seconds"]:g} s of turns with slices of a memory map in the same process. **x floor, x slice**: medians over the rounds of
  (CPU time over that of the slices beside it) / (the same of the floor, of the slices); in brackets the smallest and the largest round.
  The floor reads windows, as all contenders do; a slice of 8 neighbours is what no reader of windows can reach. The aim of {AIM} is
  over the floor.
- **first batch, resume**: from opening to the first batch in hand, imports done before, in a fresh process. Resume is from the state
  kept in the middle of the epoch; **exact** where the next 64 global batches are those of the run that was not stopped, on one rank and
  on two ranks.
- **MiB above floor**: peak anonymous and shared memory of the process tree, its imports included; maps of files are not counted.
- **state bytes**: JSON of what a checkpoint keeps. This toolkit's is a number and hashes of data, tokenizer and order, by which other data
  are refused; the shorter ones are a number alone, and go on with whatever they find.
- **chi2/df**: domain counts per batch of 1,024 samples over the epoch; 1.0 is a full permutation, 64 domains."""


def plot(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in found["rows"].items() if not row["failed"]}
    panels = [column for column in COLUMNS if column.title in ("x floor", "first batch s", "resume s")]
    titles = {
        "x floor": "CPU time a token, times the floor",
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
