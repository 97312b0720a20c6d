"""A unit of work as documents, in a fixed order, in memory bounded by one document (of parquet: by a page).

A reader that goes on after a kill reads from the unit's start again and drops what was done: reading is a hundredth of the work.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.config.prepare import DatasetConfig, InputFormat
from toolkit.data.prepare import datasource
from toolkit.data.prepare.plan import COMPRESSED, Plan, Unit
from toolkit.errors import InputError, Problem

ROWS_AT_ONCE = 64
BUFFER_BYTES = 1 << 20


@dataclass(slots=True)
class Document:
    """``place``: which of its source: a byte offset or a number. ``done``: bytes of the unit that are read by now."""

    source: int
    place: int
    content: bytes  # UTF-8, unless the input is not
    done: int


def documents(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Raises InputError naming the file and the place of what cannot be read."""
    return _READERS["whole" if unit.whole else plan.sources[unit.first].format](plan, unit)


def where(plan: Plan, unit: Unit, document: Document) -> str:
    """A document of the unit, as a user can find it."""
    path, kind = plan.path(document.source), plan.sources[document.source].format
    if kind == InputFormat.text.name:
        return str(path)
    if kind in (InputFormat.parquet.name, InputFormat.dataset.name):
        return f"{path}, row {document.place & ((1 << 40) - 1)}"  # of a streamed dataset: in its shard
    return f"{path}, line {document.place + 1}" if unit.whole else f"{path}, the line at byte {document.place}"


def decoded(content: bytes) -> tuple[bytes, str]:
    """A document as UTF-8 and as text. What is not UTF-8 becomes U+FFFD; otherwise the very same bytes are given back."""
    try:
        return content, content.decode()
    except UnicodeDecodeError:
        text = content.decode(errors="replace")
        return text.encode(), text


def _whole(plan: Plan, unit: Unit) -> Iterator[Document]:
    """Text files, and compressed ones of any kind."""
    before = 0
    for source in range(unit.first, unit.last):
        path, kind = plan.path(source), plan.sources[source].format
        with _Opened(path) as opened:
            if kind == InputFormat.text.name:
                content = b"".join(opened.lines())
                yield Document(source, 0, content, before + plan.sources[source].bytes)
            else:
                for number, line in enumerate(opened.lines()):
                    content = _content(kind, line, plan, path, f"line {number + 1}")
                    yield Document(source, number, content, before + opened.read)
        before += plan.sources[source].bytes


def _ranged(plan: Plan, unit: Unit) -> Iterator[Document]:
    """The lines that begin in a range of a file's bytes."""
    path, kind = plan.path(unit.first), plan.sources[unit.first].format
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        place = file.tell()
        while place < unit.end and (line := file.readline()):
            content = _content(kind, line, plan, path, f"the line at byte {place}")
            yield Document(unit.first, place, content, min(place + len(line), unit.end) - unit.start)
            place += len(line)


def _parquet(plan: Plan, unit: Unit) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    path, column = plan.path(unit.first), plan.recipe["text"]
    with pyarrow.parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            seen, there = f"text={column}, no such column in {path}", ", ".join(file.schema_arrow.names)
            raise InputError(Problem("text", seen, f"the columns are {there}", "write text=COLUMN with one of them"))
        sizes = [file.metadata.row_group(number).num_rows for number in range(unit.end)]
        first, rows = sum(sizes[: unit.start]), sum(sizes[unit.start :])
        read = 0
        try:
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=list(range(unit.start, unit.end)), columns=[column], use_threads=False):
                for value in batch.column(0).to_pylist():
                    read += 1
                    content = _text(value, path, f"row {first + read - 1}", column)
                    yield Document(unit.first, first + read - 1, content, unit.bytes * read // rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise _unreadable(path, error) from error


def _dataset(plan: Plan, unit: Unit) -> Iterator[Document]:
    recipe = plan.recipe
    config = DatasetConfig(name=recipe["dataset.name"], split=recipe["dataset.split"], revision=recipe["dataset.revision"])
    done = 0
    streamed = not unit.bytes
    for number, value in datasource.texts(plan.root, config, recipe["text"], unit.start, unit.end):
        content = _text(value, Path(plan.root), f"row {number}", recipe["text"])
        done = done + len(content) if streamed else unit.bytes * (number - unit.start + 1) // (unit.end - unit.start)
        yield Document(0, unit.start << 40 | number if streamed else number, content, done)


_READERS: dict[str, Callable[[Plan, Unit], Iterator[Document]]] = {
    "whole": _whole, "lines": _ranged, "jsonl": _ranged, "parquet": _parquet, "dataset": _dataset,
}  # fmt: skip


class _Opened:
    """A file's bytes, uncompressed. ``read``: how many of the file's own bytes are read by now."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._path = path
        self._raw = pyarrow.OSFile(str(path))
        codec = COMPRESSED.get(path.suffix)
        self._file: BinaryIO = io.BufferedReader(pyarrow.CompressedInputStream(self._raw, codec) if codec else self._raw, BUFFER_BYTES)

    @property
    def read(self) -> int:
        return int(self._raw.tell())

    def lines(self) -> Iterator[bytes]:
        try:
            yield from self._file
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._raw.close()


def _content(kind: str, line: bytes, plan: Plan, path: Path, where: str) -> bytes:
    if kind == InputFormat.lines.name:
        return line.removesuffix(b"\n").removesuffix(b"\r")
    if not line.strip():
        return b""
    name = plan.recipe["text"]
    try:
        record = json.loads(line)
    except ValueError as error:
        remedy = "mend or remove it, then start again"
        raise InputError(Problem("input", f"{path}, {where}: {error}", "every line of a .jsonl file is JSON", remedy)) from error
    if not isinstance(record, dict) or name not in record:
        there = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        seen = f"{path}, {where}: text={name}, no such field in it"
        raise InputError(Problem("text", seen, f"every line is an object with the document's text (here: {there})", "write text=FIELD"))
    return _text(record[name], path, where, name)


def _text(value: Any, path: Path, where: str, name: str) -> bytes:
    """Nothing (null) is the empty document. Half a surrogate pair, which JSON can hold, is not UTF-8: replaced later, as any such byte."""
    if value is None:
        return b""
    if not isinstance(value, str):
        rule = f"the field {name} holds text (here: {type(value).__name__})"
        raise InputError(Problem("text", f"{path}, {where}: {name}={str(value)[:40]}", rule, "write text=FIELD with a field of text"))
    return value.encode("utf-8", errors="surrogatepass")


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(Problem("input", f"{path}: {error}", "every file of the input can be read to its end", "restore or remove the file"))
