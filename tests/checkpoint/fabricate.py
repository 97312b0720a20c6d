"""Vendor-like checkpoints built by hand: a torch.save file per rank, without hashes or a manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from tests.checkpoint.layouts import NAMESPACE
from toolkit.checkpoint.catalog import Catalog, TensorPiece
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.stored_tensor import StoredTensor
from toolkit.checkpoint.shard import Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error


def write_rank_files(
    folder: Path,
    named: Mapping[TensorKey, torch.Tensor],
    *,
    ranks: int = 2,
    replicated: Collection[str] = (),
    transposed: Collection[str] = (),
    scalars: Mapping[str, object] | None = None,
    step: int = 1,
    checksums: bool = False,
) -> CheckpointSource:
    """Cut tensors along their first dim; those in ``replicated`` are whole in every file, those in
    ``transposed`` are transposed.
    """
    folder.mkdir(parents=True)
    for rank in range(ranks):
        torch.save(
            {
                str(key): _of_rank(tensor, rank, ranks, key.name in replicated, key.name in transposed)
                for key, tensor in named.items()
            },
            folder / f"rank{rank}.pt",
        )
    return read(
        folder,
        {
            key: TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for key, tensor in named.items()
        },
        ranks=ranks,
        replicated=replicated,
        transposed=transposed,
        scalars=scalars,
        step=step,
        checksums=checksums,
    )


def read(
    folder: Path,
    tensors: Mapping[TensorKey, TensorInfo],
    *,
    ranks: int,
    replicated: Collection[str],
    transposed: Collection[str],
    scalars: Mapping[str, object] | None,
    step: int,
    checksums: bool = False,
) -> CheckpointSource:
    """``checksums``: use the CRC-32 of the zip directories, which detects every changed byte."""
    pieces: dict[TensorKey, tuple[TensorPiece, ...]] = {}
    copies: dict[TensorKey, tuple[TensorPiece, ...]] = {}
    for rank in range(ranks):
        saved = torch_zip.load(folder, f"rank{rank}.pt")
        for key, info in tensors.items():
            whole = key.name in replicated
            low, high = (0, info.shape[0]) if whole else _rows(info.shape[0], rank, ranks)
            box = Box((low, *(0 for _ in info.shape[1:])), (high - low, *info.shape[1:]))
            stored = saved[str(key)]
            if key.name in transposed:
                stored = StoredTensor(stored.storage, stored.offset, stored.shape[::-1], stored.strides[::-1])
            found = tuple(torch_zip.tensor_pieces(stored, key, info.shape, box))
            into = copies if whole and rank else pieces
            into[key] = into.get(key, ()) + (
                found if checksums else tuple(replace(piece, record=None) for piece in found)
            )
    catalog = Catalog(folder, tensors, pieces, {"step": step} if scalars is None else scalars, copies)
    return CheckpointSource(
        format="test",
        catalog=catalog,
        namespace=NAMESPACE,
        step=step,
        shape=None,
        damage_error=foreign_damage_error,
    )


def _of_rank(tensor: torch.Tensor, rank: int, ranks: int, whole: bool, transposed: bool) -> torch.Tensor:
    low, high = _rows(len(tensor), rank, ranks)
    part = tensor.clone() if whole else tensor[low:high].clone()
    return part.T.contiguous() if transposed else part


def _rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    return rows * rank // ranks, rows * (rank + 1) // ranks


def overwrite_element(
    source: CheckpointSource, key: TensorKey, element: int, raw: bytes, *, copy: bool = False
) -> TensorPiece:
    """Overwrite a flat element of ``key`` in its file (of its first copy), as a disk or a bug would."""
    for piece in (source.catalog.copies if copy else source.catalog.pieces)[key]:
        values = torch.arange(torch.Size(piece.global_shape).numel()).reshape(piece.global_shape)
        inside = values[
            tuple(slice(o, o + s) for o, s in zip(piece.box.offset, piece.box.shape, strict=True))
        ]
        inside = (inside.T if piece.transposed else inside).reshape(-1)
        position = (inside == element).nonzero()
        if len(position):
            with (source.folder / piece.file).open("r+b") as file:
                file.seek(piece.begin + int(position[0, 0]) * piece.itemsize)
                file.write(raw)
            return piece
    raise AssertionError(f"{key} has no element {element}")


def read_element(source: CheckpointSource, key: TensorKey, element: int) -> bytes:
    """Return the bytes of a flat element of a tensor that is cut along its first dim."""
    for piece in source.catalog.pieces[key]:
        row = torch.Size(piece.global_shape[1:]).numel()
        index = element - piece.box.offset[0] * row
        if 0 <= index < piece.box.numel:
            with (source.folder / piece.file).open("rb") as file:
                file.seek(piece.begin + index * piece.itemsize)
                return file.read(piece.itemsize)
    raise AssertionError(f"{key} has no element {element}")
