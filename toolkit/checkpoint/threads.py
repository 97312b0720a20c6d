"""The one way in which checkpoints are worked on by several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """``work`` of every item, in their order. After an error no further one is begun."""
    with ThreadPoolExecutor(workers, thread_name_prefix="checkpoint") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
