"""The first rows of every file, before any work: a file of another kind, or with another field, is found at once and not after hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from toolkit.config.prepare import InputFormat
from toolkit.data.prepare.content import Opened, readable
from toolkit.data.prepare.formats import in_ranges, is_archive
from toolkit.data.prepare.plan import Plan, Unit, row_groups
from toolkit.data.prepare.read import documents
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

ROWS = 8
MOST_PROBLEMS = 20


def check_first_rows(plan: Plan, sources: Sequence[int], progress: Progress) -> None:
    """Read the first rows of ``sources``, which need no units or hashes yet, so that wrong input is found at once.

    Raises InputError with a problem for each file that has one, up to MOST_PROBLEMS.
    """
    problems: list[Problem] = []
    with progress.task("checking the input", total=len(sources), unit="files") as task:
        for source in sources:
            try:
                _check(plan, source)
            except InputError as error:
                problems += error.problems
                if len(problems) >= MOST_PROBLEMS:
                    break
            task.advance()
    if problems:
        raise InputError(*problems)


def _check(plan: Plan, source: int) -> None:
    input_source, path = plan.sources[source], plan.path(source)
    if input_source.format == InputFormat.dataset.name:
        return
    if input_source.format == InputFormat.text.name and not is_archive(path):
        with readable(path), Opened(path) as opened:  # only the beginning: a document is the whole file
            opened.text()
        return
    unit = _first(input_source.format, path, input_source.bytes, source)
    if unit is not None:
        for _ in islice(documents(replace(plan, units=(unit,)), unit), ROWS):
            pass


def _first(format_name: str, path: Path, size: int, source: int) -> Unit | None:
    """Return the beginning of a file as a work unit; None if the file is empty."""
    if format_name == InputFormat.parquet.name:
        group = next(iter(row_groups(path, 1)), None)
        return None if group is None else Unit(source, source + 1, *group)
    if in_ranges(path, format_name):
        return Unit(source, source + 1, 0, size, size) if size else None
    return Unit(source, source + 1, 0, 0, size)
