"""What a stream reads: numbered samples of one source, whatever they are; and the samples of text, windows over a row of tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.order import block_samples, epoch_shifts
from toolkit.data.tokens import TokenSource
from toolkit.errors import InputError, Problem

Ints = npt.NDArray[np.int64]


class Samples(Protocol):
    """One source. Reading is safe in several threads."""

    @property
    def count(self) -> int:
        """Samples of an epoch, at least one."""

    @property
    def block(self) -> int:
        """Samples that lie together on disk, about ``order.BLOCK_BYTES`` of them: the unit of the shuffle, and of reading."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of samples as they are handed over."""

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[Any]:
        """The samples ``numbers`` [n], each in ``0 .. count``, as they are in the epochs ``epochs`` [n]: [n, ...].

        Integers may be narrower than ``dtype``: reading ahead then takes less memory, and widening is for whoever hands them over.
        """

    def fingerprint(self) -> dict[str, str | int]:
        """What decides the samples. Plain JSON types. ``data`` is of the bytes; equal keys of several sources must be equal but for it."""


class TokenWindows:
    """Windows of ``sequence_length + 1`` tokens that share their ends: the last token of one is the first of the next.

    The windows of each epoch are shifted by an amount of its own, around the end of the row, so that they do not repeat.
    """

    dtype = np.dtype(np.int64)

    def __init__(self, source: TokenSource, sequence_length: int, seed: int) -> None:
        """Raises InputError where the split is shorter than one window."""
        if source.tokens < sequence_length + 1:
            raise InputError(too_short(source.tokens, sequence_length))
        self.source = source
        self.count = source.tokens // sequence_length
        self.block = block_samples(sequence_length, source.token_bytes)
        self._length = sequence_length
        self._seed = seed

    def starts(self, epochs: Ints, numbers: Ints) -> Ints:
        """The first token of each window."""
        alike = epochs.size and (epochs == epochs[0]).all()  # nearly always, and sorting them costs more than all the rest
        present, where = (epochs[:1], 0) if alike else np.unique(epochs, return_inverse=True)
        shifts = np.array([_shift(self._seed, epoch, self.source.tokens) for epoch in present.tolist()], dtype=np.int64)
        return (numbers * self._length + shifts[where]) % self.source.tokens

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[Any]:
        """[n, sequence_length + 1] of the source's dtype."""
        starts = self.starts(epochs, numbers)
        tokens, length = self.source.tokens, self._length + 1
        rows = np.empty((len(starts), length), dtype=self.source.dtype)
        around = np.flatnonzero(starts + length > tokens)  # at most one window an epoch
        if not around.size:
            self.source.read(starts, rows)
            return rows
        within = np.flatnonzero(starts + length <= tokens)
        straight = np.empty((len(within), length), dtype=self.source.dtype)
        self.source.read(starts[within], straight)
        rows[within] = straight
        for row in around.tolist():
            before_end = tokens - int(starts[row])
            self.source.read(starts[row : row + 1], rows[row : row + 1, :before_end])
            self.source.read(np.zeros(1, dtype=np.int64), rows[row : row + 1, before_end:])
        return rows

    def fingerprint(self) -> dict[str, str | int]:
        return {"data": self.source.data_hash, "tokenizer": self.source.tokenizer_hash, "sequence_length": self._length}


@lru_cache(maxsize=64)
def _shift(seed: int, epoch: int, tokens: int) -> int:
    return int(epoch_shifts(seed, np.array([epoch], dtype=np.int64), tokens)[0])


def too_short(tokens: int, sequence_length: int, split: str = "train") -> Problem:
    """The problem of a split that does not fill one window."""
    seen = f"train.sequence_length={sequence_length}, split {split} has {tokens} tokens"
    remedy = f"write train.sequence_length={max(1, tokens - 1)} or less, or prepare more text"
    return Problem("train.sequence_length", seen, "the data fills at least one window of sequence_length + 1 tokens", remedy)
