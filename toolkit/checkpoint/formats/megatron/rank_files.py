"""Lay out the ``.distcp`` files of one rank: files of ``torch.save``, each with one tensor, in sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

from toolkit.checkpoint.catalog import DTYPES
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.dcp.metadata import Blob
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.checkpoint.target import FileChecksum, TargetFile

FILE_BYTES = 4 * 2**30  # per file, unless a single chunk is larger


@dataclass(frozen=True, slots=True)
class _FileTemplate:
    """A file of ``torch.save`` with one tensor of zeros. It depends on dtype and shape only.

    Attributes:
        head, tail: Bytes before and after the tensor's.
        numbytes: Bytes of the tensor.
        checksum_offsets: Offsets of the checksum of the tensor's bytes.
    """

    head: bytes
    numbytes: int
    tail: bytes
    checksum_offsets: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.head) + self.numbytes + len(self.tail)


@cache
def _file_template(dtype: str, shape: tuple[int, ...]) -> _FileTemplate:
    storage = Storage("0", dtype, math.prod(shape))
    layout = torch_zip.lay_out("", StoredTensor.whole(storage, shape), [storage])
    begin, numbytes = layout.storages["0"], storage.numel * DTYPES[dtype].itemsize
    parts = sorted(layout.file.fixed.items())
    head, tail = (
        b"".join(content for at, content in parts if (at < begin) is before) for before in (True, False)
    )
    assert (len(head), begin + numbytes + len(tail)) == (begin, layout.file.numbytes), (
        "fixed bytes follow each other"
    )
    return _FileTemplate(
        head, numbytes, tail, tuple(offset for check in layout.file.checksums for offset in check.offsets)
    )


@dataclass(slots=True)
class RankFiles:
    """The files of one rank, filled one after the other. Blobs have names relative to ``folder``, as in
    ``.metadata``.
    """

    folder: str
    rank: int
    done: list[TargetFile] = field(default_factory=list)
    _fixed: dict[int, bytes] = field(default_factory=dict)
    _checks: list[FileChecksum] = field(default_factory=list)
    _end: int = 0

    def add(self, dtype: str, shape: tuple[int, ...]) -> tuple[Blob, int]:
        """Reserve bytes for a tensor. Returns the blob and the first byte of its elements."""
        form = _file_template(dtype, shape)
        if self._end and self._end + form.length > FILE_BYTES:
            self.close()
        begin = -(-self._end // torch_zip.ALIGNMENT) * torch_zip.ALIGNMENT
        data = begin + len(form.head)
        self._fixed[begin] = form.head
        self._fixed[data + form.numbytes] = form.tail
        if form.checksum_offsets:
            self._checks.append(
                FileChecksum(
                    data, data + form.numbytes, tuple(begin + offset for offset in form.checksum_offsets)
                )
            )
        self._end = begin + form.length
        return Blob(self._name, begin, self._end), data

    def add_object(self, value: object) -> Blob:
        layout = torch_zip.lay_out(self._name, value, [], begin=self._end)
        begin, self._end = self._end, layout.file.numbytes
        self._fixed |= layout.file.fixed
        return Blob(self._name, begin, self._end)

    def close(self) -> None:
        if self._end:
            self.done.append(
                TargetFile(f"{self.folder}/{self._name}", self._end, self._fixed, tuple(self._checks))
            )
        self._fixed, self._checks, self._end = {}, [], 0

    @property
    def _name(self) -> str:
        return f"__{self.rank}_{len(self.done)}.distcp"
