"""Messages between ranks that may no longer be able to make collective calls.

A message is a file in the attempt's folder, and for nodes without a shared disk a key in the process group's
store. Calls of the store are bounded in time, because the rank that serves it may be stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from toolkit.files import write_whole

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

STORE_SECONDS = 2.0  # time-out of one call of the store


class RankMessages:
    """
    Args:
        folder: created by the first message.
        store: a separate connection, because another thread may block in a call of the group's connection;
            None if all ranks share one node.
    """

    def __init__(self, folder: Path, store: Store | None) -> None:
        self._folder, self._store = folder, store
        self._store_failed = False

    def post(self, name: str, text: str) -> None:
        """Publish a message under ``name``, replacing an earlier one.

        Raises:
            OSError: the file could not be written. With a store, other ranks may have the message all the
                same.
        """
        store = self._store
        if store is not None:
            self._call_store(lambda: store.set(name, text))
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{name}.json", text, durable=False)

    def read(self, name: str) -> str | None:
        """Return the message, from the file or the store; None if there is none."""
        try:
            return (self._folder / f"{name}.json").read_text(encoding="utf-8")
        except OSError:
            return self._read_store(name)

    def poll(self, name: str) -> str | None:
        """Read like :meth:`read`, but only from where polling is cheap: thousands of ranks share the disk of
        several nodes.
        """
        return self.read(name) if self._store is None else self._read_store(name)

    def _read_store(self, name: str) -> str | None:
        store = self._store
        if store is None:
            return None
        value = self._call_store(lambda: store.get(name) if store.check([name]) else b"")
        return value.decode() if value else None

    def _call_store(self, call: Callable[[], T]) -> T | None:
        """Return the store's answer; None, for this and all later calls, once it does not answer."""
        if self._store_failed:
            return None
        results: list[T] = []

        def work() -> None:
            try:
                results.append(call())
            except RuntimeError:  # the connection is closed
                self._store_failed = True

        thread = threading.Thread(target=work, name="mailbox", daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        self._store_failed = self._store_failed or thread.is_alive()
        return results[0] if results else None
