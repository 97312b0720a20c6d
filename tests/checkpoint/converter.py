"""A conversion in a separate process, which fault tests kill. Imports no torch, so that forks are cheap."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from toolkit.checkpoint.catalog import TensorPiece
from toolkit.checkpoint.formats import native, torch_zip
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor, row_major
from toolkit.checkpoint.offline import convert, unit_writer
from toolkit.checkpoint.offline.convert import Conversion, ConversionPhase
from toolkit.checkpoint.offline.output import TargetOutput
from toolkit.checkpoint.shard import Box, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.errors import CheckpointError

# Small enough for many tiles per tensor and many syncs per conversion.
SYNC_BYTES, TILE_BYTES = 20_000, 8_000
# Moments in addition to the phases: a write of a tile, before the manifest is renamed, after the folder is
# renamed.
WRITE, REPLACE, RENAMED = "write", "replace", "renamed"


@dataclass
class ConversionOutcome:
    """The result of a conversion. ``writes`` are (file, byte, length) of written tensor data."""

    resumed: bool = False
    refusal: str = ""
    writes: list[tuple[str, int, int]] = field(default_factory=list)


def zips(source: CheckpointSource) -> CheckpointTarget:
    """Lay out one torch.save file per tensor in nested folders, each with a second copy of its first row.

    This covers checksums, gaps filled with zeros, and pieces that are copies.
    """
    files: list[TargetFile] = []
    pieces: dict[TensorKey, list[TensorPiece]] = {}
    copies: dict[TensorKey, list[TensorPiece]] = {}
    for number, (key, info) in enumerate(source.catalog.tensors.items()):
        name, whole = f"part-{number % 2}/of/{number}.pt", Box.whole(info.shape)
        row = Box(whole.offset, (1, *info.shape[1:]))
        first, second = Storage("0", info.dtype, whole.numel + 3), Storage("1", info.dtype, row.numel)
        value = {
            "tensor": StoredTensor(first, 3, info.shape, row_major(info.shape)),
            "row": StoredTensor.whole(second, row.shape),
        }
        layout = torch_zip.lay_out(name, value, [first, second])
        files.append(layout.file)
        begin, other = layout.storages["0"] + 12, layout.storages["1"]
        pieces[key] = [TensorPiece(key, info.dtype, info.shape, whole, name, begin, begin + 4 * whole.numel)]
        copies[key] = [TensorPiece(key, info.dtype, info.shape, row, name, other, other + 4 * row.numel)]
    files.append(TargetFile("latest", 5, {0: b"iter\n"}))
    return CheckpointTarget(
        format="zips",
        namespace=source.namespace,
        step=source.step or 0,
        tensors=source.catalog.tensors,
        pieces=pieces,
        copies=copies,
        files=files,
        identity="zips",
        manifest="toolkit-manifest.json",
    )


def natives(source: CheckpointSource) -> CheckpointTarget:
    return native.lay_out(source, dict(source.catalog.tensors), file_bytes=100_000)


TARGETS: dict[str, Callable[[CheckpointSource], CheckpointTarget]] = {"zips": zips, "native": natives}


def conversion(source: Path, target: Path, kind: str, **more: Any) -> Conversion:
    found = open_source(source)
    return Conversion(found, TARGETS[kind](found), target, **more)


def small() -> None:
    """Use small tiles and syncs in this process."""
    convert.SYNC_BYTES, unit_writer.TILE_BYTES = SYNC_BYTES, TILE_BYTES


def work(
    source: Path,
    target: Path,
    kind: str,
    kill_at: tuple[str, int] | None,
    wait_at: str | None,
    pipe: Connection,
) -> None:
    """Convert, and send the result.

    Args:
        source: The source.
        target: The target.
        kind: A key of ``TARGETS``.
        kill_at: Die as by ``kill -9`` at the n-th (from 0) occurrence of this moment.
        wait_at: Report the first occurrence of this moment and wait for an answer.
        pipe: Connection to the test.
    """
    small()
    outcome, waits, seen = (
        ConversionOutcome(),
        [wait_at],
        {moment: count() for moment in (*ConversionPhase, WRITE, REPLACE, RENAMED)},
    )

    def at(moment: str) -> None:
        if kill_at == (moment, next(seen[moment])):
            os.kill(os.getpid(), signal.SIGKILL)
        if moment in waits:
            waits.remove(moment)
            pipe.send(moment)
            pipe.recv()

    write, replace, sync_folder = TargetOutput.write, Path.replace, convert.sync_folder

    def printing_write(output: TargetOutput, name: str, begin: int, data: memoryview) -> None:
        write(output, name, begin, data[: len(data) // 2])  # a kill may cut a write short
        at(WRITE)
        write(output, name, begin, data)
        outcome.writes.append((name, begin, len(data)))

    def printing_replace(path: Path, to: Path) -> Path:
        at(REPLACE)
        return replace(path, to)

    def printing_sync(folder: Path) -> None:
        if target.exists():
            at(RENAMED)
        sync_folder(folder)

    TargetOutput.write, Path.replace, convert.sync_folder = printing_write, printing_replace, printing_sync  # type: ignore[method-assign]
    try:
        outcome.resumed = conversion(source, target, kind, on_phase=at).run()
    except CheckpointError as error:
        outcome.refusal = str(error)
    pipe.send(outcome)
