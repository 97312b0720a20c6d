"""What a stream reads: numbered samples of one source, whatever they are; and the samples of text, windows over a row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.order.permutation import block_samples, epoch_shifts
from toolkit.data.tokens.token_array import Buffer, TokenSource
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

    @property
    def stored(self) -> np.dtype[Any]:
        """Of samples as they are kept and read ahead: ``dtype``, or narrower integers, which take less memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""

    def buffers(self, epochs: Ints, numbers: Ints) -> Sequence[Buffer]:
        """The bytes of the samples ``numbers`` [n], each in ``0 .. count``, as they are in the epochs ``epochs`` [n]."""

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[Any]:
        """The same as an array [n, *shape] of ``stored``, which need not be writeable."""

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
        self.stored, self.shape = source.dtype, (sequence_length + 1,)
        self._length = sequence_length
        self._seed = seed

    def starts(self, epochs: Ints, numbers: Ints) -> Ints:
        """The first token of each window."""
        alike = (
            epochs.size and (epochs == epochs[0]).all()
        )  # nearly always, and sorting them costs more than all the rest
        present, where = (epochs[:1], 0) if alike else np.unique(epochs, return_inverse=True)
        shifts = np.array(
            [_shift(self._seed, epoch, self.source.tokens) for epoch in present.tolist()], dtype=np.int64
        )
        return (numbers * self._length + shifts[where]) % self.source.tokens

    def buffers(self, epochs: Ints, numbers: Ints) -> list[Buffer]:
        starts = self.starts(epochs, numbers)
        tokens, length = self.source.tokens, self._length + 1
        around = np.flatnonzero(starts + length > tokens)  # at most one window an epoch
        if not around.size:
            return self.source.windows(starts, length)
        inside = np.where(starts + length > tokens, 0, starts)
        found = self.source.windows(inside, length)
        for row in around.tolist():
            before_end = tokens - int(starts[row])
            end, begin = (
                self.source.windows(np.array([first]), part)[0]
                for first, part in ((int(starts[row]), before_end), (0, length - before_end))
            )
            found[row] = b"".join((end, begin))
        return found

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[Any]:
        """[n, sequence_length + 1] of the source's dtype."""
        return joined(self.buffers(epochs, numbers), self.stored, self.shape)

    def fingerprint(self) -> dict[str, str | int]:
        return {
            "data": self.source.data_hash,
            "tokenizer": self.source.tokenizer_hash,
            "sequence_length": self._length,
        }


def joined(buffers: Sequence[Buffer], dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Samples as one array [n, *shape], which is not writeable. One copy, and no loop of Python's."""
    return np.frombuffer(b"".join(buffers), dtype).reshape(len(buffers), *shape)


@lru_cache(maxsize=64)
def _shift(seed: int, epoch: int, tokens: int) -> int:
    return int(epoch_shifts(seed, np.array([epoch], dtype=np.int64), tokens)[0])


def too_short(tokens: int, sequence_length: int, split: str = "train") -> Problem:
    """The problem of a split that does not fill one window."""
    seen = f"train.sequence_length={sequence_length}, split {split} has {tokens} tokens"
    remedy = f"write train.sequence_length={max(1, tokens - 1)} or less, or prepare more text"
    return Problem(
        "train.sequence_length",
        seen,
        "the data fills at least one window of sequence_length + 1 tokens",
        remedy,
    )
