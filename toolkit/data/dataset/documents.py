"""The documents of a run by their number in its endless order, epoch after epoch.
    streaming    one after another in the source's order, resumed through a state of `datasets`

Both return text from arrow columns and never convert a row to a Python object.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.dataset.tokenizer_pool import Texts
from toolkit.data.order.permutation import SampleOrder
from toolkit.errors import InputError, Problem

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import IterableDataset

Ints = npt.NDArray[np.int64]

JOINED_BY = "\n\n"  # separates the columns of one document
BLOCK_DOCUMENTS = 16  # the unit of shuffling: documents that are adjacent in their file
STREAM_ROWS = 1000  # per arrow batch; a state of the source is stored for each batch


class DocumentSource(Protocol):
    """The documents of a run. Safe in several threads.

    Attributes:
        count: documents per epoch; None for a stream of unknown length.
    """

    count: int | None

    def read(self, numbers: Ints) -> Texts:
        """Return the documents at ``numbers`` [n] of the run's order; null is the empty text.

        A streaming source returns each document once, and those of each lane in rising order.
        """

    def release(self, first_needed: int) -> None:
        """Declare that no document before ``first_needed`` will be requested again, also after a resume."""

    def state(self) -> dict[str, Any]:
        """Return the state from which ``restore`` can read every document not yet released: plain JSON types.

        It is empty or contains ``number``, the first document that can be read. The state of the rank with
        the lowest number is valid for all ranks.
        """

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state. Called before the first ``read``."""


class ArrowDocuments(DocumentSource):
    """Local arrow files in the stream format of ``datasets``.

    Opening maps them; ranks share the page cache.
    """

    def __init__(self, files: Sequence[str], columns: Sequence[str], seed: int) -> None:
        """Raise InputError if a file is absent or truncated."""
        self._batches = [batch for file in files for batch in _map_batches(file, columns)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self.count = int(self._ends[-1])
        self._order = SampleOrder(self.count, block_samples=BLOCK_DOCUMENTS, seed=seed)

    def read(self, numbers: Ints) -> Texts:
        _, rows = self._order(numbers)
        return self.rows(rows)

    def rows(self, rows: Ints) -> Texts:
        """Return the documents at ``rows`` [n] of the files."""
        import pyarrow as pa

        batch_index = np.searchsorted(self._ends, rows, side="right")
        by_batch = np.argsort(batch_index, kind="stable")
        batches, firsts = np.unique(batch_index[by_batch], return_index=True)
        texts_by_batch = []
        for number, indices in zip(batches.tolist(), np.split(by_batch, firsts[1:]), strict=True):
            batch = self._batches[number]
            texts_by_batch.append(
                join_columns(batch.take(pa.array(rows[indices] - (self._ends[number] - batch.num_rows))))
            )
        original_order = np.empty_like(by_batch)
        original_order[by_batch] = np.arange(len(rows))
        return to_texts(pa.concat_arrays(texts_by_batch).take(pa.array(original_order)))

    def in_file_order(self) -> Iterator[Texts]:
        for batch in self._batches:
            yield to_texts(join_columns(batch))

    def release(self, first_needed: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state, "a map-style source is stateless"


class _StreamPosition(NamedTuple):
    """A stream loaded from ``state`` yields document ``number`` first."""

    number: int
    state: dict[str, Any]


class StreamedDocuments(DocumentSource):
    """An endlessly repeated ``datasets`` stream. Every rank reads all of it and skips other ranks' lanes.

    Lanes need documents at different times; documents that are not needed yet are stored here as text.
    """

    count = None

    def __init__(
        self, open_stream: Callable[[], IterableDataset], columns: Sequence[str], lanes: Ints, all_lanes: int
    ) -> None:
        """
        Args:
            lanes: the lanes of this rank.
            all_lanes: the number of lanes of all ranks.
        """
        self._open, self._columns, self._all_lanes = open_stream, list(columns), all_lanes
        self._is_own_lane = np.isin(np.arange(all_lanes), lanes)
        self._lock = threading.Lock()
        self._pending: dict[int, bytes] = {}
        self._positions: deque[_StreamPosition] = deque()
        self._start = _StreamPosition(0, {})
        self._batches: Iterator[pa.Array] | None = None
        self._next = 0

    def read(self, numbers: Ints) -> Texts:
        with self._lock:
            for number in numbers.tolist():
                while number not in self._pending:
                    self._read_batch()
            documents = [self._pending.pop(number) for number in numbers.tolist()]
        return b"".join(documents), np.cumsum([len(text) for text in documents], dtype=np.int64)

    def release(self, first_needed: int) -> None:
        with self._lock:
            while len(self._positions) > 1 and self._positions[1].number <= first_needed:
                self._positions.popleft()

    def state(self) -> dict[str, Any]:
        with self._lock:
            position = self._positions[0] if self._positions else self._start
            return {"number": position.number, "state": position.state}

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self._start = _StreamPosition(state["number"], state["state"])

    def _read_batch(self) -> None:
        """Read one more arrow batch."""
        if self._batches is None:
            self._next = self._start.number
            self._batches = self._repeat()
        column = next(self._batches)
        numbers = self._next + np.arange(len(column))
        own_rows = np.flatnonzero(self._is_own_lane[numbers % self._all_lanes])
        text, ends = to_texts(column)
        firsts = np.concatenate([[0], ends[:-1]])
        for row_index in own_rows.tolist():
            self._pending[self._next + row_index] = bytes(text[firsts[row_index] : ends[row_index]])
        self._next += len(column)

    def _repeat(self) -> Iterator[pa.Array]:
        state = self._start.state
        while True:
            stream = self._open().select_columns(self._columns).with_format("arrow")
            if state:
                stream.load_state_dict(state)
            state_before = stream.state_dict()
            is_empty = not state
            for table in stream.iter(batch_size=STREAM_ROWS):
                self._positions.append(_StreamPosition(self._next, state_before))
                yield join_columns(table.combine_chunks().to_batches()[0])
                state_before, is_empty = stream.state_dict(), False
            if is_empty:
                raise empty_dataset_error()
            state = {}


def empty_dataset_error() -> InputError:
    return InputError(
        Problem(
            "data.dataset.path",
            "the stream ended without a document",
            "the dataset has a document to train on",
            "name another split or another dataset",
        )
    )


def _map_batches(file: str, columns: Sequence[str]) -> list[pa.RecordBatch]:
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.memory_map(file)) as reader:
            return [batch.select(list(columns)) for batch in reader if batch.num_rows]
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            Problem(
                file,
                f"{file}: {error}",
                "the arrow files that `datasets` wrote for the dataset are present and complete",
                "delete their folder and start again, which writes them again",
            )
        ) from error


def join_columns(batch: pa.RecordBatch) -> pa.Array:
    """Return one text per row, the columns joined by an empty line; nulls are skipped."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [pc.cast(column, pa.large_string()) for column in batch.columns]
    if len(columns) == 1:
        return pc.fill_null(columns[0], "")
    return pc.binary_join_element_wise(
        *columns, pa.scalar(JOINED_BY, pa.large_string()), null_handling="skip"
    )


def to_texts(column: pa.Array) -> Texts:
    """Return the bytes of a large_string array without nulls, not copied."""
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    text = memoryview(content)[int(ends[0]) : int(ends[-1])] if content is not None else b""
    return text, ends[1:] - ends[0]
