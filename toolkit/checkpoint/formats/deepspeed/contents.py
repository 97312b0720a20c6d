"""What files hold of a stored parameter, before anything is known of its canonical tensor. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.checkpoint.catalog import DTYPES, ArchiveRecord, DamagedFile, TensorPiece
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed.geometry import FlatRun, run_pieces
from toolkit.checkpoint.formats.stored_tensor import StoredTensor, row_major
from toolkit.checkpoint.shard import Box, TensorKey

Shape = tuple[int, ...]


class StoredContent(Protocol):
    """One state of a stored parameter: all its elements, once."""

    @property
    def dtype(self) -> str: ...

    def pieces(self, key: TensorKey, global_shape: Shape, box: Box) -> tuple[TensorPiece, ...]:
        """As pieces of the canonical tensor of which the parameter is ``box``."""


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of a file. It has the parameter's shape, or is flat, or lacks leading dims that are 1 in the box."""

    tensor: StoredTensor

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def pieces(self, key: TensorKey, global_shape: Shape, box: Box) -> tuple[TensorPiece, ...]:
        stored, lead = self.tensor, len(box.shape) - len(self.tensor.shape)
        if stored.shape != box.shape:
            if (1,) * lead + stored.shape == box.shape:
                strides = (0,) * lead + stored.strides
            elif stored.numel == box.numel and (stored.numel < 2 or stored.strides == (1,)):
                strides = row_major(box.shape)
            else:
                raise DamagedFile(
                    stored.storage.file,
                    f"{key} has shape {stored.shape} in {stored.storage.file}, not {box.shape}",
                    "a parameter's states have its shape",
                )
            stored = StoredTensor(stored.storage, stored.offset, box.shape, strides)
        return tuple(torch_zip.tensor_pieces(stored, key, global_shape, box))


@dataclass(frozen=True, slots=True)
class FlatContent:
    """Runs of elements in flat buffers of ranks.

    Attributes:
        runs: makes them; a large run's parameters have many.
        buffers: of each rank: the file, the byte at which the buffer begins, and the record that has it.
    """

    dtype: str
    runs: Callable[[], Iterable[FlatRun]]
    buffers: Sequence[tuple[str, int, ArchiveRecord | None]]

    def pieces(self, key: TensorKey, global_shape: Shape, box: Box) -> tuple[TensorPiece, ...]:
        return run_pieces(key, self.dtype, global_shape, box, self.runs(), self.buffers.__getitem__)


@dataclass(slots=True)
class RankParameter:
    """A parameter as one rank of model parallelism has it.

    Attributes:
        shape: what the rank has of it.
        model: its weight in the model's own files; None where they do not have it.
        master: its weight as the optimizer updates it; None where no optimizer does, or where it updates ``model`` itself.
        moments: by the optimizer's names.
        copies: more of the same, which other ranks hold too, by state; only to be compared.
    """

    shape: Shape
    model: StoredContent | None = None
    model_dtype: str | None = None  # also where the model's files have a placeholder
    master: StoredContent | None = None
    moments: dict[str, StoredContent] = field(default_factory=dict)
    copies: list[tuple[str, StoredContent]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlacedContent:
    """``content`` is ``box`` of a canonical tensor."""

    box: Box
    content: StoredContent

    def pieces(self, key: TensorKey, global_shape: Shape) -> tuple[TensorPiece, ...]:
        return self.content.pieces(key, global_shape, self.box)


def as_flat_buffer(value: object, file: str, what: str, least: int) -> StoredTensor:
    """``value`` as a flat buffer of at least ``least`` elements. Raises Damage where it is none."""
    if (
        not isinstance(value, StoredTensor)
        or len(value.shape) != 1
        or (value.numel > 1 and value.strides != (1,))
    ):
        seen = (
            f"a tensor of shape {value.shape}"
            if isinstance(value, StoredTensor)
            else f"{type(value).__name__}"
        )
        raise DamagedFile(
            file, f"{what} in {file} is {seen}", "ZeRO keeps its partitions as flat tensors in the file"
        )
    if value.numel < least:
        raise DamagedFile(
            file,
            f"{what} in {file} has {value.numel} of {least} elements",
            "a partition has its part of every parameter",
        )
    return value


def locate_buffer(tensor: StoredTensor) -> tuple[str, int, ArchiveRecord | None]:
    """The file of a flat buffer, its first byte, and the record of the archive that has it."""
    return (
        tensor.storage.file,
        tensor.storage.begin + tensor.offset * DTYPES[tensor.dtype].itemsize,
        tensor.storage.record,
    )
