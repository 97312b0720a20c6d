"""``.metadata`` of PyTorch's distributed checkpoints (DCP), which Megatron-core's ``torch_dist`` format
shares.

It is a pickle of ``Metadata``. For each key it has a tensor's dtype, size and chunks, or marks an object; for
each chunk and object it has the file and byte range, which contain a complete file of ``torch.save``. Several
keys may share bytes.

Sources: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` (``_StorageInfo``). Imports no torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.catalog import DamagedFile, TensorPiece, resolve_file
from toolkit.checkpoint.formats import torch_zip, unpickle
from toolkit.checkpoint.formats.pickle_writer import GlobalName, ReduceCall, dumps
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.checkpoint.formats.unpickle import ForeignObject
from toolkit.checkpoint.planner import find_coverage_errors
from toolkit.checkpoint.shard import Box, TensorKey
from toolkit.paths import relative_name

METADATA = ".metadata"
RULE = "a distributed checkpoint is .metadata and the files that it names"
_MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of ``torch.save`` in bytes ``begin .. end`` of ``file``."""

    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor, stored in ``blob``."""

    box: Box
    blob: Blob


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor and its chunks. ``dtype`` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Tensors and objects by key. ``reshaped``: Megatron-core before 0.14 changed the shapes of tensors."""

    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, Blob]
    reshaped: bool = False


# ---- reading


def load_metadata(folder: Path) -> DcpMetadata:
    """Read the metadata of a DCP folder. Raises DamagedFile if it is missing or invalid, or a file that it
    names is missing or too short.
    """
    path = folder / METADATA
    try:
        found = unpickle.loads(path.read_bytes(), _no_storage)
        metadata = _parse_metadata(found)
    except FileNotFoundError as error:
        raise DamagedFile(METADATA, f"{path} is missing", RULE) from error
    except (
        pickle.UnpicklingError,
        OSError,
        KeyError,
        AttributeError,
        IndexError,
        TypeError,
        ValueError,
        AssertionError,
    ) as error:
        raise DamagedFile(
            METADATA, f"{path} cannot be read ({type(error).__name__}: {error})", RULE
        ) from error
    _check_files(folder, metadata)
    return metadata


def _no_storage(dtype: str, key: str, numel: int) -> Storage:
    raise pickle.UnpicklingError("metadata holds no tensors")


def _parse_metadata(pickled: Any) -> DcpMetadata:
    whole = _fields(pickled, "state_dict_metadata", "planner_data", "storage_data")
    storage_info: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    for index, info in whole["storage_data"].items():
        of_index = _fields(index, "fqn", "offset", "index")
        of_info = _fields(info, "relative_path", "offset", "length", "transform_descriptors")
        if of_info.get("transform_descriptors"):
            raise ValueError(f"{of_index['fqn']} is stored transformed: {of_info['transform_descriptors']}")
        file = relative_name(of_info["relative_path"])
        offset = of_index.get("offset")
        blob = Blob(file, of_info["offset"], of_info["offset"] + of_info["length"])
        storage_info[of_index["fqn"], None if offset is None else tuple(offset)] = blob
    tensors: dict[str, ChunkedTensor] = {}
    objects: dict[str, Blob] = {}
    for key, about in whole["state_dict_metadata"].items():
        if about.name.endswith(".BytesStorageMetadata"):
            objects[key] = storage_info[key, None]
            continue
        of_tensor = _fields(about, "properties", "size", "chunks")
        chunks = []
        for chunk in of_tensor["chunks"]:
            of_chunk = _fields(chunk, "offsets", "sizes")
            box = Box(tuple(of_chunk["offsets"]), tuple(of_chunk["sizes"]))
            chunks.append(TensorChunk(box, storage_info[key, box.offset]))
        tensors[key] = ChunkedTensor(_dtype(of_tensor["properties"]), tuple(of_tensor["size"]), tuple(chunks))
    return DcpMetadata(tensors, objects, bool(whole.get("mcore_data")))


def _fields(pickled: ForeignObject, *names: str) -> dict[str, Any]:
    """Return a dataclass's attributes: torch pickles them as state, this toolkit as arguments."""
    return {**dict(zip(names, pickled.args, strict=False)), **pickled.fields}


