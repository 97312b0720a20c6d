"""A unit of work as documents, in a fixed order, in memory bounded by one document (of parquet: by a page).

A reader that goes on after a kill reads from the unit's start again and drops what was done: reading is a hundredth of the work.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.prepare import InputDatasetConfig, InputFormat, OnBadRow
from toolkit.data.prepare import datasource
from toolkit.data.prepare.content import BUFFER_BYTES, BYTE_ORDER_MARK, Opened, check_text, readable
from toolkit.data.prepare.formats import input_format, is_archive
from toolkit.data.prepare.plan import Plan, Unit
from toolkit.data.prepare.rows import BadRow, Row, line_of, rows, text_of
from toolkit.errors import InputError, Problem

ROWS_AT_ONCE = 64
HEAD_BYTES = 4096
MEMBER_BITS = 40  # of a document's place in an archive: its number in the file that holds it


@dataclass(slots=True)
class Document:
    """
    Attributes:
        place: which of its source: a byte offset or a number.
        content: UTF-8, unless the input is not.
        done: bytes of the unit that are read by now.
        where: the place, as a user can find it in the source's file.
        bad: why the row has no document, for one that ``on_bad_row=skip`` leaves out; empty for all others.
    """

    source: int
    place: int
    content: bytes
    done: int
    where: str
    bad: str = ""


def documents(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Raises InputError naming the file and the place of what cannot be read."""
    return _READERS["whole" if unit.whole else plan.sources[unit.first].format](plan, unit)


def decoded(content: bytes) -> tuple[bytes, str]:
    """A document as UTF-8 and as text. What is not UTF-8 becomes U+FFFD; otherwise the very same bytes are given back."""
    try:
        return content, content.decode()
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text.encode(), text


def _document(plan: Plan, source: int, place: int, found: bytes | BadRow, done: int, where: str) -> Document:
    """Raises InputError for a bad row that is not to be skipped."""
    if not isinstance(found, BadRow):
        return Document(source, place, found, done, where)
    if plan.recipe["on_bad_row"] != OnBadRow.skip.name:
        raise _refused(plan.path(source), where, found)
    return Document(source, place, b"", done, where, found.seen)


def _refused(path: Path, where: str, bad: BadRow) -> InputError:
    return InputError(Problem(bad.key, f"{path}, {where}: {bad.seen}", bad.rule, bad.remedy))


def _whole(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Files that are read from their beginning to their end, archives too."""
    before = 0
    for source in range(unit.first, unit.last):
        path, size = plan.path(source), plan.sources[source].bytes
        reader = _archive if is_archive(path) else _file
        with readable(path), Opened(path) as opened:
            for place, found, where in reader(plan, source, opened):
                yield _document(plan, source, place, found, before + min(opened.read, size), where)
        before += size


def _file(plan: Plan, source: int, opened: Opened) -> Iterator[tuple[int, bytes | BadRow, str]]:
    kind = plan.sources[source].format
    return (
        (number, found, _where(kind, number))
        for number, found in _rows(plan, source, kind, opened.text(), "")
    )


def _archive(plan: Plan, source: int, opened: Opened) -> Iterator[tuple[int, bytes | BadRow, str]]:
    asked = InputFormat[plan.sources[source].format]
    for member, (name, file) in enumerate(opened.members()):
        kind = input_format(name, asked).name
        for number, found in _rows(plan, source, kind, file, f"its file {name}, "):
            yield member << MEMBER_BITS | number, found, f"its file {name}, {_where(kind, number)}"


def _rows(plan: Plan, source: int, kind: str, file: Any, where: str) -> Iterator[Row]:
    try:
        yield from rows(kind, file, plan.recipe["text"])
    except BadRow as bad:  # of the whole file: there is nothing to go on with
        raise _refused(plan.path(source), f"{where}{kind}", bad) from bad


def _where(kind: str, number: int) -> str:
    lines = kind in (InputFormat.lines.name, InputFormat.jsonl.name)
    return (
        f"line {number + 1}"
        if lines
        else "document 1"
        if kind == InputFormat.text.name
        else f"row {number + 1}"
    )


def _ranged(plan: Plan, unit: Unit) -> Iterator[Document]:
    """The lines that begin in a range of a file's bytes."""
    path, kind, name = plan.path(unit.first), plan.sources[unit.first].format, plan.recipe["text"]
    with readable(path), io.BufferedReader(io.FileIO(path), BUFFER_BYTES) as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        else:
            check_text(file.peek(HEAD_BYTES)[:HEAD_BYTES], str(path))
        place = file.tell()
        while place < unit.end and (line := file.readline()):
            found: bytes | BadRow
            try:
                found = line_of(kind, line if place else line.removeprefix(BYTE_ORDER_MARK), name)
            except BadRow as bad:
                found = bad
            done = min(place + len(line), unit.end) - unit.start
            yield _document(plan, unit.first, place, found, done, f"the line at byte {place}")
            place += len(line)


def _parquet(plan: Plan, unit: Unit) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    path, column = plan.path(unit.first), plan.recipe["text"]
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        _check_column(file.schema_arrow, column, path)
        sizes = [file.metadata.row_group(number).num_rows for number in range(unit.end)]
        first, total = sum(sizes[: unit.start]), sum(sizes[unit.start :])
        groups, read = list(range(unit.start, unit.end)), 0
        try:
            for batch in file.iter_batches(
                ROWS_AT_ONCE, row_groups=groups, columns=[column], use_threads=False
            ):
                for record in batch.to_pylist():
                    read += 1
                    place = first + read - 1
                    yield _document(
                        plan,
                        unit.first,
                        place,
                        _value(record, column),
                        unit.bytes * read // total,
                        f"row {place}",
                    )
        except pyarrow.ArrowException as error:
            raise OSError(str(error)) from error


def _check_column(schema: Any, column: str, path: Path) -> None:
    """Raises InputError unless ``column`` is a column, or a field of one that has fields (``meta.body``)."""
    import pyarrow

    if column in schema.names:
        return
    kind: Any = pyarrow.struct(list(schema))
    for part in column.split("."):
        if not pyarrow.types.is_struct(kind) or kind.get_field_index(part) < 0:
            seen, there = f"text={column}, no such column in {path}", ", ".join(schema.names)
            raise InputError(
                Problem("text", seen, f"the columns are {there}", "write text=COLUMN with one of them")
            )
        kind = kind.field(part).type


def _value(record: Any, name: str) -> bytes | BadRow:
    try:
        return text_of(record, name)
    except BadRow as bad:
        return bad


def _dataset(plan: Plan, unit: Unit) -> Iterator[Document]:
    recipe = plan.recipe
    config = InputDatasetConfig(
        name=recipe["dataset.name"], split=recipe["dataset.split"], revision=recipe["dataset.revision"]
    )
    done = 0
    streamed = not unit.bytes
    for number, record in datasource.records(plan.root, config, recipe["text"], unit.start, unit.end):
        found = _value(record, recipe["text"])
        size = 0 if isinstance(found, BadRow) else len(found)
        done = done + size if streamed else unit.bytes * (number - unit.start + 1) // (unit.end - unit.start)
        yield _document(
            plan, 0, unit.start << MEMBER_BITS | number if streamed else number, found, done, f"row {number}"
        )


_READERS: dict[str, Callable[[Plan, Unit], Iterator[Document]]] = {
    "whole": _whole, "lines": _ranged, "jsonl": _ranged, "parquet": _parquet, "dataset": _dataset,
}  # fmt: skip
