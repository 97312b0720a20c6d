"""Words between ranks that may no longer be able to call each other: a file in the attempt's folder, and a key in the store in which the
process group met, for nodes without a common disk. Neither is waited for without bound: a stopped rank may be the one that serves the
store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from toolkit.files import write_whole

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

STORE_SECONDS = 2.0  # that one call of the store may take


class RankMessages:
    """
    Args:
        folder: made when the first word is written.
        store: a connection of its own, since another thread may sit in a call of the group's; None where one node has all ranks.
    """

    def __init__(self, folder: Path, store: Store | None) -> None:
        self._folder, self._store = folder, store
        self._dead = False  # the store does not answer

    def post(self, name: str, text: str) -> None:
        """For whoever reads ``name`` later; what was there is replaced.

        Raises:
            OSError: there is no file of it; with a store it may have been heard all the same.
        """
        store = self._store
        if store is not None:
            self._ask(lambda: store.set(name, text))
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{name}.json", text, durable=False)

    def read(self, name: str) -> str | None:
        """None: nobody has written it, or it cannot be had."""
        try:
            return (self._folder / f"{name}.json").read_text(encoding="utf-8")
        except OSError:
            return self._from_store(name)

    def look(self, name: str) -> str | None:
        """As :meth:`read`, in the one place where looking again and again costs little: thousands of ranks share the disk of several
        nodes."""
        return self.read(name) if self._store is None else self._from_store(name)

    def _from_store(self, name: str) -> str | None:
        store = self._store
        if store is None:
            return None
        found = self._ask(lambda: store.get(name) if store.check([name]) else b"")
        return found.decode() if found else None

    def _ask(self, call: Callable[[], T]) -> T | None:
        """What the store answers; None where it does not, and from then on nobody asks it."""
        if self._dead:
            return None
        answers: list[T] = []

        def work() -> None:
            try:
                answers.append(call())
            except RuntimeError:  # of torch.distributed: the connection is gone
                self._dead = True

        thread = threading.Thread(target=work, name="mailbox", daemon=True)
        thread.start()
        thread.join(STORE_SECONDS)
        self._dead = self._dead or thread.is_alive()
        return answers[0] if answers else None
