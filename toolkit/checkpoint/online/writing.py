"""Write one rank's data file with hashes, from the engine's memory or from a host copy of it."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from toolkit.checkpoint.catalog import BLOCK_BYTES, TensorPiece
from toolkit.checkpoint.file_reader import view_box
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.planner import boxes_to_write, shift_box
from toolkit.checkpoint.shard import Box, Shard, TensorKey, flat_boxes

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: enough for every dtype, and a cache line


@dataclass(frozen=True, slots=True)
class WriteItem:
    """The part ``box`` of a tensor, to be written. ``data`` has shape ``box.shape`` and may be a view on
    any device.
    """

    key: TensorKey
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor

    @property
    def name(self) -> str:
        """Name in the file's header, which describes the content without a manifest."""
        return f"{self.key}:{','.join(map(str, self.box.offset))}"


def items_to_write(shards: Sequence[Shard]) -> list[WriteItem]:
    """Return what this rank writes of its shards, as views of their memory. See ``boxes_to_write``."""
    return [
        WriteItem(
            shard.key,
            shard.global_shape,
            box,
            view_box(shard.data.detach(), shift_box(box, [-o for o in shard.box.offset])),
        )
        for shard in shards
        for box in boxes_to_write(shard)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_data_file(
    path: Path,
    items: Sequence[WriteItem],
    metadata: Mapping[str, str],
    on_piece: Callable[[], None],
    on_sync: Callable[[], None],
    on_block: Callable[[], None] = lambda: None,
) -> tuple[FileRecord, list[TensorPiece]]:
    """Write a safetensors file with hashes and make it durable.

    Args:
        path: The file.
        items: The tensors to write.
        metadata: Metadata of the file's header.
        on_piece: Called after each piece.
        on_sync: Called before the sync.
        on_block: Called after each block of a piece.
    """
    by_name = {item.name: item for item in items}
    header, slots = safetensors.encode_header(
        [(item.name, dtype_name(item.data.dtype), item.box.shape) for item in items], metadata
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(descriptor, memoryview(header))
        pieces = []
        staging: torch.Tensor | None = None
        for entry in slots:
            item = by_name[entry.name]
            if staging is None and not _is_plain(item.data):
                staging = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=item.data.is_cuda)
            hashes = []
            for block in iterate_blocks(item.data, staging):
                hashes.append(xxhash.xxh3_128_hexdigest(block))
                _write_all(descriptor, block)
                on_block()
            pieces.append(
                TensorPiece(
                    item.key,
                    entry.dtype,
                    item.global_shape,
                    item.box,
                    path.name,
                    entry.begin,
                    entry.end,
                    tuple(hashes),
                )
            )
            on_piece()
        on_sync()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size = slots[-1].end if slots else len(header)
    return FileRecord(path.name, size, len(header), xxhash.xxh3_128_hexdigest(header)), pieces


def _is_plain(data: torch.Tensor) -> bool:
    return data.device.type == "cpu" and data.is_contiguous()


def iterate_blocks(data: torch.Tensor, staging: torch.Tensor | None) -> Iterator[memoryview]:
    """Yield the row-major bytes of a tensor in blocks: its own memory if contiguous on the CPU, otherwise
    copied to ``staging``.
    """
    if _is_plain(data):
        everything = data.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(everything), BLOCK_BYTES):
            yield everything[start : start + BLOCK_BYTES]
        return
    assert staging is not None, "data on a device or with gaps needs a staging block"
    step = BLOCK_BYTES // data.element_size()
    room = staging.view(data.dtype)
    for start in range(0, data.numel(), step):
        stop = min(start + step, data.numel())
        at = 0
        for box in flat_boxes(tuple(data.shape), start, stop):
            room[at : at + box.numel].view(box.shape).copy_(view_box(data.detach(), box))
            at += box.numel
        yield staging.numpy().data[: (stop - start) * data.element_size()]


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


class HostSnapshot:
    """One buffer of host memory, pinned if data is on CUDA, that is reused by every save and grows if
    needed.

    It is pinned by ``cudaHostRegister``: torch's allocator of pinned memory rounds sizes up to a power of
    two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    def take(self, outgoing: Sequence[WriteItem]) -> list[WriteItem]:
        """Return the items with ``data`` copied, valid until the next call."""
        sizes = [item.data.numel() * item.data.element_size() for item in outgoing]
        starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        from_cuda = any(item.data.is_cuda for item in outgoing)
        if self._buffer.numel() < starts[-1]:
            self._allocate(starts[-1], pinned=from_cuda)
        copies = []
        for item, start, size in zip(outgoing, starts, sizes, strict=False):
            view = self._buffer[start : start + size].view(item.data.dtype).view(item.box.shape)
            view.copy_(item.data, non_blocking=True)
            copies.append(replace(item, data=view))
        if from_cuda:
            torch.cuda.synchronize()
        return copies

    def _allocate(self, size: int, *, pinned: bool) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
        self._buffer, self._pinned = torch.empty(size, dtype=torch.uint8), False
        if pinned:
            runtime = torch.cuda.cudart()
            self._pinned = (
                runtime.cudaHostRegister(self._buffer.data_ptr(), size, 0) == runtime.cudaError.success
            )
        if pinned and not self._pinned:
            log.warning(
                "%.3g GiB of host memory could not be pinned (ulimit -l): copies for saves are slower",
                size / 2**30,
            )
