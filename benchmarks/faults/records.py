"""The committed rows of a campaign, which a campaign on another machine continues.

``benchmarks/results/campaign.jsonl`` has one line for each case, in the order of their numbers: the case
itself, and what docs/results.md shows of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import Case
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole
from toolkit.rows import read_rows

RESULTS = ("expected", "missed", "violations", "recovery", "stock", "other_cores", "seconds")
ORIGIN = ("campaign_seed", "date", "machine", "versions")
DIGITS = 3  # of seconds


def record_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded of the row of a case."""
    results = {name: _rounded(row[name]) for name in RESULTS if name in row}
    return {
        **{field.name: row[field.name] for field in fields(Case)},
        **results,
        **{name: row[name] for name in ORIGIN},
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value


def is_current(row: Mapping[str, Any], campaign_seed: int, cases: Sequence[Case]) -> bool:
    """Return whether a row is of the case that has its number now.

    The seed, the classes, the layouts and the code that chooses the cases decide it.
    """
    if row.get("campaign_seed") != campaign_seed or row["number"] >= len(cases):
        return False
    return all(row.get(name) == value for name, value in cases[row["number"]].to_json().items())


def read_records(file: Path, campaign_seed: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the rows of a file; none if it does not exist.

    Args:
        cases: of the campaign, at least as many as the file can have.

    Raises:
        InputError: a row belongs to another seed, or to a case that is no longer the same.
    """
    rows = list(read_rows(file))
    remedy = "give the seed, classes and layouts of the file, or remove it to record another campaign"
    seeds = {row["campaign_seed"] for row in rows} - {campaign_seed}
    if seeds:
        seen = f"{file}: rows of seed {', '.join(map(str, sorted(seeds)))}"
        rule = f"recorded rows that a campaign continues have its seed, {campaign_seed}"
        raise InputError(Problem("--record", seen, rule, remedy))
    differing = [row["number"] for row in rows if not is_current(row, campaign_seed, cases)]
    if differing:
        seen = f"{file}: {len(differing)} rows of other cases, the first of them number {differing[0]}"
        rule = "each recorded row has the case that the seed, classes and layouts choose for its number"
        raise InputError(Problem("--record", seen, rule, remedy))
    return rows


def write_records(file: Path, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace a file by what is recorded of ``rows``, and return that in the order of the numbers."""
    recorded = sorted((record_of(row) for row in rows), key=lambda row: row["number"])
    write_whole(file, "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in recorded))
    return recorded
