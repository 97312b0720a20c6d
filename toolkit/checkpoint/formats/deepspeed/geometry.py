"""Where the elements of a parameter lie in ZeRO's flat buffers: pure arithmetic, with no files. Imports no torch.

    ZeRO 1, 2, two ranks, a [2, 3] and b [4]        ZeRO 3
    rank 0   a0 a1 a2 a3 a4 a5                      a0 a1 a2  b0 b1
    rank 1   b0 b1 b2 b3 pad pad                    a3 a4 a5  b2 b3

Sources: ``deepspeed/runtime/zero/stage_1_and_2.py`` (``flatten_dense_tensors_aligned``, ``get_partition_info``) and
``deepspeed/runtime/zero/stage3.py`` (``partition_numel``, ``_create_fp16_sub_groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from toolkit.checkpoint.catalog import DTYPES, ArchiveRecord, TensorPiece
from toolkit.checkpoint.planner import shift_box
from toolkit.checkpoint.shard import Box, TensorKey, flat_boxes


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Elements ``start .. start + numel`` of a row-major parameter lie at ``at`` of rank ``rank``'s flat buffer."""

    rank: int
    start: int
    at: int
    numel: int


def partition_numel(numels: Iterable[int], ranks: int, alignment: int) -> int:
    """ZeRO 1, 2: elements of one rank's part of a group: all parameters back to back, padded to a multiple of ``alignment`` (which is a
    multiple of ``ranks``)."""
    assert alignment % ranks == 0, f"alignment {alignment} for {ranks} ranks"
    return -(-sum(numels) // alignment) * alignment // ranks


def range_runs(offset: int, numel: int, partition: int) -> Iterator[FlatRun]:
    """ZeRO 1, 2: the parameter at elements ``offset .. offset + numel`` of a group that is cut into ``partition`` elements a rank."""
    at, end = offset, offset + numel
    while at < end:
        rank = at // partition
        stop = min(end, (rank + 1) * partition)
        yield FlatRun(rank, at - offset, at - rank * partition, stop - at)
        at = stop


def share_numel(numel: int, ranks: int) -> int:
    """ZeRO 3: elements of a parameter that each rank has room for; the last ranks' are padded."""
    return -(-numel // ranks)


def sub_groups(shares: Sequence[int], most: int) -> Iterator[range]:
    """ZeRO 3: which parameters of a group share a flat buffer, given what each rank has of each: a sub-group is full once it has
    ``most`` elements or more (``zero_optimization.sub_group_size``)."""
    first = held = 0
    for number, share in enumerate(shares):
        held += share
        if held >= most or number == len(shares) - 1:
            yield range(first, number + 1)
            first, held = number + 1, 0


def share_runs(at: int, numel: int, ranks: int) -> Iterator[FlatRun]:
    """ZeRO 3: a parameter whose shares begin at ``at`` of each rank's (sub-)group buffer."""
    share = share_numel(numel, ranks)
    for rank in range(ranks):
        start = rank * share
        if start >= numel:
            return
        yield FlatRun(rank, start, at, min(share, numel - start))


def run_pieces(
    key: TensorKey,
    dtype: str,
    global_shape: tuple[int, ...],
    box: Box,
    runs: Iterable[FlatRun],
    locate: Callable[[int], tuple[str, int, ArchiveRecord | None]],
) -> tuple[TensorPiece, ...]:
    """Runs of a parameter as pieces: a few boxes each.

    Args:
        box: which part of the canonical tensor the parameter is: all of it, or what a tensor rank has.
        locate: of a rank: its file, the byte at which its flat buffer begins, and the record of the archive that has the buffer.
    """
    itemsize, pieces = DTYPES[dtype].itemsize, []
    for run in runs:
        file, begin, record = locate(run.rank)
        at = begin + run.at * itemsize
        for inner, numel in _boxes(box.shape, box.offset, run.start, run.start + run.numel):
            end = at + numel * itemsize
            pieces.append(TensorPiece(key, dtype, global_shape, inner, file, at, end, record=record))
            at = end
    return tuple(pieces)


@lru_cache(maxsize=2**14)
def _boxes(
    shape: tuple[int, ...], offset: tuple[int, ...], start: int, stop: int
) -> tuple[tuple[Box, int], ...]:
    """A flat range of the box ``offset, shape``, in boxes with their sizes. Layers' tensors have the same ones: a large run asks for
    few, millions of times."""
    return tuple((shift_box(inner, offset), inner.numel) for inner in flat_boxes(shape, start, stop))
