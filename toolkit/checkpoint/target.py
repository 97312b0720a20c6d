"""Description of a checkpoint to write: its files, their fixed bytes, and the pieces that fill the rest.

It mirrors a source: a format's writer returns a ``CheckpointTarget``, and one conversion
(``offline/convert.py``) fills it from any catalog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.checkpoint.catalog import TensorPiece
from toolkit.checkpoint.shard import TensorInfo, TensorKey


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """CRC-32 of bytes ``begin .. end`` of a file, to be written (4 bytes, little endian) at each offset in
    ``offsets``.
    """

    begin: int
    end: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file of ``numbytes``. Bytes that neither ``fixed`` nor a piece covers are zero (padding).

    Attributes:
        name: Path within the target's folder, with forward slashes.
        numbytes: Length of the file.
        fixed: Offset -> bytes: headers, pickles, scalars.
        checksums: Of zip records; they do not overlap.
        free: Users may edit the file (settings, a tokenizer), so the manifest does not record it.
    """

    name: str
    numbytes: int
    fixed: Mapping[int, bytes]
    checksums: tuple[FileChecksum, ...] = ()
    free: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTarget:
    """A checkpoint to write.

    Attributes:
        format: ``native``, ``deepspeed``, ...; recorded in the manifest.
        namespace: Namespace of the tensors' names.
        step: Completed optimizer steps.
        tensors: Tensors in the dtypes in which they are written.
        pieces: Each element of each tensor exactly once. May create the pieces on access.
        copies: Further copies that the layout requires. May create the pieces on access.
        files: Every file, also those without pieces.
        identity: Text that determines every byte besides the source: format, layout, sizes. A killed
            conversion continues if source and identity are the same.
        manifest: Name of the file that records every piece with its hashes.
        scalars: Recorded in the manifest; plain JSON types.
        notes: What users of the vendor's own loader must know.
    """

    format: str
    namespace: str
    step: int
    tensors: Mapping[TensorKey, TensorInfo]
    pieces: Mapping[TensorKey, Sequence[TensorPiece]]
    copies: Mapping[TensorKey, Sequence[TensorPiece]] = field(default_factory=dict)
    files: Sequence[TargetFile]
    identity: str
    manifest: str
    scalars: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
