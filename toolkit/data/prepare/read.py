"""The documents of a work unit in a fixed order, in memory bounded by one document (for Parquet: by a page).

After a kill a unit is read from its start again and finished documents are dropped: reading is a hundredth of the work.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.prepare import DatasetConfig, InputFormat, OnBadRow
from toolkit.data.prepare import datasource
from toolkit.data.prepare.content import BUFFER_BYTES, BYTE_ORDER_MARK, Opened, check_text, readable
from toolkit.data.prepare.formats import input_format, is_archive
from toolkit.data.prepare.plan import Plan, Unit
from toolkit.data.prepare.rows import BadRow, Row, line_of, rows, text_of
from toolkit.errors import InputError, Problem

ROWS_AT_ONCE = 64
HEAD_BYTES = 4096
MEMBER_BITS = 40  # bits of a document's position in an archive for its number within the member file


@dataclass(slots=True)
class Document:
    """A document of the input.

    Attributes:
        place: a byte offset or a number within its source.
        content: UTF-8 unless the input is not.
        done: bytes of the unit read so far.
        where: the position in words, for error messages.
        bad: why a row skipped by ``on_bad_row=skip`` has no document; empty for all other documents.
    """

    source: int
    position: int
    content: bytes
    bytes_done: int
    location: str
    bad: str = ""


def documents(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Yield the documents of a unit. Raises InputError naming file and position of what cannot be read."""
    return _READERS["whole" if unit.whole else plan.sources[unit.first].format](plan, unit)


def decoded(content: bytes) -> tuple[bytes, str]:
    """Return a document as UTF-8 and as text. Invalid UTF-8 becomes U+FFFD; valid bytes are returned unchanged."""
    try:
        return content, content.decode()
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text.encode(), text


def _document(plan: Plan, source: int, position: int, result: bytes | BadRow, bytes_done: int, location: str) -> Document:
    """Make a document. Raises InputError for a bad row that is not skipped."""
    if not isinstance(result, BadRow):
        return Document(source, position, result, bytes_done, location)
    if plan.recipe["on_bad_row"] != OnBadRow.skip.name:
        raise _refused(plan.path(source), location, result)
    return Document(source, position, b"", bytes_done, location, result.seen)


def _refused(path: Path, location: str, bad: BadRow) -> InputError:
    return InputError(Problem(bad.key, f"{path}, {location}: {bad.seen}", bad.rule, bad.remedy))


def _whole(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Read whole files, including archives."""
    bytes_before = 0
    for source in range(unit.first, unit.last):
        path, size = plan.path(source), plan.sources[source].bytes
        reader = _archive if is_archive(path) else _file
        with readable(path), Opened(path) as opened:
            for position, result, location in reader(plan, source, opened):
                yield _document(plan, source, position, result, bytes_before + min(opened.bytes_read, size), location)
        bytes_before += size


def _file(plan: Plan, source: int, opened: Opened) -> Iterator[tuple[int, bytes | BadRow, str]]:
    kind = plan.sources[source].format
    return (
        (number, result, _location_in(kind, number))
        for number, result in _rows(plan, source, kind, opened.text(), "")
    )


def _archive(plan: Plan, source: int, opened: Opened) -> Iterator[tuple[int, bytes | BadRow, str]]:
    format_ = InputFormat[plan.sources[source].format]
    for member, (name, file) in enumerate(opened.members()):
        kind = input_format(name, format_).name
        for number, result in _rows(plan, source, kind, file, f"its file {name}, "):
            yield member << MEMBER_BITS | number, result, f"its file {name}, {_location_in(kind, number)}"


def _rows(plan: Plan, source: int, kind: str, file: Any, location: str) -> Iterator[Row]:
    try:
        yield from rows(kind, file, plan.recipe["text"])
    except BadRow as bad:  # nothing of this file can be read any more
        raise _refused(plan.path(source), f"{location}{kind}", bad) from bad


def _location_in(kind: str, number: int) -> str:
    lines = kind in (InputFormat.lines.name, InputFormat.jsonl.name)
    return (
        f"line {number + 1}"
        if lines
        else "document 1"
        if kind == InputFormat.text.name
        else f"row {number + 1}"
    )


def _ranged(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Read the lines that begin in a byte range of a file."""
    path, kind, name = plan.path(unit.first), plan.sources[unit.first].format, plan.recipe["text"]
    with readable(path), io.BufferedReader(io.FileIO(path), BUFFER_BYTES) as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        else:
            check_text(file.peek(HEAD_BYTES)[:HEAD_BYTES], str(path))
        position = file.tell()
        while position < unit.end and (line := file.readline()):
            result: bytes | BadRow
            try:
                result = line_of(kind, line if position else line.removeprefix(BYTE_ORDER_MARK), name)
            except BadRow as bad:
                result = bad
            bytes_done = min(position + len(line), unit.end) - unit.start
            yield _document(plan, unit.first, position, result, bytes_done, f"the line at byte {position}")
            position += len(line)


def _parquet(plan: Plan, unit: Unit) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    path, column = plan.path(unit.first), plan.recipe["text"]
    with readable(path), pyarrow.parquet.ParquetFile(path) as file:
        _check_column(file.schema_arrow, column, path)
        sizes = [file.metadata.row_group(number).num_rows for number in range(unit.end)]
        first, total = sum(sizes[: unit.start]), sum(sizes[unit.start :])
        groups, rows_read = list(range(unit.start, unit.end)), 0
        try:
            for batch in file.iter_batches(
                ROWS_AT_ONCE, row_groups=groups, columns=[column], use_threads=False
            ):
                for record in batch.to_pylist():
                    rows_read += 1
                    position = first + rows_read - 1
                    yield _document(
                        plan,
                        unit.first,
                        position,
                        _value(record, column),
                        unit.bytes * rows_read // total,
                        f"row {position}",
                    )
        except pyarrow.ArrowException as error:
            raise OSError(str(error)) from error


def _check_column(schema: Any, column: str, path: Path) -> None:
    """Raise InputError unless ``column`` is a column, or a field of a struct column (``meta.body``)."""
    import pyarrow

    if column in schema.names:
        return
    kind: Any = pyarrow.struct(list(schema))
    for part in column.split("."):
        if not pyarrow.types.is_struct(kind) or kind.get_field_index(part) < 0:
            seen, available = f"text={column}, no such column in {path}", ", ".join(schema.names)
            raise InputError(
                Problem("text", seen, f"the columns are {available}", "write text=COLUMN with one of them")
            )
        kind = kind.field(part).type


def _value(record: Any, name: str) -> bytes | BadRow:
    try:
        return text_of(record, name)
    except BadRow as bad:
        return bad


def _dataset(plan: Plan, unit: Unit) -> Iterator[Document]:
    recipe = plan.recipe
    config = DatasetConfig(
        name=recipe["dataset.name"], split=recipe["dataset.split"], revision=recipe["dataset.revision"]
    )
    bytes_done = 0
    streamed = not unit.bytes
    for number, record in datasource.records(plan.root, config, recipe["text"], unit.start, unit.end):
        result = _value(record, recipe["text"])
        size = 0 if isinstance(result, BadRow) else len(result)
        bytes_done = bytes_done + size if streamed else unit.bytes * (number - unit.start + 1) // (unit.end - unit.start)
        yield _document(
            plan, 0, unit.start << MEMBER_BITS | number if streamed else number, result, bytes_done, f"row {number}"
        )


_READERS: dict[str, Callable[[Plan, Unit], Iterator[Document]]] = {
    "whole": _whole, "lines": _ranged, "jsonl": _ranged, "parquet": _parquet, "dataset": _dataset,
}  # fmt: skip
