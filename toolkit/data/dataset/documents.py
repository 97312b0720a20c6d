"""The documents of a run by their number in its order, which never ends: after the last one of an epoch comes the next epoch.

    map-style    arrow files, mapped: any document at once, in an order that is a pure function of the number (`data/order/permutation.py`)
    streaming    one after another as the source gives them, through a state of `datasets` that says where to go on

Both give text in arrow columns and never make a row into a Python object.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.dataset.encode import Texts
from toolkit.data.order.permutation import Order
from toolkit.errors import InputError, Problem

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import IterableDataset

Ints = npt.NDArray[np.int64]

JOINED_BY = "\n\n"  # columns of one document
BLOCK_DOCUMENTS = 16  # the unit of the shuffle: documents that lie together in their file
STREAM_ROWS = 1000  # of an arrow batch; a state of the source is kept for each


class Documents(Protocol):
    """Safe in several threads.

    Attributes:
        count: documents of an epoch; None where only the end of the stream would tell.
    """

    count: int | None

    def texts(self, numbers: Ints) -> Texts:
        """The documents at ``numbers`` [n] of the run's order, in this order. Null is the empty text.

        A streaming source gives each document once, and of each lane in rising order.
        """

    def passed(self, least: int) -> None:
        """No document before ``least`` is asked for again, here or where a run continues."""

    def state(self) -> dict[str, Any]:
        """From which ``restore`` goes on so that what has not ``passed`` can be read. Plain JSON types; empty, or with ``number``:
        the first document that can be read. Of several ranks' states the least number's serves all."""

    def restore(self, state: dict[str, Any]) -> None:
        """Before the first ``texts``."""


class ArrowDocuments(Documents):
    """Local arrow files in the stream format, as ``datasets`` keeps them. Opening maps them; ranks share the page cache."""

    def __init__(self, files: Sequence[str], columns: Sequence[str], seed: int) -> None:
        """Raises InputError where a file is absent or cut short."""
        self._batches = [batch for file in files for batch in _mapped(file, columns)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self.count = int(self._ends[-1])
        self._order = Order(self.count, block_samples=BLOCK_DOCUMENTS, seed=seed)

    def texts(self, numbers: Ints) -> Texts:
        _, rows = self._order(numbers)
        return self.rows(rows)

    def rows(self, rows: Ints) -> Texts:
        """By their place in the files."""
        import pyarrow as pa

        where = np.searchsorted(self._ends, rows, side="right")
        by_batch = np.argsort(where, kind="stable")
        batches, firsts = np.unique(where[by_batch], return_index=True)
        parts = []
        for number, places in zip(batches.tolist(), np.split(by_batch, firsts[1:]), strict=True):
            batch = self._batches[number]
            parts.append(text_of(batch.take(pa.array(rows[places] - (self._ends[number] - batch.num_rows)))))
        back = np.empty_like(by_batch)
        back[by_batch] = np.arange(len(rows))
        return as_texts(pa.concat_arrays(parts).take(pa.array(back)))

    def in_file_order(self) -> Iterator[Texts]:
        for batch in self._batches:
            yield as_texts(text_of(batch))

    def passed(self, least: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state, "a map-style source has no state"


class _Mark(NamedTuple):
    """Reading on from ``state`` gives document ``number`` first."""

    number: int
    state: dict[str, Any]


class StreamedDocuments(Documents):
    """A ``datasets`` stream, again and again. What belongs to other ranks' lanes is passed over, so every rank reads the whole stream.

    Lanes need documents at different times: what one does not need yet waits here, as text.
    """

    count = None

    def __init__(
        self, open_stream: Callable[[], IterableDataset], columns: Sequence[str], lanes: Ints, all_lanes: int
    ) -> None:
        """
        Args:
            lanes: of this rank, of ``all_lanes``.
        """
        self._open, self._columns, self._all_lanes = open_stream, list(columns), all_lanes
        self._mine = np.isin(np.arange(all_lanes), lanes)
        self._lock = threading.Lock()
        self._waiting: dict[int, bytes] = {}
        self._marks: deque[_Mark] = deque()
        self._begin = _Mark(0, {})
        self._batches: Iterator[pa.Array] | None = None
        self._next = 0

    def texts(self, numbers: Ints) -> Texts:
        with self._lock:
            for number in numbers.tolist():
                while number not in self._waiting:
                    self._read()
            found = [self._waiting.pop(number) for number in numbers.tolist()]
        return b"".join(found), np.cumsum([len(text) for text in found], dtype=np.int64)

    def passed(self, least: int) -> None:
        with self._lock:
            while len(self._marks) > 1 and self._marks[1].number <= least:
                self._marks.popleft()

    def state(self) -> dict[str, Any]:
        with self._lock:
            mark = self._marks[0] if self._marks else self._begin
            return {"number": mark.number, "state": mark.state}

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self._begin = _Mark(state["number"], state["state"])

    def _read(self) -> None:
        """One arrow batch more."""
        if self._batches is None:
            self._next = self._begin.number
            self._batches = self._endless()
        column = next(self._batches)
        numbers = self._next + np.arange(len(column))
        mine = np.flatnonzero(self._mine[numbers % self._all_lanes])
        text, ends = as_texts(column)
        firsts = np.concatenate([[0], ends[:-1]])
        for place in mine.tolist():
            self._waiting[self._next + place] = bytes(text[firsts[place] : ends[place]])
        self._next += len(column)

    def _endless(self) -> Iterator[pa.Array]:
        state = self._begin.state
        while True:
            stream = self._open().select_columns(self._columns).with_format("arrow")
            if state:
                stream.load_state_dict(state)
            before = stream.state_dict()
            empty = not state
            for table in stream.iter(batch_size=STREAM_ROWS):
                self._marks.append(_Mark(self._next, before))
                yield text_of(table.combine_chunks().to_batches()[0])
                before, empty = stream.state_dict(), False
            if empty:
                raise no_documents()
            state = {}


def no_documents() -> InputError:
    return InputError(
        Problem(
            "data.dataset.path",
            "the stream ended without a document",
            "there is a document to train on",
            "name another split or another dataset",
        )
    )


def _mapped(file: str, columns: Sequence[str]) -> list[pa.RecordBatch]:
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.memory_map(file)) as reader:
            return [batch.select(list(columns)) for batch in reader if batch.num_rows]
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            Problem(
                file,
                f"{file}: {error}",
                "the arrow files that `datasets` made of the dataset are there and whole",
                "delete the folder that it lies in and start again, which makes them anew",
            )
        ) from error


def text_of(batch: pa.RecordBatch) -> pa.Array:
    """One text a row of the batch's columns, joined by an empty line where there are several; null is left out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [pc.cast(column, pa.large_string()) for column in batch.columns]
    if len(columns) == 1:
        return pc.fill_null(columns[0], "")
    return pc.binary_join_element_wise(
        *columns, pa.scalar(JOINED_BY, pa.large_string()), null_handling="skip"
    )


def as_texts(column: pa.Array) -> Texts:
    """large_string without nulls -> its bytes, not copied."""
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    text = memoryview(content)[int(ends[0]) : int(ends[-1])] if content is not None else b""
    return text, ends[1:] - ends[0]
