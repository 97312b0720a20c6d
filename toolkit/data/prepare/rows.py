"""Documents in a stream of text, by its format: what a line, an element or a row of it holds."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from toolkit.config.prepare import InputFormat

CHUNK = 256 << 10
MOST_ELEMENT = 256 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")


class BadRow(Exception):
    """A row without a document that can be read. The rows after it can."""

    def __init__(self, key: str, seen: str, rule: str, remedy: str) -> None:
        self.key, self.seen, self.rule, self.remedy = key, seen, rule, remedy
        super().__init__(seen)


Row = tuple[int, bytes | BadRow]  # its number in the file from 0 on, its document
MEND = "correct or remove it, then start again to continue; or write on_bad_row=skip to leave out such rows"


def rows(kind: str, file: IO[bytes], name: str) -> Iterator[Row]:
    """The documents of ``file``, which is uncompressed text.

    Args:
        name: of the field or column that holds the text.

    Raises:
        BadRow: the file cannot be read from here on.
    """
    return READERS[kind](file, name)


def line_of(kind: str, line: bytes, name: str) -> bytes:
    """The document of a line of ``lines`` or ``jsonl``. Raises BadRow."""
    if kind == InputFormat.lines.name:
        return line.removesuffix(b"\n").removesuffix(b"\r")
    if not line.strip():
        return b""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow("input", str(error), "every line of a .jsonl file is JSON", MEND) from error
    return text_of(record, name)


def text_of(record: Any, name: str) -> bytes:
    """Of an object, the field ``name``; ``meta.body`` is the field body of the field meta, unless a field has that whole name."""
    try:
        value = pick(record, name)
    except KeyError:
        there = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        rule = f"every row is an object with the document's text (here: {there})"
        raise BadRow(
            "text", f"text={name}, no such field in it", rule, "write text=FIELD, or on_bad_row=skip"
        ) from None
    return text_bytes(value, name)


def pick(record: Any, name: str) -> Any:
    """Raises KeyError where there is no such field. Null has none below it: null."""
    if isinstance(record, dict) and name in record:
        return record[name]
    for part in name.split("."):
        if record is None:
            return None
        if not isinstance(record, dict):
            raise KeyError(part)
        record = record[part]
    return record


def text_bytes(value: Any, name: str) -> bytes:
    """Null is the empty document. Half a surrogate pair, which JSON can hold, is not UTF-8: replaced later, as any such byte."""
    if value is None:
        return b""
    if not isinstance(value, str):
        rule = f"the field {name} holds text (here: {type(value).__name__})"
        raise BadRow(
            "text",
            f"{name}={str(value)[:40]}",
            rule,
            "write text=FIELD with a field of text, or on_bad_row=skip",
        )
    return value.encode("utf-8", errors="surrogatepass")


def _text(file: IO[bytes], name: str) -> Iterator[Row]:
    yield 0, file.read()


def _by_lines(kind: str) -> Callable[[IO[bytes], str], Iterator[Row]]:
    def read(file: IO[bytes], name: str) -> Iterator[Row]:
        for number, line in enumerate(file):
            try:
                yield number, line_of(kind, line, name)
            except BadRow as bad:
                yield number, bad

    return read


def _json(file: IO[bytes], name: str) -> Iterator[Row]:
    """An array, or JSON lines, which many files of this ending are."""
    head = cast(io.BufferedReader, file).peek(CHUNK).lstrip()
    if not head.startswith(b"["):
        yield from _by_lines(InputFormat.jsonl.name)(file, name)
        return
    for number, record in enumerate(_elements(file)):
        try:
            yield number, text_of(record, name)
        except BadRow as bad:
            yield number, bad


def _elements(file: IO[bytes]) -> Iterator[Any]:
    """The elements of a JSON array, one after another."""
    decoder, text = json.JSONDecoder(), io.TextIOWrapper(cast(Any, file), "utf-8", errors="replace")
    buffer, place, number = "", 0, 0

    def more() -> bool:
        nonlocal buffer, place
        buffer, place = buffer[place:], 0
        chunk = text.read(max(CHUNK, len(buffer)))
        buffer += chunk
        return bool(chunk)

    def skip_space() -> str:
        """The next character that is no space, at ``place``; empty at the end."""
        nonlocal place
        while True:
            place = cast(re.Match[str], _SPACE.match(buffer, place)).end()
            if place < len(buffer) or not more():
                return buffer[place : place + 1]

    def broken(why: object) -> BadRow:
        return BadRow(
            "input",
            f"element {number}: {why}",
            "a .json file is an array of objects, or has an object on each line",
            "correct or remove the file",
        )

    skip_space()
    place += 1  # the bracket
    if skip_space() == "]":
        return
    while True:
        skip_space()
        try:
            value, end = decoder.raw_decode(buffer, place)
            if end == len(buffer) and more():
                continue  # a number may go on
        except json.JSONDecodeError as error:
            if len(buffer) - place > MOST_ELEMENT or not more():
                raise broken(error) from error
            continue
        except RecursionError as error:
            raise broken(error) from error
        yield value
        number, place = number + 1, end
        following = skip_space()
        place += 1
        if following == "]":
            return
        if following != ",":
            raise broken(f"{following or 'the end'!r} in place of a comma or a bracket")


def _separated(delimiter: str) -> Callable[[IO[bytes], str], Iterator[Row]]:
    def read(file: IO[bytes], name: str) -> Iterator[Row]:
        csv.field_size_limit(sys.maxsize)
        text = io.TextIOWrapper(cast(Any, file), "utf-8", errors="surrogateescape", newline="")
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(lines, [])
        if name not in header:
            raise BadRow(
                "text",
                f"text={name}, no such column in it",
                f"the columns are {', '.join(header)}",
                "write text=COLUMN with one of them",
            )
        column, number = header.index(name), 0
        while True:
            try:
                row = next(lines)
                yield number, _cell(row, column, len(header))
            except StopIteration:
                return
            except (csv.Error, BadRow) as error:
                yield (
                    number,
                    error
                    if isinstance(error, BadRow)
                    else BadRow("input", str(error), "a row follows the rules of CSV", MEND),
                )
            number += 1

    return read


def _cell(row: list[str], column: int, columns: int) -> bytes:
    if row and len(row) != columns:
        raise BadRow(
            "input", f"{len(row)} fields", f"every row has the {columns} fields of the first line", MEND
        )
    return row[column].encode("utf-8", errors="surrogateescape") if row else b""


READERS: dict[str, Callable[[IO[bytes], str], Iterator[Row]]] = {
    "text": _text, "lines": _by_lines("lines"), "jsonl": _by_lines("jsonl"), "json": _json, "csv": _separated(","), "tsv": _separated("\t"),
}  # fmt: skip
