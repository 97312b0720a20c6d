"""A memory map and a widening copy: the baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from sides.corpus import Corpus
from sides.streams.common import (
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    Contender,
    CountedBatches,
    OpenedStream,
    StreamRank,
)

if TYPE_CHECKING:
    import torch


def slices(corpus: Corpus, place: StreamRank, first: int = 0) -> Iterator[torch.Tensor]:
    """Yield the next 8 windows of the file as one slice."""
    import torch

    tokens = corpus.mapped()
    size = place.batch * LENGTH
    batches = len(tokens) // (GLOBAL_BATCH * LENGTH)
    for batch in count(first):
        at = (batch % batches) * GLOBAL_BATCH * LENGTH + place.rank * size
        yield torch.from_numpy(tokens[at : at + size].astype(np.int64)).view(place.batch, LENGTH)


def windows(
    corpus: Corpus, place: StreamRank, first: int, order: npt.NDArray[np.int64]
) -> Iterator[torch.Tensor]:
    """Yield the windows ``order`` [windows], each sliced and widened into its row of the batch."""
    import torch

    tokens = corpus.mapped()
    batches = len(order) // GLOBAL_BATCH
    for batch in count(first):
        at = (batch % batches) * GLOBAL_BATCH + place.rank * place.batch
        rows = torch.empty((place.batch, LENGTH), dtype=torch.int64)
        out = rows.numpy()
        for row, start in enumerate((order[at : at + place.batch] * LENGTH).tolist()):
            out[row] = tokens[start : start + LENGTH]
        yield rows


def in_sequence(corpus: Corpus, place: StreamRank, first: int = 0) -> Iterator[torch.Tensor]:
    return windows(corpus, place, first, np.arange(corpus.tokens // LENGTH))


def at_random(corpus: Corpus, place: StreamRank, first: int = 0) -> Iterator[torch.Tensor]:
    return windows(corpus, place, first, np.random.default_rng(SEED).permutation(corpus.tokens // LENGTH))


def _side(label: str, settings: str, batches) -> Contender:  # type: ignore[no-untyped-def]
    def open_floor(corpus: Corpus, folder: Path, place: StreamRank, state: bytes | None) -> OpenedStream:
        taken = json.loads(state)["batch"] if state else 0
        counted = CountedBatches(batches(corpus, place, taken), taken)
        return OpenedStream(counted, lambda: json.dumps({"batch": counted.taken}).encode())

    return Contender(label, settings, ("numpy", "torch"), ("numpy", "torch"), open_floor, peer=False)


SIDES = {
    "slice": _side(
        "memmap, one slice a batch",
        "8 neighbouring windows at once: the least that reading can cost; nothing can be chosen",
        slices,
    ),
    "floor": _side(
        "memmap, windows in sequence (floor)",
        "each window sliced and widened into its row of the batch",
        in_sequence,
    ),
    "floor-random": _side(
        "memmap, windows at random", "the same in the order of numpy's permutation, kept in memory", at_random
    ),
}
