"""The interface of the contenders of benchmarks/streaming.py.

All deliver int64 tensors [batch, 2,048] in a fixed shuffled order, 8 samples per global batch, in the
calling process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from harness.corpus import Corpus

LENGTH = 2048  # tokens per sample
GLOBAL_BATCH = 8  # samples
SEED = 0
CACHE = "cache"  # in a contender's folder: built at the first start, found at later ones
BUFFER = 10_000  # samples in a shuffle buffer
SHARD = 4096  # samples per shard, 16 MiB, so that shards can be shuffled


@dataclass(frozen=True, slots=True)
class StreamRank:
    """One rank; torch.distributed is initialized if there are several."""

    rank: int = 0
    ranks: int = 1

    @property
    def batch(self) -> int:
        return GLOBAL_BATCH // self.ranks


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """``batches`` are endless and begin at the given state; ``state()`` continues after the batches taken so
    far."""

    batches: Iterator[torch.Tensor]
    state: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Contender:
    """One contender.

    Attributes:
        settings: a description for the report.
        packages: distributions whose versions belong to its figures.
        modules: imported before the clock starts.
        prepare: called before the clock starts, if importing takes more than a name.
        make: writes its files from the corpus into its own folder; None if it reads the corpus.
        open: (corpus, folder, rank, state or None) -> stream. It counts the batches taken before the state.
    """

    label: str
    settings: str
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    open: Callable[[Corpus, Path, StreamRank, bytes | None], OpenedStream]
    make: Callable[[Corpus, Path], None] | None = None
    peer: bool = True
    prepare: Callable[[], object] | None = None


class CountedBatches:
    """Batches, with the number of those taken."""

    def __init__(self, batches: Iterator[torch.Tensor], taken: int = 0) -> None:
        self._batches = batches
        self.taken = taken

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self._batches)
        self.taken += 1
        return batch
