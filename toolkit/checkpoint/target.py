"""What is to be written, known without writing it: the files of a format, their fixed bytes, and the pieces that go into the rest.

The mirror image of a source: a format's writer gives a ``Target``, and one executor (``convert.py``) fills it from any catalog.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.checkpoint.catalog import TensorPiece
from toolkit.checkpoint.shard import TensorInfo, TensorKey


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """The CRC-32 of bytes ``begin .. end`` of a file, little endian, to be written at each byte of ``places`` (four bytes each)."""

    begin: int
    end: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file of ``numbytes``. Bytes that neither ``fixed`` nor a piece covers are zero (padding).

    Attributes:
        name: within the target's folder, with slashes.
        fixed: offset -> bytes: headers, pickles, scalars.
        checksums: of zip records; no two overlap.
        free: people change it (settings, a tokenizer): the manifest says nothing of it.
    """

    name: str
    numbytes: int
    fixed: Mapping[int, bytes]
    checksums: tuple[FileChecksum, ...] = ()
    free: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTarget:
    """A checkpoint to be.

    Attributes:
        format: ``native``, ``deepspeed``, ...; recorded beside the files.
        tensors: what it holds, in the dtypes in which it holds it.
        pieces: each element of each tensor exactly once. May make them when they are asked for.
        copies: what is written a second time, because a layout replicates it. May make them when they are asked for.
        files: every file. Those of no pieces too.
        identity: what decides every byte beside the source: format, layout and sizes, in words. A conversion that was killed goes
            on where source and identity are the same.
        manifest: the name of the file that records every piece with its hashes.
        scalars: recorded in the manifest, plain JSON types.
        notes: what whoever opens it with the vendor's own loader must know, in words.
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
