"""The floor: a memory map, a slice, one widening copy. Nothing that reads tokens does less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sides.corpus import Corpus
from sides.streams.common import GLOBAL_BATCH, LENGTH, SEED, Counted, Opened, Place, Side

if TYPE_CHECKING:
    import torch


def sequential(corpus: Corpus, place: Place, first: int = 0) -> Iterator[torch.Tensor]:
    import torch

    tokens = corpus.mapped()
    size = place.batch * LENGTH
    batch = first
    batches = len(tokens) // (GLOBAL_BATCH * LENGTH)
    while True:
        at = (batch % batches) * GLOBAL_BATCH * LENGTH + place.rank * size
        yield torch.from_numpy(tokens[at : at + size].astype(np.int64)).view(place.batch, LENGTH)
        batch += 1


def scattered(corpus: Corpus, place: Place, first: int = 0) -> Iterator[torch.Tensor]:
    """Windows in the order of one permutation of them all."""
    import torch

    windows = corpus.windows(LENGTH)
    order = np.random.default_rng(SEED).permutation(len(windows))
    batches = len(windows) // GLOBAL_BATCH
    batch = first
    while True:
        at = (batch % batches) * GLOBAL_BATCH + place.rank * place.batch
        rows = torch.empty((place.batch, LENGTH), dtype=torch.int64)
        out = rows.numpy()
        for row, window in enumerate(order[at : at + place.batch].tolist()):
            out[row] = windows[window]
        yield rows
        batch += 1


def _side(label: str, settings: str, batches) -> Side:  # type: ignore[no-untyped-def]
    def open_floor(corpus: Corpus, folder: Path, place: Place, state: bytes | None) -> Opened:
        taken = json.loads(state)["batch"] if state else 0
        counted = Counted(batches(corpus, place, taken), taken)
        return Opened(counted, lambda: json.dumps({"batch": counted.taken}).encode())

    return Side(label, settings, ("numpy", "torch"), ("numpy", "torch"), open_floor, peer=False)


SIDES = {
    "floor": _side("memmap, sequential (floor)", "a slice of the map widened to int64, 8 windows at once, not shuffled", sequential),
    "floor-random": _side("memmap, random windows", "one slice a window, order by numpy's permutation kept in memory", scattered),
}
