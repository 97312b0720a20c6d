"""Hashes of tensors that should be equal on several ranks.

A tensor's memory is taken as 64-bit words w_0, w_1, ... Word i counts with an odd weight that depends on i modulo COLUMNS, and all are
added modulo 2^64. A change of one word, so of any one bit, always changes the sum: an odd weight has an inverse modulo 2^64. Words that
change places, or two flips, change it unless their columns are the same and their changes cancel. Integer sums are the same in any order,
so the hash is the same on any device; and memory is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

COLUMNS = 256
COPY_CHUNK = 2**22  # words that are copied at once where memory does not begin at a word
WORD = 8


@torch.no_grad()
def hash_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """int64 [tensors], on ``device``, where the tensors lie; whatever their shapes and types."""
    sums = torch.zeros(len(tensors), COLUMNS, dtype=torch.int64, device=device)
    for row, tensor in zip(sums, tensors, strict=True):
        _add(row, tensor.detach().reshape(-1))
    return (sums * _weights(device)).sum(1)


def _weights(device: torch.device) -> torch.Tensor:
    """Odd, and far apart: multiples of 2^64 / golden ratio (Knuth, The Art of Computer Programming 3, 6.4)."""
    return (torch.arange(COLUMNS, dtype=torch.int64, device=device) * 2 + 1) * -7046029254386353131


def _add(row: torch.Tensor, flat: torch.Tensor) -> None:
    """The sums of ``flat``'s words, column by column, to ``row``."""
    a_word = WORD // flat.element_size()
    words = flat.numel() // a_word
    whole, rest = flat[: words * a_word], flat[words * a_word :]
    if flat.data_ptr() % WORD == 0 and flat.storage_offset() % a_word == 0:
        _add_words(row, whole.view(torch.int64))
    else:
        for piece in whole.split(COPY_CHUNK * a_word):  # a multiple of COLUMNS, so columns stay what they are
            _add_words(row, piece.clone().view(torch.int64))
    if rest.numel():
        left = rest.clone().view(torch.uint8)
        row[: left.numel()] += left


def _add_words(row: torch.Tensor, words: torch.Tensor) -> None:
    rows = words.numel() // COLUMNS
    row += words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)
    rest = words[rows * COLUMNS :]
    row[: rest.numel()] += rest
