"""Read pieces from files into an engine's memory or an array, verifying and casting. Memory is one block
per reading thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from toolkit.checkpoint.catalog import BLOCK_BYTES, flat_span, swap_last_dims
from toolkit.checkpoint.file_reader import (
    BlockBuffer,
    CheckpointFiles,
    SequentialVerifier,
    VerifiedRecords,
    box_slices,
    numpy_dtype,
    open_files,
    view_box,
)
from toolkit.checkpoint.planner import PieceRead, shift_box
from toolkit.checkpoint.shard import Box, flat_boxes
from toolkit.paths import Location
from toolkit.progress import report_progress

T = TypeVar("T")
R = TypeVar("R")


def read_pieces(folder: Location, reads: Sequence[PieceRead], checked: VerifiedRecords | None = None) -> None:
    """Fill the target shards of every read. After a DamagedFile error they are partly filled.

    Args:
        folder: The folder, or the URL in a store, that the pieces' files are in.
        reads: Pieces with their targets.
        checked: See ``CheckpointFiles``.
    """
    local = threading.local()

    def run(read: PieceRead, files: CheckpointFiles) -> None:
        if not hasattr(local, "block"):
            local.block = BlockBuffer()
        read_piece(read, files, local.block)
        report_progress(f"reading {read.piece.key}")

    with open_files(folder, checked) as files:
        if len(reads) < 2 or files.threads == 1:
            for read in reads:
                run(read, files)
            return
        parallel_map(lambda read: run(read, files), reads, files.threads)


def read_piece(
    read: PieceRead, files: CheckpointFiles, block: BlockBuffer, verifier: SequentialVerifier | None = None
) -> None:
    """Fill the target shards of one piece. After a DamagedFile error they are partly filled.

    Args:
        read: The piece and its targets.
        files: Open files of the checkpoint.
        block: This thread's buffer.
        verifier: For a tensor that is read tile after tile with one target; then no byte is read twice.
            Without it, blocks with hashes are read whole.
    """
    piece = read.piece
    if verifier is not None and not verifier.can_verify(piece):
        verifier = None
    per_block = BLOCK_BYTES // piece.itemsize
    origin = tuple(-offset for offset in piece.box.offset)
    as_filed = _swap_box_dims if piece.transposed else _keep_dims
    # The requested boxes in the piece's coordinates, with dims in the order of its file.
    requested = [(target, as_filed(shift_box(target.overlap, origin))) for target in read.targets]
    spans = [flat_span(piece.shape_in_file, local) for _, local in requested]
    low, high = min(first for first, _ in spans), max(end for _, end in spans)
    in_order = len(requested) == 1 and high - low == read.targets[0].overlap.numel
    assert verifier is None or in_order, f"{piece.key}: not one range of {piece.file}"
    direct = _direct_buffer(read, spans) if verifier is not None else None
    for number in range(low // per_block, -(-high // per_block)):
        start, stop = number * per_block, min((number + 1) * per_block, piece.box.numel)
        in_block = [
            item for item, (first, end) in zip(requested, spans, strict=True) if first < stop and end > start
        ]
        if not in_block:
            continue
        if verifier is not None or not piece.hashes:  # the rest of the block is not needed
            start, stop = max(start, low), min(stop, high)
        if direct is not None and verifier is not None:
            verifier.read_into(
                files, piece, start, direct[(start - low) * piece.itemsize : (stop - low) * piece.itemsize]
            )
            continue
        if verifier is not None:
            verifier.read_into(files, piece, start, block.allocate((stop - start) * piece.itemsize))
        else:
            block.load(files, piece, start, stop)
        at = 0
        for box in flat_boxes(piece.shape_in_file, start, stop):
            for target, local_box in in_block:
                common = box.intersect(local_box)
                if common is None:
                    continue
                memory = _memory(target.shard.data)
                values = _view_elements(
                    block.buffer, piece.dtype, box.numel, at * piece.itemsize, memory
                ).reshape(box.shape)
                source = view_box(values, shift_box(common, [-offset for offset in box.offset]))
                to = shift_box(
                    as_filed(common),
                    [p - s for p, s in zip(piece.box.offset, target.shard.box.offset, strict=True)],
                )
                memory[box_slices(to)] = source.swapaxes(-1, -2) if piece.transposed else source
            at += box.numel


def _direct_buffer(read: PieceRead, spans: Sequence[tuple[int, int]]) -> memoryview | None:
    """Return the memory that bytes can be read into directly: same dtype, and one contiguous range on both
    sides. Otherwise None.
    """
    (target,), piece = read.targets, read.piece
    memory, numel = target.shard.data, target.overlap.numel
    if piece.transposed or not isinstance(memory, np.ndarray) or memory.dtype != numpy_dtype(piece.dtype):
        return None
    first, end = flat_span(
        memory.shape, shift_box(target.overlap, [-offset for offset in target.shard.box.offset])
    )
    if not memory.flags.c_contiguous or {end - first, spans[0][1] - spans[0][0]} != {numel}:
        return None
    return memoryview(memory.reshape(-1)[first:end].view(np.uint8))


def _keep_dims(box: Box) -> Box:
    return box


def _swap_box_dims(box: Box) -> Box:
    return Box(swap_last_dims(box.offset), swap_last_dims(box.shape))


def _memory(data: Any) -> Any:
    return data if isinstance(data, np.ndarray) else data.detach()


def _view_elements(buffer: bytearray, dtype: str, count: int, offset: int, like: Any) -> Any:
    """Return ``count`` elements of ``buffer`` from byte ``offset`` without a copy, as torch or numpy,
    whichever ``like`` is.
    """
    if isinstance(like, np.ndarray):
        return np.frombuffer(buffer, numpy_dtype(dtype), count, offset)
    import torch

    return torch.frombuffer(buffer, dtype=getattr(torch, dtype), count=count, offset=offset)


def parallel_map(work: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """Return ``work(item)`` of every item, in order. After an error, no further item is started."""
    with ThreadPoolExecutor(workers, thread_name_prefix="checkpoint") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
