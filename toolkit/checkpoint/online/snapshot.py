"""A copy of what is to be written, so that training may go on. The memory is kept from save to save."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from toolkit.checkpoint.online.writing import Outgoing

_ALIGNMENT = 64  # bytes: of every dtype, and of a cache line


class Snapshot:
    """One buffer of host memory, pinned where data comes from CUDA; grown when more is to be saved than before."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, outgoing: Sequence[Outgoing]) -> list[Outgoing]:
        """The same with ``data`` copied; valid until the next call."""
        sizes = [item.data.numel() * item.data.element_size() for item in outgoing]
        starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        from_cuda = any(item.data.is_cuda for item in outgoing)
        if self._buffer.numel() < starts[-1] or (from_cuda and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before its successor is made
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=from_cuda)
        copies = []
        for item, start, size in zip(outgoing, starts, sizes, strict=False):
            room = self._buffer[start : start + size].view(item.data.dtype).view(item.box.shape)
            room.copy_(item.data, non_blocking=True)
            copies.append(replace(item, data=room))
        if from_cuda:
            torch.cuda.synchronize()
        return copies
