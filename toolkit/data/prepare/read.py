"""The documents of a work unit in a fixed order, in memory bounded by one document (for Parquet: by a page).

After a kill a unit is read from its start again and finished documents are dropped: reading is a hundredth of
the work.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.config.prepare import InputDatasetConfig, InputFormat, OnBadRow
from toolkit.data.prepare.hf_dataset import read_range
from toolkit.data.prepare.input_file import (
    BUFFER_BYTES,
    BYTE_ORDER_MARK,
    InputReader,
    check_text,
    convert_read_errors,
    detect_format,
    is_archive,
    is_splittable,
)
from toolkit.data.prepare.plan import PreparationPlan, WorkUnit, row_group_ranges
from toolkit.data.prepare.text_formats import BadRow, NumberedRow, extract_text, parse_line, read_rows
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

BATCH_ROWS = 64
HEAD_BYTES = 4096
MEMBER_BITS = 40  # bits of a document's position in an archive for its number within the member file


@dataclass(slots=True)
class InputDocument:
    """A document of the input.

    Attributes:
        position: a byte offset or a number within its source.
        content: UTF-8 unless the input is not.
        bytes_done: bytes of the unit read so far.
        location: the position in words, for error messages.
        bad: why a row skipped by ``on_bad_row=skip`` has no document; empty for all other documents.
    """

    source: int
    position: int
    content: bytes
    bytes_done: int
    location: str
    bad: str = ""


def read_documents(plan: PreparationPlan, unit: WorkUnit) -> Iterator[InputDocument]:
    """Yield the documents of a unit. Raises InputError naming file and position of what cannot be read."""
    return _READERS["whole" if unit.whole else plan.sources[unit.first].format](plan, unit)


def decode_document(content: bytes) -> tuple[bytes, str]:
    """Return a document as UTF-8 and as text.

    Invalid UTF-8 becomes U+FFFD; valid bytes are returned unchanged.
    """
    try:
        return content, content.decode()
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text.encode(), text


def _make_document(
    plan: PreparationPlan, source: int, position: int, result: bytes | BadRow, bytes_done: int, location: str
) -> InputDocument:
    """Make a document. Raises InputError for a bad row that is not skipped."""
    if not isinstance(result, BadRow):
        return InputDocument(source, position, result, bytes_done, location)
    if plan.recipe["on_bad_row"] != OnBadRow.skip.name:
        raise _bad_row_error(plan.path(source), location, result)
    return InputDocument(source, position, b"", bytes_done, location, result.seen)


def _bad_row_error(path: Path, location: str, bad: BadRow) -> InputError:
    return InputError(Problem(bad.key, f"{path}, {location}: {bad.seen}", bad.rule, bad.remedy))


def _read_whole_files(plan: PreparationPlan, unit: WorkUnit) -> Iterator[InputDocument]:
    """Read whole files, including archives."""
    bytes_before = 0
    for source in range(unit.first, unit.last):
        path, size = plan.path(source), plan.sources[source].bytes
        reader = _read_archive if is_archive(path) else _read_file
        with convert_read_errors(path), InputReader(path) as opened:
            for position, result, location in reader(plan, source, opened):
                yield _make_document(
                    plan, source, position, result, bytes_before + min(opened.bytes_read, size), location
                )
        bytes_before += size


def _read_file(
    plan: PreparationPlan, source: int, opened: InputReader
) -> Iterator[tuple[int, bytes | BadRow, str]]:
    kind = plan.sources[source].format
    return (
        (number, result, _location_in(kind, number))
        for number, result in _read_rows(plan, source, kind, opened.text(), "")
    )


def _read_archive(
    plan: PreparationPlan, source: int, opened: InputReader
) -> Iterator[tuple[int, bytes | BadRow, str]]:
    archive_format = InputFormat[plan.sources[source].format]
    for member, (name, file) in enumerate(opened.members()):
        kind = detect_format(name, archive_format).name
        for number, result in _read_rows(plan, source, kind, file, f"its file {name}, "):
            yield member << MEMBER_BITS | number, result, f"its file {name}, {_location_in(kind, number)}"


def _read_rows(
    plan: PreparationPlan, source: int, kind: str, file: Any, location: str
) -> Iterator[NumberedRow]:
    try:
        yield from read_rows(kind, file, plan.recipe["text"])
    except BadRow as bad:  # nothing of this file can be read any more
        raise _bad_row_error(plan.path(source), f"{location}{kind}", bad) from bad


def _location_in(kind: str, number: int) -> str:
    lines = kind in (InputFormat.lines.name, InputFormat.jsonl.name)
    return (
        f"line {number + 1}"
        if lines
        else "document 1"
        if kind == InputFormat.text.name
        else f"row {number + 1}"
    )


def _read_byte_range(plan: PreparationPlan, unit: WorkUnit) -> Iterator[InputDocument]:
    """Read the lines that begin in a byte range of a file."""
    path, kind, name = plan.path(unit.first), plan.sources[unit.first].format, plan.recipe["text"]
    with convert_read_errors(path), io.BufferedReader(io.FileIO(path), BUFFER_BYTES) as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        else:
            check_text(file.peek(HEAD_BYTES)[:HEAD_BYTES], str(path))
        position = file.tell()
        while position < unit.end and (line := file.readline()):
            result: bytes | BadRow
            try:
                result = parse_line(kind, line if position else line.removeprefix(BYTE_ORDER_MARK), name)
            except BadRow as bad:
                result = bad
            bytes_done = min(position + len(line), unit.end) - unit.start
            yield _make_document(
                plan, unit.first, position, result, bytes_done, f"the line at byte {position}"
            )
            position += len(line)


def _read_parquet(plan: PreparationPlan, unit: WorkUnit) -> Iterator[InputDocument]:
    import pyarrow
    import pyarrow.parquet

    path, column = plan.path(unit.first), plan.recipe["text"]
    with convert_read_errors(path), pyarrow.parquet.ParquetFile(path) as file:
        _check_column(file.schema_arrow, column, path)
        sizes = [file.metadata.row_group(number).num_rows for number in range(unit.end)]
        first, total = sum(sizes[: unit.start]), sum(sizes[unit.start :])
        groups, rows_read = list(range(unit.start, unit.end)), 0
        try:
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=groups, columns=[column], use_threads=False
            ):
                for record in batch.to_pylist():
                    rows_read += 1
                    position = first + rows_read - 1
                    yield _make_document(
                        plan,
                        unit.first,
                        position,
                        _extract(record, column),
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


def _extract(record: Any, name: str) -> bytes | BadRow:
    try:
        return extract_text(record, name)
    except BadRow as bad:
        return bad


def _read_dataset(plan: PreparationPlan, unit: WorkUnit) -> Iterator[InputDocument]:
    recipe = plan.recipe
    config = InputDatasetConfig(
        name=recipe["dataset.name"], split=recipe["dataset.split"], revision=recipe["dataset.revision"]
    )
    bytes_done = 0
    streamed = not unit.bytes
    for number, record in read_range(plan.root, config, recipe["text"], unit.start, unit.end):
        result = _extract(record, recipe["text"])
        size = 0 if isinstance(result, BadRow) else len(result)
        bytes_done = (
            bytes_done + size
            if streamed
            else unit.bytes * (number - unit.start + 1) // (unit.end - unit.start)
        )
        yield _make_document(
            plan,
            0,
            unit.start << MEMBER_BITS | number if streamed else number,
            result,
            bytes_done,
            f"row {number}",
        )


_READERS: dict[str, Callable[[PreparationPlan, WorkUnit], Iterator[InputDocument]]] = {
    "whole": _read_whole_files,
    "lines": _read_byte_range,
    "jsonl": _read_byte_range,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}


LARGE_BYTES = 8 << 20  # of a document; smaller ones fit the memory of any machine
# Bytes of memory that the tokenizer needs per byte of a document: 105 for words, 145 for one long word.
TOKENISER_MEMORY = 150


def check_memory(document: InputDocument, path: Path) -> None:
    """Raise InputError if memory does not suffice to tokenise the document; the library would abort."""
    size = len(document.content)
    if size < LARGE_BYTES:
        return
    import psutil

    available = psutil.virtual_memory().available
    if size * TOKENISER_MEMORY > available:
        seen = f"{path}, {document.location}: a document of {size / 2**20:,.0f} MiB"
        rule = (
            f"the tokenizer takes a document as a whole, in {TOKENISER_MEMORY} times its size of memory "
            f"({size * TOKENISER_MEMORY / 2**30:,.1f} GiB; {available / 2**30:,.1f} GiB are available)"
        )
        remedy = (
            "split it into several documents or remove it, then start again to continue; "
            "or use a machine with more memory"
        )
        raise InputError(Problem("input", seen, rule, remedy))


CHECKED_ROWS = 8
MAX_PROBLEMS = 20


def check_first_rows(plan: PreparationPlan, sources: Sequence[int], progress: Progress) -> None:
    """Read the first rows of ``sources``, which need no units or hashes yet, to find wrong input at once.

    Raises InputError with a problem for each file that has one, up to MAX_PROBLEMS.
    """
    problems: list[Problem] = []
    with progress.task("checking the input", total=len(sources), unit="files") as task:
        for source in sources:
            try:
                _check_source(plan, source)
            except InputError as error:
                problems += error.problems
                if len(problems) >= MAX_PROBLEMS:
                    break
            task.advance()
    if problems:
        raise InputError(*problems)


def _check_source(plan: PreparationPlan, source: int) -> None:
    input_source, path = plan.sources[source], plan.path(source)
    if input_source.format == InputFormat.dataset.name:
        return
    if input_source.format == InputFormat.text.name and not is_archive(path):
        with (
            convert_read_errors(path),
            InputReader(path) as opened,
        ):  # only the beginning: a document is the whole file
            opened.text()
        return
    unit = _first_unit(input_source.format, path, input_source.bytes, source)
    if unit is not None:
        for _ in islice(read_documents(replace(plan, units=(unit,)), unit), CHECKED_ROWS):
            pass


def _first_unit(format_name: str, path: Path, size: int, source: int) -> WorkUnit | None:
    """Return the beginning of a file as a work unit; None if the file is empty."""
    if format_name == InputFormat.parquet.name:
        group = next(iter(row_group_ranges(path, 1)), None)
        return None if group is None else WorkUnit(source, source + 1, *group)
    if is_splittable(path, format_name):
        return WorkUnit(source, source + 1, 0, size, size) if size else None
    return WorkUnit(source, source + 1, 0, 0, size)
