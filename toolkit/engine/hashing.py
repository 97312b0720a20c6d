"""Hash tensors that should be equal on several ranks.

A tensor's memory is read as 64-bit words w_0, w_1, ... Word i is multiplied by an odd weight that depends on
i modulo COLUMNS, and the products are summed modulo 2^64. An odd weight is invertible modulo 2^64, so a
change of a single word, and hence of any single bit, always changes the hash. Two changes, or two swapped
words, cancel only within one column. Integer sums do not depend on the order of summation, so the hash is the
same on every device. Memory is read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

COLUMNS = 256
COPY_CHUNK = 2**22  # words copied at a time from memory that is not aligned to words
WORD = 8


@torch.no_grad()
def hash_tensors(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Hash tensors of any shapes and dtypes that lie on ``device``: int64 [tensors]."""
    sums = torch.zeros(len(tensors), COLUMNS, dtype=torch.int64, device=device)
    for row, tensor in zip(sums, tensors, strict=True):
        _add(row, tensor.detach().reshape(-1))
    return (sums * _weights(device)).sum(1)


def _weights(device: torch.device) -> torch.Tensor:
    """Odd weights that are far apart: multiples of 2^64 / golden ratio (Knuth, TAOCP 3, section 6.4)."""
    return (torch.arange(COLUMNS, dtype=torch.int64, device=device) * 2 + 1) * -7046029254386353131


def _add(row: torch.Tensor, flat: torch.Tensor) -> None:
    """Add the words of ``flat`` to ``row``, column by column."""
    per_word = WORD // flat.element_size()
    words = flat.numel() // per_word
    whole, rest = flat[: words * per_word], flat[words * per_word :]
    if flat.data_ptr() % WORD == 0 and flat.storage_offset() % per_word == 0:
        _add_words(row, whole.view(torch.int64))
    else:
        for chunk in whole.split(COPY_CHUNK * per_word):  # COPY_CHUNK is a multiple of COLUMNS
            _add_words(row, chunk.clone().view(torch.int64))
    if rest.numel():
        rest_bytes = rest.clone().view(torch.uint8)
        row[: rest_bytes.numel()] += rest_bytes


def _add_words(row: torch.Tensor, words: torch.Tensor) -> None:
    rows = words.numel() // COLUMNS
    row += words[: rows * COLUMNS].view(rows, COLUMNS).sum(0)
    rest = words[rows * COLUMNS :]
    row[: rest.numel()] += rest
