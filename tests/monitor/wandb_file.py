"""Read an offline W&B run: records in LevelDB's log format, after a header of seven bytes.

Blocks of 32 KiB contain chunks of (checksum u32, length u16, kind u8). A record is one full chunk, or a
first, middle ..., and last chunk.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
FILE_HEADER = 7


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), FILE_HEADER, b""
    assert content[:4] == b":W&B", content[:7]
    while at + HEADER.size <= len(content):
        if BLOCK - at % BLOCK < HEADER.size:  # the rest of the block is too small for a chunk
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(content, at)
        parts += content[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (WHOLE, LAST):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    """Return the logged rows, without W&B's own columns."""
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


def run_record(path: Path) -> Any:
    """Return id, project, display name, group, tags and configuration of the run."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def configuration(path: Path) -> dict[str, Any]:
    return {update.key: json.loads(update.value_json) for update in run_record(path).config.update}


def alerts(path: Path) -> list[tuple[str, str, str]]:
    """Return title, text and level of each alert."""
    found = (record.alert for record in records(path) if record.WhichOneof("record_type") == "alert")
    return [(alert.title, alert.text, alert.level) for alert in found]


def summary(path: Path) -> dict[str, Any]:
    """Return the last value of every column, including texts."""
    found: dict[str, Any] = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "summary":
            found |= {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.summary.update
            }
    return found


def exit_code(path: Path) -> int | None:
    """Return the exit code; None if the run was not closed."""
    return next(
        (record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"),
        None,
    )


def stats(path: Path) -> set[str]:
    """Return the names of W&B's own system metrics with their label: ``cpu/l:node-0``."""
    return {
        item.key
        for record in records(path)
        if record.WhichOneof("record_type") == "stats"
        for item in record.stats.item
    }
