"""Prefetch items with a thread.

Items cross over in chunks: waking a thread costs more than reading a short sample.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

JOIN_SECONDS = 10.0  # a thread ends after its current chunk


class _Buffer(Generic[T]):
    """State shared by producer and consumer.

    The thread refers to this and not to `Prefetch`, which can then be freed.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None

    def fill(self, items: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as caught:  # noqa: BLE001 - it is raised by the consumer's next()
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self._closed)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


_running: dict[threading.Thread, _Buffer[Any]] = {}


@atexit.register
def _close_all() -> None:
    """Join all threads: a thread inside numpy while the interpreter shuts down would crash the process."""
    running = dict(_running)
    for buffer in running.values():
        buffer.close()
    for thread in running:
        thread.join(timeout=JOIN_SECONDS)


def _produce(buffer: _Buffer[T], chunks: Iterable[T]) -> None:
    try:
        buffer.fill(chunks)
    finally:
        _running.pop(threading.current_thread(), None)


class Prefetch(Iterator[T]):
    """Iterates over the items of ``chunks``; after the first ``next`` up to ``depth`` chunks are prefetched.

    ``finish`` is applied by the consuming thread: its result is in that core's cache and is not stored in
    advance. An error of ``chunks`` is raised after the items before it. ``close`` (or freeing the object)
    ends the thread; a closed iterator has no more items.
    """

    def __init__(
        self,
        chunks: Iterable[Sequence[T]],
        depth: int,
        name: str = "prefetch",
        *,
        finish: Callable[[T], T] = lambda item: item,
    ) -> None:
        assert depth >= 1, f"depth {depth}"
        buffer: _Buffer[Sequence[T]] = _Buffer(depth)
        self._buffer = buffer
        self._finish = finish
        self._chunk: Iterator[T] = iter(())
        self._chunks: Iterator[Sequence[T]] | None = iter(chunks)  # None once the thread has it
        self._thread = threading.Thread(target=_produce, args=(buffer, self._chunks), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, buffer.close)

    def __next__(self) -> T:
        while True:
            for item in self._chunk:
                return self._finish(item)
            self._chunk = iter(self._buffer.get() if self._chunks is None else self._first(self._chunks))

    def _first(self, chunks: Iterator[Sequence[T]]) -> Sequence[T]:
        """Produce the first chunk here: a busy thread would hold the interpreter longer than that takes."""
        self._chunks = None
        try:
            return next(chunks, ())
        finally:
            _running[self._thread] = self._buffer
            self._thread.start()

    def close(self) -> None:
        self._finalizer()
        self._chunk, self._chunks = iter(()), None
        if self._thread.ident is not None:
            self._thread.join(timeout=JOIN_SECONDS)
