"""Sources of numbered samples, and their implementation for text: windows over a row of tokens."""

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


class SampleSource(Protocol):
    """One source of samples. Reading is safe in several threads."""

    @property
    def count(self) -> int:
        """Samples per epoch, at least one."""

    @property
    def block(self) -> int:
        """Samples that are stored together, the unit of shuffling and of reading.

        A block has about ``permutation.BLOCK_BYTES``."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of samples as delivered."""

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype of samples as stored and prefetched: ``dtype`` or narrower integers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    def buffers(self, epochs: Ints, indices: Ints) -> Sequence[Buffer]:
        """Return the bytes of samples ``indices`` [n], each below ``count``, in the epochs ``epochs`` [n]."""

    def read(self, epochs: Ints, indices: Ints) -> npt.NDArray[Any]:
        """Return the same samples as an array [n, *shape] of ``stored_dtype``, which may be read-only."""

    def fingerprint(self) -> dict[str, str | int]:
        """Return what determines the samples, in plain JSON types.

        ``data`` is the hash of the bytes. All other entries of several sources in a mixture must be equal.
        """


class TokenWindows:
    """Windows of ``sequence_length + 1`` tokens; the last token of a window is the first of the next.

    Each epoch shifts its windows by another amount, wrapping around the end of the row, so that they do not
    repeat.
    """

    dtype = np.dtype(np.int64)

    def __init__(
        self, source: TokenSource, sequence_length: int, seed: int, *, max_samples: int | None = None
    ) -> None:
        """
        Args:
            max_samples: use only the tokens of so many windows at the beginning of the row.

        Raises:
            InputError: the split is shorter than one window.
        """
        if source.tokens < sequence_length + 1:
            raise InputError(split_too_short(source.tokens, sequence_length))
        self.source = source
        whole = source.tokens // sequence_length
        self.count = min(whole, max_samples or whole)
        # The tokens that windows read, wrapping around at their end.
        limited = self.count < whole
        self._tokens = self.count * sequence_length + 1 if limited else source.tokens
        self.block = block_samples(sequence_length, source.token_bytes)
        self.stored_dtype, self.shape = source.dtype, (sequence_length + 1,)
        self._length = sequence_length
        self._seed = seed

    def starts(self, epochs: Ints, indices: Ints) -> Ints:
        """Return the first token of each window."""
        # Nearly always all epochs are equal, and sorting them would cost more than everything else.
        same_epoch = epochs.size and (epochs == epochs[0]).all()
        present, inverse = (epochs[:1], 0) if same_epoch else np.unique(epochs, return_inverse=True)
        shifts = np.array(
            [_shift(self._seed, epoch, self._tokens) for epoch in present.tolist()], dtype=np.int64
        )
        return (indices * self._length + shifts[inverse]) % self._tokens

    def buffers(self, epochs: Ints, indices: Ints) -> list[Buffer]:
        starts = self.starts(epochs, indices)
        tokens, length = self._tokens, self._length + 1
        wrapping = np.flatnonzero(starts + length > tokens)  # at most one window per epoch
        if not wrapping.size:
            return self.source.windows(starts, length)
        inside = np.where(starts + length > tokens, 0, starts)
        buffers = self.source.windows(inside, length)
        for row in wrapping.tolist():
            before_end = tokens - int(starts[row])
            end, begin = (
                self.source.windows(np.array([first]), part)[0]
                for first, part in ((int(starts[row]), before_end), (0, length - before_end))
            )
            buffers[row] = b"".join((end, begin))
        return buffers

    def read(self, epochs: Ints, indices: Ints) -> npt.NDArray[Any]:
        """Return windows [n, sequence_length + 1] of the source's dtype."""
        return stack_buffers(self.buffers(epochs, indices), self.stored_dtype, self.shape)

    def fingerprint(self) -> dict[str, str | int]:
        return {
            "data": self.source.data_hash,
            "tokenizer": self.source.tokenizer_hash,
            "sequence_length": self._length,
            **({} if self._tokens == self.source.tokens else {"max_samples": self.count}),
        }


def stack_buffers(
    buffers: Sequence[Buffer], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Join samples into one read-only array [n, *shape] with a single copy and no Python loop."""
    return np.frombuffer(b"".join(buffers), dtype).reshape(len(buffers), *shape)


@lru_cache(maxsize=64)
def _shift(seed: int, epoch: int, tokens: int) -> int:
    return int(epoch_shifts(seed, np.array([epoch], dtype=np.int64), tokens)[0])


def split_too_short(tokens: int, sequence_length: int, split: str = "train") -> Problem:
    """Return the problem of a split that is shorter than one window."""
    seen = f"train.sequence_length={sequence_length}, split {split} has {tokens} tokens"
    remedy = f"write train.sequence_length={max(1, tokens - 1)} or less, or prepare more text"
    return Problem(
        "train.sequence_length",
        seen,
        "the data fills at least one window of sequence_length + 1 tokens",
        remedy,
    )
