"""A run's ``uploads`` folder, through which the ranks of a run coordinate an upload.

    run.json                            a random name of this run directory
    wanted.json                         from rank 0: the checkpoint to send, or that nothing follows
    step-00000100-0f1e2d3c4b5a/         one record of each object that was sent: size and version
    failing-00001                       there while uploads of rank 1 fail; not empty if its file is damaged
                                        on disk
    pending                             there while the newest checkpoint is not in the store

Only ``run.json`` is synced. After a power failure the content of another file may be lost, which counts as an
absent file: the object is sent again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.remote.pointer import StoredCheckpoint
from toolkit.files import write_whole
from toolkit.remote.objects import ObjectVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedUpload:
    """The files that rank 0 of an attempt wants every rank to send.

    Attributes:
        number: Counts what the attempt wants, from 1.
        name: The folder of the checkpoint in the run's ``checkpoints``; None: nothing follows.
        folder: The folder of the checkpoint in the store.
    """

    attempt: int
    number: int
    name: str | None = None
    folder: str | None = None


class UploadFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._wanted, self._pending = path / "wanted.json", path / "pending"
        path.mkdir(parents=True, exist_ok=True)

    def run_name(self) -> str:
        """Return the random name of the run directory. The first call creates it."""
        file = self.path / "run.json"
        if not file.is_file():
            write_whole(file, json.dumps({"run": os.urandom(8).hex()}) + "\n")
        name: str = json.loads(file.read_bytes())["run"]
        return name

    # ---- from rank 0 to the others

    def write_wanted(self, wanted: WantedUpload) -> None:
        write_whole(self._wanted, json.dumps(asdict(wanted)), durable=False)

    def read_wanted(self, attempt: int) -> WantedUpload | None:
        """Return what rank 0 of ``attempt`` wants; None before its first word."""
        found = _read_object(self._wanted)
        return WantedUpload(**found) if found is not None and found["attempt"] == attempt else None

    # ---- from the others to rank 0

    def record(self, stored: StoredCheckpoint, file: FileRecord) -> ObjectVersion | None:
        """Return the version with which a file was sent; None if it was not."""
        found = _read_object(self._record_file(stored, file))
        return None if found is None else ObjectVersion(found["e_tag"], found["version"])

    def write_record(self, stored: StoredCheckpoint, file: FileRecord, version: ObjectVersion) -> None:
        record = self._record_file(stored, file)
        record.parent.mkdir(exist_ok=True)
        write_whole(record, json.dumps({"bytes": file.bytes, **asdict(version)}), durable=False)

    def remove_record(self, stored: StoredCheckpoint, file: FileRecord) -> None:
        self._record_file(stored, file).unlink(missing_ok=True)

    def keep_only(self, stored: StoredCheckpoint) -> None:
        """Remove the records of all other checkpoints."""
        for folder in self.path.glob("step-*"):
            if folder.name != stored.folder:
                for file in folder.iterdir():
                    file.unlink(missing_ok=True)
                folder.rmdir()

    def failing_ranks(self) -> dict[int, bool]:
        """Return the ranks whose uploads fail now, and whether that is because of a damaged file."""
        failing = {}
        for file in sorted(self.path.glob("failing-*")):
            with suppress(FileNotFoundError):  # the rank has succeeded at this moment
                failing[int(file.name.partition("-")[2])] = file.stat().st_size > 0
        return failing

    def set_failing(self, rank: int, *, damaged: bool) -> None:
        self._failing_file(rank).write_text("damaged" if damaged else "", encoding="utf-8")

    def clear_failing(self, rank: int) -> None:
        self._failing_file(rank).unlink(missing_ok=True)

    # ---- for the next start

    @property
    def pending(self) -> bool:
        """Whether the newest checkpoint is not in the store."""
        return self._pending.exists()

    def set_pending(self, checkpoint: Path) -> None:
        write_whole(self._pending, f"{checkpoint.name}\n", durable=False)

    def clear_pending(self) -> None:
        self._pending.unlink(missing_ok=True)

    def _record_file(self, stored: StoredCheckpoint, file: FileRecord) -> Path:
        return self.path / stored.folder / f"{file.file.replace('/', '_')}.json"

    def _failing_file(self, rank: int) -> Path:
        return self.path / f"failing-{rank:05d}"


def _read_object(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found
