"""Read the files of a checkpoint in a store: only the ranges that are needed, at most once each."""

from __future__ import annotations

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.file_reader import CheckpointFiles
from toolkit.checkpoint.remote.pointer import SUBJECT
from toolkit.errors import InputError
from toolkit.paths import Url, relative_name
from toolkit.remote.fetch import RequestLimits
from toolkit.remote.storage import open_store

READER_THREADS = 16  # a thread waits for the answer of its request; each has one block of memory
# No second attempt starts in parallel to a slow one: it would read bytes twice.
LIMITS = RequestLimits(part_bytes=4 * 2**20, in_flight=16, hedge_share=0)


class StoredFiles(CheckpointFiles):
    """The files below ``url``. Ranges of one file must come from one version of it.

    A range is requested again after failures, stalls and bodies that break off, for up to
    ``RequestLimits.reading_seconds``; then StorageError is raised, after which a restart may succeed.
    """

    threads = READER_THREADS

    def __init__(self, url: Url, limits: RequestLimits = LIMITS) -> None:
        self.folder = url
        self._files = open_store(url, limits, SUBJECT).for_reading({})

    def __exit__(self, *_: object) -> None:
        pass

    def read_into(self, file: str, begin: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        try:
            content = self._files.read_range(relative_name(file), begin, begin + len(buffer))
        except InputError as error:
            problem = error.problems[0]
            raise DamagedFile(file, problem.seen, problem.rule) from None
        buffer[:] = content

    def changed(self, since: object) -> list[str]:
        """Return no file: reading refuses a file that has changed."""
        return []
