"""``metrics.jsonl`` and ``eval.jsonl``: one JSON object a line, floats in full precision (``NaN`` and ``Infinity`` as Python's
``json`` writes and reads them)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from toolkit.monitor.sink import NullSink, Row


class JsonlSink(NullSink):
    """Each row is handed to the system at once: whoever follows the file sees it, and a killed process loses none."""

    def __init__(self, metrics_file: Path, eval_file: Path) -> None:
        metrics_file.parent.mkdir(parents=True, exist_ok=True)
        self._metrics = metrics_file.open("a", encoding="utf-8")
        self._eval = eval_file.open("a", encoding="utf-8")

    def log_step(self, row: Row) -> None:
        _write(self._metrics, row)

    def log_eval(self, row: Row) -> None:
        _write(self._eval, row)

    def close(self, exit_code: int) -> None:
        self._metrics.close()
        self._eval.close()


def _write(file: TextIO, row: Row) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; none where it is not there. A line that a stopped machine tore is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if line.endswith("\n") and isinstance(row, dict):
                yield row
