"""Positions of a parameter's elements in ZeRO's flat buffers. Pure arithmetic; imports no torch.

    ZeRO 1, 2, two ranks, a [2, 3] and b [4]        ZeRO 3
    rank 0   a0 a1 a2 a3 a4 a5                      a0 a1 a2  b0 b1
    rank 1   b0 b1 b2 b3 pad pad                    a3 a4 a5  b2 b3

Sources: ``deepspeed/runtime/zero/stage_1_and_2.py`` (``flatten_dense_tensors_aligned``,
``get_partition_info``) and ``deepspeed/runtime/zero/stage3.py`` (``partition_numel``,
``_create_fp16_sub_groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from toolkit.checkpoint.catalog import DTYPES, ArchiveRecord, TensorPiece
from toolkit.checkpoint.planner import shift_box
from toolkit.checkpoint.shard import Box, TensorKey, flat_boxes


@dataclass(frozen=True, slots=True)
class BufferRange:
    """Elements ``start .. start + numel`` of a row-major parameter, stored from element ``buffer_start`` of
    the flat buffer of rank ``rank``.
    """

    rank: int
    start: int
    buffer_start: int
    numel: int


def partition_numel(numels: Iterable[int], ranks: int, alignment: int) -> int:
    """ZeRO 1, 2: return the elements per rank of a group: all parameters, padded to a multiple of
    ``alignment``.

    ``alignment`` must be a multiple of ``ranks``.
    """
    assert alignment % ranks == 0, f"alignment {alignment} for {ranks} ranks"
    return -(-sum(numels) // alignment) * alignment // ranks


def partition_ranges(offset: int, numel: int, partition: int) -> Iterator[BufferRange]:
    """ZeRO 1, 2: yield the ranges of the parameter at elements ``offset .. offset + numel`` of a group with
    ``partition`` elements per rank.
    """
    at, end = offset, offset + numel
    while at < end:
        rank = at // partition
        stop = min(end, (rank + 1) * partition)
        yield BufferRange(rank, at - offset, at - rank * partition, stop - at)
        at = stop


def share_numel(numel: int, ranks: int) -> int:
    """ZeRO 3: return the elements that each rank allocates for a parameter; those of the last ranks are
    padded.
    """
    return -(-numel // ranks)


def sub_groups(shares: Sequence[int], sub_group_size: int) -> Iterator[range]:
    """ZeRO 3: yield the parameters of a group that share a flat buffer, given each rank's elements of each
    parameter.

    A sub-group is full once it has ``sub_group_size`` elements or more, as in ``zero_optimization``.
    """
    first = filled = 0
    for number, share in enumerate(shares):
        filled += share
        if filled >= sub_group_size or number == len(shares) - 1:
            yield range(first, number + 1)
            first, filled = number + 1, 0


def share_ranges(buffer_start: int, numel: int, ranks: int) -> Iterator[BufferRange]:
    """ZeRO 3: yield the ranges of a parameter whose shares begin at element ``buffer_start`` of each rank's
    (sub-)group buffer.
    """
    share = share_numel(numel, ranks)
    for rank in range(ranks):
        start = rank * share
        if start >= numel:
            return
        yield BufferRange(rank, start, buffer_start, min(share, numel - start))


def range_pieces(
    key: TensorKey,
    dtype: str,
    global_shape: tuple[int, ...],
    box: Box,
    ranges: Iterable[BufferRange],
    locate: Callable[[int], tuple[str, int, ArchiveRecord | None]],
) -> tuple[TensorPiece, ...]:
    """Convert the flat ranges of a parameter to pieces.

    Args:
        key: The canonical tensor.
        dtype: Torch's name.
        global_shape: Shape of the canonical tensor.
        box: The part of the canonical tensor that the parameter is: all of it, or a tensor rank's part.
        ranges: Where the ranks' flat buffers store the parameter.
        locate: For a rank, returns the file, the first byte of its flat buffer, and the archive record that
            contains it.
    """
    itemsize, pieces = DTYPES[dtype].itemsize, []
    for flat_range in ranges:
        file, begin, record = locate(flat_range.rank)
        begin_in_file = begin + flat_range.buffer_start * itemsize
        for inner, numel in _boxes(
            box.shape, box.offset, flat_range.start, flat_range.start + flat_range.numel
        ):
            end = begin_in_file + numel * itemsize
            pieces.append(
                TensorPiece(key, dtype, global_shape, inner, file, begin_in_file, end, record=record)
            )
            begin_in_file = end
    return tuple(pieces)


@lru_cache(maxsize=2**14)
def _boxes(
    shape: tuple[int, ...], offset: tuple[int, ...], start: int, stop: int
) -> tuple[tuple[Box, int], ...]:
    """Return a flat range of a box as boxes with their sizes. Cached: layers have equal shapes, so few of
    millions of calls differ.
    """
    return tuple((shift_box(inner, offset), inner.numel) for inner in flat_boxes(shape, start, stop))
