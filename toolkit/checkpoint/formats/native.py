"""The toolkit's own checkpoints: safetensors and a manifest. See ``manifest.py`` and ``directory.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from toolkit import checkpoint_folder
from toolkit.checkpoint import directory, manifest
from toolkit.checkpoint.catalog import TensorPiece, byte_length
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.shard import Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, CheckpointSource, open_manifest
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.families.base import ModelShape

FILE_BYTES = 4 * 2**30  # per file, unless a single tensor is larger


def find(path: Path) -> Path | None:
    """Return the native checkpoint that ``path`` is or leads to."""
    found = directory.find_checkpoint(path)
    if not isinstance(found, Path):
        return None
    ours = (found / manifest.NAME).exists() or checkpoint_folder.step_of(found) is not None
    return found if ours else None


def open_source(folder: Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open a checkpoint of this toolkit. Raises CheckpointError if it is damaged."""
    return open_manifest(folder, manifest.NAME, model)


def lay_out(
    source: CheckpointSource, tensors: dict[TensorKey, TensorInfo], *, file_bytes: int = FILE_BYTES
) -> CheckpointTarget:
    """Lay out a native checkpoint of ``tensors``, each whole in one file."""
    groups: list[list[TensorKey]] = [[]]
    filled = 0
    for key, info in tensors.items():
        size = byte_length(info.dtype, info.shape)
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += size
    files: list[TargetFile] = []
    pieces: dict[TensorKey, Sequence[TensorPiece]] = {}
    for number, group in enumerate(groups):
        name = f"part-{number:05d}.safetensors"
        named = {f"{key}:{','.join('0' for _ in tensors[key].shape)}": key for key in group}
        metadata = {"format": manifest.FORMAT, "namespace": source.namespace, "step": str(source.step or 0)}
        header, slots = safetensors.encode_header(
            [(label, tensors[key].dtype, tensors[key].shape) for label, key in named.items()], metadata
        )
        for slot in slots:
            key = named[slot.name]
            pieces[key] = (
                TensorPiece(key, slot.dtype, slot.shape, Box.whole(slot.shape), name, slot.begin, slot.end),
            )
        files.append(TargetFile(name, slots[-1].end if slots else len(header), {0: header}))
    scalars = dict(source.catalog.scalars)
    if source.shape is not None:
        scalars[MODEL] = asdict(source.shape)
    identity = "\n".join(f"{key} {info.dtype} {info.shape}" for key, info in tensors.items())
    return CheckpointTarget(
        format=manifest.NATIVE,
        namespace=source.namespace,
        step=source.step or 0,
        tensors=tensors,
        pieces=pieces,
        files=files,
        identity=f"{file_bytes}\n{identity}",
        manifest=manifest.NAME,
        scalars=scalars,
    )
