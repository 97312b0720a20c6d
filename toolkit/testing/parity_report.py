"""Write rows of the parity matrix as JSON and as a Markdown page.

A later run replaces its rows on the same kind of device and keeps the others, so that results on GPUs and
CPUs are in one page; each row records hardware, versions and day.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.testing.matrix import ALL, TOLERANCE
from toolkit.testing.measure import Differences
from toolkit.testing.verify import ParityRow, ParityVerdict

FORMAT = 1
FIGURES = ("loss", "norm", "gradient", "weight", "evaluation")


def read_rows(path: Path) -> list[ParityRow]:
    """Return the rows of earlier runs whose cells are still in the matrix; none without a file."""
    if not path.exists():
        return []
    known = {cell.name for cell in ALL}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [_parse_row(row) for row in rows if row["cell"] in known]


def merge_rows(old: Iterable[ParityRow], new: Iterable[ParityRow]) -> list[ParityRow]:
    """Merge in the order of the matrix. A cell that could not run here does not replace one that did."""
    found = {_key(row): row for row in old}
    for row in new:
        if row.verdict is not ParityVerdict.NOT_RUN or _key(row) not in found:
            found[_key(row)] = row
    order = {cell.name: index for index, cell in enumerate(ALL)}
    return sorted(found.values(), key=lambda row: (row.device, order[row.cell], row.case))


def write_json(rows: Sequence[ParityRow], path: Path) -> None:
    """Write one row per line, for readable diffs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"format": {FORMAT}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def write_markdown(rows: Sequence[ParityRow], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_markdown(rows), encoding="utf-8")


def format_markdown(rows: Sequence[ParityRow]) -> str:
    parts = [HEAD.format(**{name: f"{getattr(TOLERANCE, name):.0e}" for name in FIGURES})]
    for device in sorted({row.device for row in rows}):
        parts.append(_format_device(device, [row for row in rows if row.device == device]))
    ran_on_gpu = {row.cell for row in rows if row.device == "cuda" and row.differences is not None}
    never = [cell.name for cell in ALL if cell.name not in ran_on_gpu]
    listed = "all of them" if len(never) == len(ALL) else ", ".join(f"`{name}`" for name in never) or "none"
    parts.append(f"## Never run on a GPU\n\n{listed[0].upper()}{listed[1:]}.\n")
    return "\n".join(parts)


HEAD = """# Parity

Written by `python launch/verify.py --cells all`; `make verify` runs the core. Each cell trains a tiny model
of its family for 20 steps in fp32, once with AdamW and clipping and once with SGD without clipping. It is
compared with the engine `local` (plain torch, one process), with the same first weights and samples.
Tolerances of the largest differences: loss {loss}, gradient norm {norm}, gradient of each parameter at the
first step {gradient} of its largest element (from the SGD run), final weights {weight}, mean loss on
held-out samples after the last step {evaluation}.

A name consists of engine, family and layout: `tp` tensor, `cp` context (Ulysses under DeepSpeed), `ep`
expert, `pp` pipeline, `dp` data ranks, `zero` the stage (under Megatron-core 1 and 2 are the distributed
optimizer), `sp` sequence parallelism, `vpp2` two model chunks per stage, `padded` a vocabulary of 263 rows
that the ranks do not divide, `uneven` stages of different depth, `full` and `selective` recomputation,
`eps1e-08` Adam with the default eps of runs (1e-4 in other cells), `idle` routers that send no token to most
experts, and so none to whole ranks of the expert axis, `fused` the loss without the logits of the whole
micro-batch. In every cell micro-batches differ in their numbers of unmasked tokens. With mixtral, another
order of summation may choose another expert if two are as close as rounding; from that step on two correct
runs differ, and the page names it.
"""


def _format_device(device: str, rows: Sequence[ParityRow]) -> str:
    ran = [row for row in rows if row.differences is not None]
    counts = ", ".join(
        f"{sum(row.verdict is verdict for row in rows)} {verdict}"
        for verdict in ParityVerdict
        if any(row.verdict is verdict for row in rows)
    )
    lines = [
        f"## On {device}",
        "",
        f"{len(rows)} runs of {len({row.cell for row in rows})} cells: {counts}.",
        "",
    ]
    if ran:
        lines += [_provenance(ran), "", f"Largest: {_largest(ran)}.", ""]
        lines += [
            "| cell | case | loss | norm | gradient | weights | evaluation | verdict |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in ran:
            figures = " | ".join(_figure(row.differences, name) for name in FIGURES)
            lines.append(f"| `{row.cell}` | {row.case} | {figures} | {row.verdict} |")
        lines.append("")
    explained = [row for row in rows if row.cause]
    if explained:
        lines += ["What a verdict rests on:", ""]
        lines += [f"- `{row.cell}` {row.case}, {row.verdict}: {_last_line(row.cause)}" for row in explained]
        lines.append("")
    return "\n".join(lines)


def _provenance(rows: Sequence[ParityRow]) -> str:
    versions: dict[str, set[str]] = {}
    for row in rows:
        for name, version in row.versions.items():
            versions.setdefault(name, set()).add(version)
    packages = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items())
    days = sorted({row.day for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{', '.join(sorted({row.hardware for row in rows}))}; {packages}; {when}."


def _largest(rows: Sequence[ParityRow]) -> str:
    """Return the maximum of every figure, with its cell."""
    maxima = []
    for name in FIGURES:
        values = [(value, row.cell) for row in rows if (value := getattr(row.differences, name)) is not None]
        if values:
            maxima.append("{} {:.1e} (`{}`)".format(name, *max(values)))
    return ", ".join(maxima)


def _figure(differences: Differences | None, name: str) -> str:
    value = getattr(differences, name, None)
    return "" if value is None else f"{value:.1e}"


def _last_line(text: str) -> str:
    """Return the last line, for tracebacks."""
    return text.strip().splitlines()[-1]


def _parse_row(fields: dict[str, Any]) -> ParityRow:
    differences = fields["differences"]
    return ParityRow(
        **{
            **fields,
            "verdict": ParityVerdict(fields["verdict"]),
            "tolerance": Differences(**fields["tolerance"]),
            "differences": None if differences is None else Differences(**differences),
        }
    )


def _key(row: ParityRow) -> tuple[str, str, str]:
    return row.cell, row.case, row.device
