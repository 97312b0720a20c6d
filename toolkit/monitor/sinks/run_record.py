"""A record of what a service has of a run: the id of the run there, and its steps."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit.files import write_whole
from toolkit.monitor.sink import Kind, Row


class RunRecord:
    """A file in the run's directory with the id of the run in a service whose rows cannot be changed.

    A resumed run repeats the steps after its checkpoint; :meth:`is_new` keeps the service from storing them
    twice.

    Attributes:
        run_id: None before the first start.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self.run_id: str | None = found.get("run_id")
        self._before: dict[str, int] = found.get("steps", {})  # newest step by kind, at the start
        self._steps = dict(self._before)

    def is_new(self, kind: Kind, row: Row) -> bool:
        """Return whether no earlier start has logged a row of this kind and step."""
        return bool(row["step"] > self._before.get(kind.value, -1))

    def logged(self, kind: Kind, row: Row) -> None:
        self._steps[kind.value] = max(row["step"], self._steps.get(kind.value, -1))

    def write(self) -> None:
        text = json.dumps({"run_id": self.run_id, "steps": self._steps})
        write_whole(self._file, text + "\n", durable=False)
