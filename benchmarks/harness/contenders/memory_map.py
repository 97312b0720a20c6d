"""A memory map and a widening copy: the baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from harness.contenders.common import (
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    Contender,
    CountedBatches,
    OpenedStream,
    StreamRank,
)
from harness.corpus import Corpus

if TYPE_CHECKING:
    import torch


def read_slices(corpus: Corpus, stream_rank: StreamRank, first: int = 0) -> Iterator[torch.Tensor]:
    """Yield the next 8 windows of the file as one slice."""
    import torch

    tokens = corpus.mapped()
    size = stream_rank.batch * LENGTH
    batches = len(tokens) // (GLOBAL_BATCH * LENGTH)
    for batch in count(first):
        at = (batch % batches) * GLOBAL_BATCH * LENGTH + stream_rank.rank * size
        yield torch.from_numpy(tokens[at : at + size].astype(np.int64)).view(stream_rank.batch, LENGTH)


def read_windows(
    corpus: Corpus, stream_rank: StreamRank, first: int, order: npt.NDArray[np.int64]
) -> Iterator[torch.Tensor]:
    """Yield the windows ``order`` [windows], each sliced and widened into its row of the batch."""
    import torch

    tokens = corpus.mapped()
    batches = len(order) // GLOBAL_BATCH
    for batch in count(first):
        at = (batch % batches) * GLOBAL_BATCH + stream_rank.rank * stream_rank.batch
        rows = torch.empty((stream_rank.batch, LENGTH), dtype=torch.int64)
        out = rows.numpy()
        for row, start in enumerate((order[at : at + stream_rank.batch] * LENGTH).tolist()):
            out[row] = tokens[start : start + LENGTH]
        yield rows


def read_in_sequence(corpus: Corpus, stream_rank: StreamRank, first: int = 0) -> Iterator[torch.Tensor]:
    return read_windows(corpus, stream_rank, first, np.arange(corpus.tokens // LENGTH))


def read_at_random(corpus: Corpus, stream_rank: StreamRank, first: int = 0) -> Iterator[torch.Tensor]:
    return read_windows(
        corpus, stream_rank, first, np.random.default_rng(SEED).permutation(corpus.tokens // LENGTH)
    )


def _make_contender(label: str, settings: str, batches) -> Contender:  # type: ignore[no-untyped-def]
    def open_stream(
        corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None
    ) -> OpenedStream:
        taken = json.loads(state)["batch"] if state else 0
        counted = CountedBatches(batches(corpus, stream_rank, taken), taken)
        return OpenedStream(counted, lambda: json.dumps({"batch": counted.taken}).encode())

    return Contender(label, settings, ("numpy", "torch"), ("numpy", "torch"), open_stream, peer=False)


CONTENDERS = {
    "slice": _make_contender(
        "memmap, one slice a batch",
        "8 neighbouring windows at once: the least that reading can cost; nothing can be chosen",
        read_slices,
    ),
    "floor": _make_contender(
        "memmap, windows in sequence (floor)",
        "each window sliced and widened into its row of the batch",
        read_in_sequence,
    ),
    "floor-random": _make_contender(
        "memmap, windows at random",
        "the same in the order of numpy's permutation, kept in memory",
        read_at_random,
    ),
}
