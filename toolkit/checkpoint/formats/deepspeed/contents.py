"""The content of a stored parameter as its files have it, before its canonical tensor is known. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.checkpoint.catalog import DTYPES, ArchiveRecord, DamagedFile, TensorPiece
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed.geometry import BufferRange, range_pieces
from toolkit.checkpoint.formats.stored_tensor import StoredTensor, row_major
from toolkit.checkpoint.shard import Box, TensorKey

Shape = tuple[int, ...]


class StoredContent(Protocol):
    """All elements of one state of a stored parameter, each once."""

    @property
    def dtype(self) -> str: ...

    def pieces(self, key: TensorKey, global_shape: Shape, box: Box) -> tuple[TensorPiece, ...]:
        """Return the pieces of the canonical tensor whose part ``box`` is this parameter."""


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of a file. It has the parameter's shape, or is flat, or lacks leading dims of size 1."""

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
                    "the states of a parameter have its shape",
                )
            stored = StoredTensor(stored.storage, stored.offset, box.shape, strides)
        return tuple(torch_zip.tensor_pieces(stored, key, global_shape, box))


@dataclass(frozen=True, slots=True)
class FlatContent:
    """Ranges of elements in the ranks' flat buffers.

    Attributes:
        dtype: Torch's name.
        ranges: Creates the ranges, of which a large model has many.
        buffers: For each rank, the file, the buffer's first byte, and the archive record that contains it.
    """

    dtype: str
    ranges: Callable[[], Iterable[BufferRange]]
    buffers: Sequence[tuple[str, int, ArchiveRecord | None]]

    def pieces(self, key: TensorKey, global_shape: Shape, box: Box) -> tuple[TensorPiece, ...]:
        return range_pieces(key, self.dtype, global_shape, box, self.ranges(), self.buffers.__getitem__)


@dataclass(slots=True)
class RankParameter:
    """A parameter on one model-parallel rank.

    Attributes:
        shape: Shape of the rank's part.
        model: The weight in the model's files, if they have it.
        model_dtype: Dtype of the weight, also if the model's files have a placeholder.
        master: The weight that the optimizer updates, if it is not ``model`` itself.
        moments: The optimizer's states, by its own names.
        copies: Further copies by state, on other ranks; only compared.
    """

    shape: Shape
    model: StoredContent | None = None
    model_dtype: str | None = None
    master: StoredContent | None = None
    moments: dict[str, StoredContent] = field(default_factory=dict)
    copies: list[tuple[str, StoredContent]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PlacedContent:
    """``content`` is the part ``box`` of a canonical tensor."""

    box: Box
    content: StoredContent

    def pieces(self, key: TensorKey, global_shape: Shape) -> tuple[TensorPiece, ...]:
        return self.content.pieces(key, global_shape, self.box)


def as_flat_buffer(value: object, file: str, description: str, min_numel: int) -> StoredTensor:
    """Return ``value`` as a flat buffer of at least ``min_numel`` elements.

    Raises DamagedFile if it is not one.
    """
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
            file, f"{description} in {file} is {seen}", "ZeRO stores its partitions as flat tensors"
        )
    if value.numel < min_numel:
        raise DamagedFile(
            file,
            f"{description} in {file} has {value.numel} of {min_numel} elements",
            "a partition contains its part of every parameter",
        )
    return value


def locate_buffer(tensor: StoredTensor) -> tuple[str, int, ArchiveRecord | None]:
    """Return the file of a flat buffer, its first byte, and the archive record that contains it."""
    return (
        tensor.storage.file,
        tensor.storage.begin + tensor.offset * DTYPES[tensor.dtype].itemsize,
        tensor.storage.record,
    )
