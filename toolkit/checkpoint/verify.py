"""Looking at every byte: what a reader checks of the part it reads, and what can be known of values without a reference.

    python -c "from toolkit.checkpoint.verify import verify; print(*verify('runs/RUN'), sep='\\n')"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from toolkit.checkpoint import directory, manifest, open_reader
from toolkit.checkpoint.blocks import Files, check_piece, numpy_dtype
from toolkit.checkpoint.catalog import BLOCK_BYTES, DTYPES, Damage, Piece
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.planner import uncovered
from toolkit.checkpoint.reader import windows
from toolkit.checkpoint.shard import EXP_AVG_SQ, MASTER, WEIGHT, Box, Reader, TensorKey
from toolkit.errors import CheckpointError, Problem


@dataclass(frozen=True, slots=True)
class Finding:
    """``where`` is a file or a tensor."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def verify(path: str | Path) -> list[Finding]:
    """Everything that is wrong with a checkpoint; empty if it is sound.

    Checks the manifest, that every element is stored once, each file's length and header, the hash of every block, that
    values are finite and averages of squares not negative, and that each weight is its master weight, cast.

    Args:
        path: a checkpoint folder, or a run directory: then its newest.

    Raises:
        CheckpointError: there is no checkpoint at ``path``.
    """
    folder = directory.checkpoint_at(Path(path).expanduser())
    if folder is None:
        rule = "a checkpoint or a run directory is verified"
        raise CheckpointError(Problem(str(path), f"{path} holds no checkpoint", rule, "correct the path"))
    try:
        found = manifest.load(folder)
    except Damage as damage:
        return [Finding(damage.file, damage.seen)]
    findings = [Finding(manifest.NAME, sentence) for sentence in uncovered(found.by_tensor())]
    findings += _check_headers(folder, found)
    buffer = bytearray(BLOCK_BYTES)
    with Files(folder) as files:
        for piece in found.pieces:
            findings += _check_piece(files, piece, buffer)
    # Where bytes are damaged, comparing values would only say so again.
    return findings or list(_check_masters(folder, found))


def _check_headers(folder: Path, found: Manifest) -> Iterator[Finding]:
    """Readers go by the manifest, but other tools by the files' own headers."""
    for record in found.files:
        try:
            manifest.check_files(folder, [record])
        except Damage as damage:
            yield Finding(damage.file, damage.seen)
            continue
        with (folder / record.file).open("rb") as file:
            if xxhash.xxh3_128_hexdigest(file.read(record.header_bytes)) != record.header_hash:
                yield Finding(record.file, "its header differs from what was written")


def _check_piece(files: Files, piece: Piece, buffer: bytearray) -> Iterator[Finding]:
    dtype = numpy_dtype(piece.dtype)
    try:
        for block in check_piece(files, piece, buffer):
            if not DTYPES[piece.dtype].is_float:
                continue
            values = np.frombuffer(block, dtype)
            strange = int(np.count_nonzero(~np.isfinite(values)))
            if strange:
                yield Finding(str(piece.key), f"{strange} values are not finite, in {piece.file}")
            if piece.key.state == EXP_AVG_SQ and bool((values < 0).any()):
                yield Finding(str(piece.key), f"an average of squares is negative, in {piece.file}")
    except Damage as damage:
        yield Finding(damage.file, damage.seen)


def _check_masters(folder: Path, found: Manifest) -> Iterator[Finding]:
    reader = open_reader(folder)
    for master in sorted(key for key in found.by_tensor() if key.state == MASTER):
        weight = TensorKey(WEIGHT, master.name)
        if weight not in reader.tensors:
            continue
        info = reader.tensors[weight]
        # Both in windows of as many elements, so that they can be compared as they come.
        wide = DTYPES[reader.tensors[master].dtype].itemsize // DTYPES[info.dtype].itemsize or 1
        box = Box.whole(info.shape)
        pairs = zip(windows(reader, master, info.shape, box, reader.tensors[master].dtype, 4 * BLOCK_BYTES),
                    windows(reader, weight, info.shape, box, info.dtype, 4 * BLOCK_BYTES // wide), strict=True)
        differing = sum(int(np.count_nonzero(cast.astype(stored.dtype) != stored)) for cast, stored in pairs)
        if differing:
            yield Finding(str(weight), f"{differing} of {box.numel} values are not their master weights, cast to {info.dtype}")


@dataclass(frozen=True, slots=True)
class Digest:
    """xxh3-128 in hex of each tensor's row-major bytes, and over all of them with their names, dtypes and shapes."""

    overall: str
    tensors: Mapping[TensorKey, str]


def digest(reader: Reader) -> Digest:
    """What a source holds, whatever its layout: equal for equal values in equal dtypes. Reads everything once."""
    total, tensors = xxhash.xxh3_128(), {}
    for key in sorted(reader.tensors):
        info, one = reader.tensors[key], xxhash.xxh3_128()
        for window in windows(reader, key, info.shape, Box.whole(info.shape), info.dtype):
            one.update(window.view(np.uint8).data)
        tensors[key] = one.hexdigest()
        total.update(f"{key} {info.dtype} {list(info.shape)} {tensors[key]}\n".encode())
    return Digest(total.hexdigest(), tensors)