def _dtype(properties: ForeignObject) -> str:
    """Return the dtype of ``TensorProperties``: the first item of its state, or a mapping's entry (torch
    before 2.0).
    """
    fields = properties.fields
    name = fields["dtype"] if fields else (properties.state or properties.args)[0]
    if not isinstance(name, str):
        raise ValueError(f"a dtype is {name!r}")
    return name


def _check_files(folder: Path, metadata: DcpMetadata) -> None:
    ends: dict[str, int] = {}
    for blob in (
        *metadata.objects.values(),
        *(chunk.blob for tensor in metadata.tensors.values() for chunk in tensor.chunks),
    ):
        ends[blob.file] = max(ends.get(blob.file, 0), blob.end)
    for file, end in ends.items():
        path = resolve_file(folder, file)
        if not path.is_file():
            raise DamagedFile(file, f"{path} is missing", RULE)
        if path.stat().st_size < end:
            raise DamagedFile(file, f"{path} has {path.stat().st_size} of at least {end} bytes", RULE)


def check_coverage(key: str, tensor: ChunkedTensor) -> None:
    """Raise DamagedFile if the chunks do not cover each element exactly once."""
    name = TensorKey("tensor", key)
    pieces = [
        TensorPiece(
            name, tensor.dtype, tensor.shape, chunk.box, chunk.blob.file, chunk.blob.begin, chunk.blob.end
        )
        for chunk in tensor.chunks
    ]
    wrong = find_coverage_errors({name: pieces}) if pieces else [f"{key} has no chunks"]
    if wrong:
        raise DamagedFile(METADATA, "; ".join(wrong), "chunks contain each element of their tensor once")


def open_chunk(folder: Path, chunk: TensorChunk, dtype: str) -> StoredTensor:
    """Return the tensor of a chunk, located in its file. Raises DamagedFile if it does not match the
    metadata.
    """
    blob = chunk.blob
    stored = torch_zip.load(folder, blob.file, blob.begin, blob.end)
    if not isinstance(stored, StoredTensor) or stored.shape != chunk.box.shape or stored.dtype != dtype:
        seen = f"{stored.dtype} {stored.shape}" if isinstance(stored, StoredTensor) else type(stored).__name__
        raise DamagedFile(
            blob.file,
            f"{folder / blob.file} has {seen} in bytes {blob.begin}..{blob.end}",
            f"{METADATA} records {dtype} {chunk.box.shape}",
        )
    return stored


# ---- writing


def encode_metadata(metadata: DcpMetadata) -> bytes:
    """Return the bytes of ``.metadata``."""
    sizes: dict[tuple[int, ...], ReduceCall] = {}
    properties: dict[str, ReduceCall] = {}

    def size(dims: tuple[int, ...]) -> ReduceCall:
        return sizes.setdefault(dims, ReduceCall(GlobalName("torch", "Size"), (dims,)))

    def info(blob: Blob) -> ReduceCall:
        return ReduceCall(
            GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            (blob.file, blob.begin, blob.end - blob.begin),
        )

    about: dict[str, ReduceCall] = {}
    storage_info: dict[Any, ReduceCall] = {}
    for key, tensor in metadata.tensors.items():
        chunks = [
            ReduceCall(
                GlobalName(_MODULE, "ChunkStorageMetadata"), (size(chunk.box.offset), size(chunk.box.shape))
            )
            for chunk in tensor.chunks
        ]
        of_dtype = properties.setdefault(
            tensor.dtype,
            ReduceCall(GlobalName(_MODULE, "TensorProperties"), (GlobalName("torch", tensor.dtype),)),
        )
        about[key] = ReduceCall(
            GlobalName(_MODULE, "TensorStorageMetadata"), (of_dtype, size(tensor.shape), chunks)
        )
        for chunk in tensor.chunks:
            storage_info[ReduceCall(GlobalName(_MODULE, "MetadataIndex"), (key, size(chunk.box.offset)))] = (
                info(chunk.blob)
            )
    for key, blob in metadata.objects.items():
        about[key] = ReduceCall(GlobalName(_MODULE, "BytesStorageMetadata"))
        storage_info[ReduceCall(GlobalName(_MODULE, "MetadataIndex"), (key,))] = info(blob)
    return dumps(ReduceCall(GlobalName(_MODULE, "Metadata"), (about, None, storage_info, None, None)))
