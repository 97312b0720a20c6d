"""``manifest.json``: the metadata of a checkpoint, where each piece is stored, and the hashes to verify it.

The manifest is one JSON object. ``entries`` has one object per piece. ``content_hash`` is xxh3-128 of
everything else, as compact JSON with sorted keys, so a modified manifest is rejected like a modified tensor.
Imports no torch.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

import toolkit
from toolkit.checkpoint.catalog import (
    BLOCK_BYTES,
    DTYPES,
    Catalog,
    DamagedFile,
    TensorPiece,
    block_count,
    byte_length,
    resolve_file,
)
from toolkit.checkpoint.planner import MAX_PROBLEMS, find_coverage_errors
from toolkit.checkpoint.scalars import STEP, find_invalid_scalar
from toolkit.checkpoint.shard import Box, TensorInfo, TensorKey
from toolkit.checkpoint_folder import MANIFEST
from toolkit.paths import Location, relative_name

NAME = MANIFEST
FOREIGN_NAME = "toolkit-manifest.json"  # in folders of other formats
FORMAT = "toolkit-checkpoint"
FORMAT_VERSION = 1
NATIVE = "native"
RULE = "a checkpoint's folder has the manifest.json that was written with it"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and header hash of a file, to check that it is complete without reading its data."""

    file: str
    bytes: int
    header_bytes: int
    header_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        namespace: Namespace of the canonical names, such as ``llama/1``.
        step: Completed optimizer steps.
        ranks: Number of ranks that wrote the checkpoint. Readers ignore it.
        scalars: Plain JSON types.
        files: The data files.
        pieces: Each element of each tensor exactly once.
        software: Package versions that wrote it.
        copies: Pieces whose elements are in ``pieces`` too, because another format's layout replicates them.
        written_as: Format of the data files; ``native`` for this toolkit's own.
    """

    namespace: str
    step: int
    ranks: int
    scalars: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    pieces: tuple[TensorPiece, ...]
    software: Mapping[str, str]
    copies: tuple[TensorPiece, ...] = ()
    written_as: str = NATIVE

    def by_tensor(self) -> dict[TensorKey, tuple[TensorPiece, ...]]:
        return _by_tensor(self.pieces)

    def catalog(self, folder: Location) -> Catalog:
        pieces = self.by_tensor()
        tensors = {key: TensorInfo(of_key[0].dtype, of_key[0].global_shape) for key, of_key in pieces.items()}
        return Catalog(folder, tensors, pieces, self.scalars, _by_tensor(self.copies))


def _by_tensor(pieces: Sequence[TensorPiece]) -> dict[TensorKey, tuple[TensorPiece, ...]]:
    grouped: dict[TensorKey, list[TensorPiece]] = {}
    for piece in pieces:
        grouped.setdefault(piece.key, []).append(piece)
    return {key: tuple(of_key) for key, of_key in grouped.items()}


def software_versions() -> dict[str, str]:
    """Return the versions of installed packages that determine a checkpoint's content."""
    versions = {"python": platform.python_version(), "toolkit": toolkit.__version__}
    for package in ("torch", "deepspeed", "megatron-core", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def piece_to_json(piece: TensorPiece) -> dict[str, Any]:
    entry = {
        "state": piece.key.state,
        "name": piece.key.name,
        "dtype": piece.dtype,
        "global_shape": list(piece.global_shape),
        "offset": list(piece.box.offset),
        "shape": list(piece.box.shape),
        "file": piece.file,
        "bytes": [piece.begin, piece.end],
        "xxh3_128": list(piece.hashes),
    }
    return entry | {"transposed": True} if piece.transposed else entry


def piece_from_json(entry: Mapping[str, Any]) -> TensorPiece:
    """Parse the entry of a piece. Raises KeyError, TypeError or ValueError if the entry does not describe
    one.
    """
    begin, end = _counts(entry["bytes"])
    offset, shape, global_shape = (_counts(entry[key]) for key in ("offset", "shape", "global_shape"))
    dtype, file, hashes, transposed = (
        entry["dtype"],
        entry["file"],
        tuple(entry["xxh3_128"]),
        entry.get("transposed", False),
    )
    if not all(isinstance(text, str) for text in (entry["state"], entry["name"], dtype, file, *hashes)):
        raise ValueError(f"{entry['state']}:{entry['name']} has names that are not text")
    inside = len(offset) == len(shape) == len(global_shape) and all(
        first + count <= size for first, count, size in zip(offset, shape, global_shape, strict=True)
    )
    if (
        not inside
        or dtype not in DTYPES
        or not isinstance(transposed, bool)
        or (transposed and len(shape) < 2)
    ):
        raise ValueError(
            f"{entry['state']}:{entry['name']} has offset {offset}, shape {shape} of {global_shape}, dtype "
            f"{dtype}"
        )
    if end - begin != byte_length(dtype, shape) or len(hashes) != block_count(end - begin):
        raise ValueError(f"{entry['state']}:{entry['name']} has {end - begin} bytes and {len(hashes)} hashes")
    return TensorPiece(
        TensorKey(entry["state"], entry["name"]),
        dtype,
        global_shape,
        Box(offset, shape),
        relative_name(file),
        begin,
        end,
        hashes,
        transposed,
    )


def _counts(values: Sequence[Any]) -> tuple[int, ...]:
    """Return ``values`` as integers. Raises ValueError if a value is not a number of bytes or elements."""
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{str(values)[:100]} are not counts")
    return tuple(values)


def file_from_json(record: Mapping[str, Any]) -> FileRecord:
    """Parse the record of a file. Raises TypeError or ValueError if it does not describe a file of the
    checkpoint.
    """
    parsed = FileRecord(**record)
    relative_name(parsed.file)
    numbytes, header_bytes = _counts([parsed.bytes, parsed.header_bytes])
    if not isinstance(parsed.header_hash, str) or header_bytes > numbytes:
        raise ValueError(
            f"file {parsed.file!r} has {parsed.header_bytes} of {parsed.bytes} bytes as its header"
        )
    return parsed


def encode(manifest: Manifest) -> str:
    """Return the text of ``manifest.json``, with one line per entry."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "namespace": manifest.namespace,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "block_bytes": BLOCK_BYTES,
        "software": dict(manifest.software),
        "scalars": dict(manifest.scalars),
        "files": [asdict(record) for record in manifest.files],
        "entries": [piece_to_json(piece) for piece in manifest.pieces],
    }
    if manifest.copies:
        content["copies"] = [piece_to_json(piece) for piece in manifest.copies]
    if manifest.written_as != NATIVE:
        content["written_as"] = manifest.written_as
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    lines.append(f'"content_hash": "{_content_hash(content)}"')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: object) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n " + ",\n ".join(json.dumps(item) for item in value) + "\n]"


def _content_hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def load(folder: Path, name: str = NAME) -> Manifest:
    """Load a manifest. Raises DamagedFile if it is missing, unreadable, of another tool or version, or was
    modified.
    """
    path = folder / name
    if not path.is_file():
        raise DamagedFile(name, f"{path} is missing", RULE)
    return parse(path.read_bytes(), path)


def parse(text: bytes, path: Location) -> Manifest:
    """Parse the bytes of the manifest at ``path``. Raises DamagedFile as ``load``."""
    name = path.name
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(name, f"{path} is not JSON ({error})", RULE) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFile(name, f"{path} is not a manifest that this toolkit wrote", RULE)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise DamagedFile(
            name,
            f"{path} has format_version={version}",
            f"this toolkit reads format_version={FORMAT_VERSION}",
        )
    written = content.pop("content_hash", None)
    if written != _content_hash(content):
        raise DamagedFile(
            name, f"{path} does not match its content_hash", "a manifest is not modified after it was written"
        )
    try:
        manifest = Manifest(
            namespace=content["namespace"],
            step=content["step"],
            ranks=content["ranks"],
            scalars=content["scalars"],
            files=tuple(file_from_json(record) for record in content["files"]),
            pieces=tuple(piece_from_json(entry) for entry in content["entries"]),
            software=content["software"],
            copies=tuple(piece_from_json(entry) for entry in content.get("copies", ())),
            written_as=content.get("written_as", NATIVE),
        )
        _check_types(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(name, f"{path} has an invalid entry ({str(error)[:200]})", RULE) from error
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError if a field has another type than this toolkit writes, or a piece is outside its
    file.
    """
    _counts([manifest.step, manifest.ranks])
    objects = (manifest.scalars, manifest.software)
    if not all(isinstance(text, str) for text in (manifest.namespace, manifest.written_as)) or not all(
        isinstance(value, dict) for value in objects
    ):
        raise ValueError("namespace, written_as, scalars or software are of another type")
    wrong = find_invalid_scalar(manifest.scalars)
    if wrong is not None:
        raise ValueError(f"scalar {wrong}={str(manifest.scalars[wrong])[:100]}")
    ends = {record.file: record.bytes for record in manifest.files}
    for piece in (*manifest.pieces, *manifest.copies):
        if piece.end > ends.get(piece.file, -1):
            size = ends.get(piece.file, "no bytes")
            raise ValueError(
                f"{piece.key} in bytes {piece.begin}..{piece.end} of {piece.file}, which has {size}"
            )


def check_consistency(manifest: Manifest, name: str) -> None:
    """Raise DamagedFile if entries do not cover each tensor exactly once, a copy has no tensor, or steps
    disagree.
    """
    tensors = manifest.by_tensor()
    errors = find_coverage_errors(tensors)
    errors += [
        f"{copy.key} has a copy of shape {copy.global_shape}"
        for copy in manifest.copies
        if copy.key not in tensors or tensors[copy.key][0].global_shape != copy.global_shape
    ]
    if manifest.scalars.get(STEP, manifest.step) != manifest.step:
        errors.append(
            f"the checkpoint has step {manifest.step}, its scalars have step {manifest.scalars[STEP]}"
        )
    if errors:
        raise DamagedFile(
            name,
            f"{name} is inconsistent: {'; '.join(errors[:MAX_PROBLEMS])}",
            "a manifest lists each element of each tensor once",
        )


def check_files(folder: Path, files: Sequence[FileRecord]) -> None:
    """Raise DamagedFile for the first file that is missing or does not have its recorded length. Reads no
    file.
    """
    for record in files:
        path = resolve_file(folder, record.file)
        if not path.is_file():
            raise DamagedFile(record.file, f"{path} is missing", "every file that the manifest names exists")
        size = path.stat().st_size
        if size != record.bytes:
            raise DamagedFile(
                record.file,
                f"{path} has {size} of {record.bytes} bytes",
                "every file has its recorded length",
            )
