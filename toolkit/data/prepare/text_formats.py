"""Documents in a text file by its format: what a line, an element or a row contains."""

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
MAX_ELEMENT_LENGTH = 256 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")


class BadRow(Exception):
    """A row from which no document can be read. Later rows can still be read."""

    def __init__(self, key: str, seen: str, rule: str, remedy: str) -> None:
        self.key, self.seen, self.rule, self.remedy = key, seen, rule, remedy
        super().__init__(seen)


NumberedRow = tuple[int, bytes | BadRow]  # its number in the file from 0, and its document
BAD_ROW_REMEDY = (
    "correct or remove it, then start again to continue; or write on_bad_row=skip to skip such rows"
)


def read_rows(kind: str, file: IO[bytes], name: str) -> Iterator[NumberedRow]:
    """Yield the documents of ``file``, which is uncompressed text.

    Args:
        name: the field or column with the text.

    Raises:
        BadRow: the rest of the file cannot be read.
    """
    return READERS[kind](file, name)


def parse_line(kind: str, line: bytes, name: str) -> bytes:
    """Return the document of a line of ``lines`` or ``jsonl``. Raises BadRow."""
    if kind == InputFormat.lines.name:
        return line.removesuffix(b"\n").removesuffix(b"\r")
    if not line.strip():
        return b""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow("input", str(error), "every line of a .jsonl file is JSON", BAD_ROW_REMEDY) from error
    return extract_text(record, name)


def extract_text(record: Any, name: str) -> bytes:
    """Return the field ``name`` of an object.

    ``meta.body`` is a nested field, unless a field has that whole name.
    """
    try:
        value = get_field(record, name)
    except KeyError:
        available = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        rule = f"every row is an object with the document's text (here: {available})"
        raise BadRow(
            "text", f"text={name}, no such field in it", rule, "write text=FIELD, or on_bad_row=skip"
        ) from None
    return encode_text(value, name)


def get_field(record: Any, name: str) -> Any:
    """Get a possibly nested field.

    Below a null, the value is null. Raises KeyError if there is no such field.
    """
    if isinstance(record, dict) and name in record:
        return record[name]
    for part in name.split("."):
        if record is None:
            return None
        if not isinstance(record, dict):
            raise KeyError(part)
        record = record[part]
    return record


def encode_text(value: Any, name: str) -> bytes:
    """Encode a text; null is the empty document. Lone surrogates, which JSON allows, are replaced later."""
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


def _read_text(file: IO[bytes], name: str) -> Iterator[NumberedRow]:
    yield 0, file.read()


def _line_reader(kind: str) -> Callable[[IO[bytes], str], Iterator[NumberedRow]]:
    def read(file: IO[bytes], name: str) -> Iterator[NumberedRow]:
        for number, line in enumerate(file):
            try:
                yield number, parse_line(kind, line, name)
            except BadRow as bad:
                yield number, bad

    return read


def _read_json(file: IO[bytes], name: str) -> Iterator[NumberedRow]:
    """Read a JSON array, or JSON lines, which many .json files contain."""
    head = cast(io.BufferedReader, file).peek(CHUNK).lstrip()
    if not head.startswith(b"["):
        yield from _line_reader(InputFormat.jsonl.name)(file, name)
        return
    for number, record in enumerate(_json_elements(file)):
        try:
            yield number, extract_text(record, name)
        except BadRow as bad:
            yield number, bad


def _json_elements(file: IO[bytes]) -> Iterator[Any]:
    """Yield the elements of a JSON array one after another."""
    decoder, text = json.JSONDecoder(), io.TextIOWrapper(cast(Any, file), "utf-8", errors="replace")
    buffer, position, number = "", 0, 0

    def read_more() -> bool:
        nonlocal buffer, position
        buffer, position = buffer[position:], 0
        chunk = text.read(max(CHUNK, len(buffer)))
        buffer += chunk
        return bool(chunk)

    def skip_space() -> str:
        """Return the next character that is not space, at ``position``; empty at the end."""
        nonlocal position
        while True:
            position = cast(re.Match[str], _SPACE.match(buffer, position)).end()
            if position < len(buffer) or not read_more():
                return buffer[position : position + 1]

    def malformed(why: object) -> BadRow:
        return BadRow(
            "input",
            f"element {number}: {why}",
            "a .json file is an array of objects, or has an object on each line",
            "correct or remove the file",
        )

    skip_space()
    position += 1  # the bracket
    if skip_space() == "]":
        return
    while True:
        skip_space()
        try:
            value, end = decoder.raw_decode(buffer, position)
            if end == len(buffer) and read_more():
                continue  # a number may continue in the next chunk
        except json.JSONDecodeError as error:
            if len(buffer) - position > MAX_ELEMENT_LENGTH or not read_more():
                raise malformed(error) from error
            continue
        except RecursionError as error:
            raise malformed(error) from error
        yield value
        number, position = number + 1, end
        next_character = skip_space()
        position += 1
        if next_character == "]":
            return
        if next_character != ",":
            raise malformed(f"{next_character or 'the end'!r} instead of a comma or a bracket")


def _read_separated(delimiter: str) -> Callable[[IO[bytes], str], Iterator[NumberedRow]]:
    def read(file: IO[bytes], name: str) -> Iterator[NumberedRow]:
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
                yield number, _read_cell(row, column, len(header))
            except StopIteration:
                return
            except (csv.Error, BadRow) as error:
                yield (
                    number,
                    error
                    if isinstance(error, BadRow)
                    else BadRow("input", str(error), "a row follows the rules of CSV", BAD_ROW_REMEDY),
                )
            number += 1

    return read


def _read_cell(row: list[str], column: int, columns: int) -> bytes:
    if row and len(row) != columns:
        raise BadRow(
            "input",
            f"{len(row)} fields",
            f"every row has the {columns} fields of the first line",
            BAD_ROW_REMEDY,
        )
    return row[column].encode("utf-8", errors="surrogateescape") if row else b""


READERS: dict[str, Callable[[IO[bytes], str], Iterator[NumberedRow]]] = {
    "text": _read_text,
    "lines": _line_reader("lines"),
    "jsonl": _line_reader("jsonl"),
    "json": _read_json,
    "csv": _read_separated(","),
    "tsv": _read_separated("\t"),
}
