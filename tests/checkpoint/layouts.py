"""Simulated ranks in one process: each rank is a list of shards of the same tensors.

A layout is a function (name, tensor, ranks) -> for each rank, its (box, replica, replicas).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import Box, Shard, StateReader, TensorKey, flat_boxes

NAMESPACE = "test/1"


@dataclass(frozen=True)
class ReplicaBox:
    box: Box
    replica: int = 0
    replicas: int = 1


Layout = Callable[[Sequence[int], int], list[list[ReplicaBox]]]


def flat(shape: Sequence[int], ranks: int) -> list[list[ReplicaBox]]:
    """A ZeRO partition: equal flat ranges, the last ones short or empty."""
    numel = torch.Size(shape).numel()
    each = -(-numel // ranks)
    ranges = [(min(rank * each, numel), min((rank + 1) * each, numel)) for rank in range(ranks)]
    return [[ReplicaBox(box) for box in flat_boxes(shape, *part)] for part in ranges]


def split_along(dim: int) -> Layout:
    """A tensor-parallel split into unequal parts; a tensor without that dim is replicated."""

    def split(shape: Sequence[int], ranks: int) -> list[list[ReplicaBox]]:
        if len(shape) <= dim:
            return replicated(shape, ranks)
        cuts = [shape[dim] * rank * rank // (ranks * ranks) for rank in range(ranks + 1)]
        boxes = []
        for low, high in pairwise(cuts):
            offset, extent = [0] * len(shape), list(shape)
            offset[dim], extent[dim] = low, high - low
            boxes.append([ReplicaBox(Box(tuple(offset), tuple(extent)))])
        return boxes

    return split


def replicated(shape: Sequence[int], ranks: int) -> list[list[ReplicaBox]]:
    return [[ReplicaBox(Box.whole(shape), rank, ranks)] for rank in range(ranks)]


def flat_in_pairs(shape: Sequence[int], ranks: int) -> list[list[ReplicaBox]]:
    """ZeRO within halves of the ranks, replicated over the halves; an odd rank has nothing."""
    if ranks < 2:
        return replicated(shape, ranks)
    half = ranks // 2
    parts = flat(shape, half)
    boxes = [[ReplicaBox(item.box, copy, 2) for item in part] for copy in range(2) for part in parts]
    return boxes + [[] for _ in range(ranks - 2 * half)]


def first_only(shape: Sequence[int], ranks: int) -> list[list[ReplicaBox]]:
    return [[ReplicaBox(Box.whole(shape))], *([] for _ in range(ranks - 1))]


LAYOUTS: Mapping[str, Layout] = {
    "flat": flat,
    "rows": split_along(0),
    "columns": split_along(1),
    "replicated": replicated,
    "flat_in_pairs": flat_in_pairs,
    "first_only": first_only,
}


def slice_box(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]


def shards_of(
    tensors: Mapping[TensorKey, torch.Tensor], layout: Layout, ranks: int, *, empty: bool = False
) -> list[list[Shard]]:
    """Return each rank's shards: views of the tensors (column splits are not contiguous), or buffers to
    load into.
    """
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    for key, tensor in tensors.items():
        for rank, items in enumerate(layout(tensor.shape, ranks)):
            for item in items:
                data = (
                    torch.full(item.box.shape, 7, dtype=tensor.dtype)
                    if empty
                    else slice_box(tensor, item.box)
                )
                shards[rank].append(
                    Shard(key, tuple(tensor.shape), item.box, data, item.replica, item.replicas)
                )
    return shards


def save(
    directory: Path,
    step: int,
    ranks: Sequence[Sequence[Shard]],
    *,
    stores: Sequence[CheckpointStore] | None = None,
    attempt: int = 1,
    scalars: Mapping[str, object] | None = None,
    background: bool = False,
) -> Path:
    """Save all ranks, each in its own thread."""
    stores = stores or [CheckpointStore(directory, keep_last=9, timeout_seconds=20) for _ in ranks]
    errors: list[BaseException] = []

    def save_rank(rank: int) -> None:
        try:
            stores[rank].save(
                step,
                ranks[rank],
                scalars or {"step": step},
                namespace=NAMESPACE,
                rank=rank,
                ranks=len(ranks),
                attempt=attempt,
                background=background,
            ).wait()
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=save_rank, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return directory / f"step-{step:08d}"


def whole(reader: StateReader, dtype: torch.dtype | None = None) -> dict[TensorKey, torch.Tensor]:
    """Read all tensors of a reader."""
    tensors = {
        key: torch.empty(info.shape, dtype=dtype or getattr(torch, info.dtype))
        for key, info in reader.tensors.items()
    }
    reader.read(
        [Shard(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor) for key, tensor in tensors.items()]
    )
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality: NaN equals itself, 0.0 differs from -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(
        torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
        )
    )
