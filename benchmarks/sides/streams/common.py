"""What each contender of benchmarks/streaming.py is: how its files are made, and how it is opened anywhere in the run.

All deliver the same: int64 tensors [batch, 2,048] in a fixed shuffled order, 8 samples a global batch, in the process that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sides.corpus import Corpus

LENGTH = 2048  # tokens of a sample
GLOBAL_BATCH = 8  # samples
SEED = 0
CACHE = "cache"  # in a contender's folder: what it builds at a first start and finds at a later one
BUFFER = 10_000  # samples in a shuffle buffer, where a contender has one
SHARD = 4096  # samples in a shard of formats that keep whole samples: 16 MiB, so that shuffling shards does something


@dataclass(frozen=True, slots=True)
class Place:
    """One rank; torch.distributed is initialised where there are several."""

    rank: int = 0
    ranks: int = 1

    @property
    def batch(self) -> int:
        return GLOBAL_BATCH // self.ranks


@dataclass(frozen=True, slots=True)
class Opened:
    """``batches``: endless, from the state on that was given. ``state()``: to go on after the batches taken so far."""

    batches: Iterator[torch.Tensor]
    state: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Side:
    """One contender.

    Attributes:
        settings: what it was told, for the reader of the figures.
        packages: distributions whose versions belong to its figures.
        modules: imported before the clock starts.
        prepare: called before the clock starts, where importing takes more than a name.
        make: its files from the corpus, into a folder of its own; None where it reads the corpus's.
        open: (corpus, its folder, place, state or None) -> readings. The batches taken before the state was asked are counted by the
            side itself.
    """

    label: str
    settings: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    open: Callable[[Corpus, Path, Place, bytes | None], Opened]
    make: Callable[[Corpus, Path], None] | None = None
    peer: bool = True
    prepare: Callable[[], object] | None = None


class Counted:
    """Batches, and how many of them were taken."""

    def __init__(self, batches: Iterator[torch.Tensor], taken: int = 0) -> None:
        self._batches = batches
        self.taken = taken

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self._batches)
        self.taken += 1
        return batch
