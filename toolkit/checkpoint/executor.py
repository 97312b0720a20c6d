"""Moving bytes: pieces to a file with their hashes, and bytes of files into an engine's memory, verified and cast.

Memory is bounded by one block (``BLOCK_BYTES``) per reading thread, whatever the sizes of tensors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from toolkit.checkpoint.catalog import BLOCK_BYTES, Damage, Piece, block_count, flat_span
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.planner import PieceRead, shifted
from toolkit.checkpoint.shard import Box, TensorKey, flat_boxes

READERS = min(4, os.cpu_count() or 1)  # reading, hashing and copying let other threads run
INTACT = "bytes are read as they were written"


# ---- writing


@dataclass(frozen=True, slots=True)
class Outgoing:
    """``box`` of a tensor, to be written; ``data`` has the shape ``box.shape`` and may be a view on any device."""

    key: TensorKey
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor

    @property
    def name(self) -> str:
        """In the file's own header, so that a file without its manifest still says what it holds."""
        return f"{self.key}:{','.join(map(str, self.box.offset))}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_file(path: Path, outgoing: Sequence[Outgoing], metadata: Mapping[str, str],
               on_piece: Callable[[], None], on_sync: Callable[[], None]) -> tuple[FileRecord, list[Piece]]:
    """Write a safetensors file, hashing on the way, and make it durable.

    Args:
        on_piece: called after each piece.
        on_sync: called between the last byte and the sync.
    """
    by_name = {item.name: item for item in outgoing}
    header, slots = safetensors.encode([(item.name, dtype_name(item.data.dtype), item.box.shape) for item in outgoing], metadata)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(descriptor, memoryview(header))
        pieces = []
        staging: torch.Tensor | None = None
        for slot in slots:
            item = by_name[slot.name]
            if staging is None and not _is_plain(item.data):
                staging = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=item.data.is_cuda)
            hashes = []
            for block in blocks_of(item.data, staging):
                hashes.append(xxhash.xxh3_128_hexdigest(block))
                _write_all(descriptor, block)
            pieces.append(Piece(item.key, slot.dtype, item.global_shape, item.box, path.name, slot.begin, slot.end, tuple(hashes)))
            on_piece()
        on_sync()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    size = slots[-1].end if slots else len(header)
    return FileRecord(path.name, size, len(header), xxhash.xxh3_128_hexdigest(header)), pieces


def _is_plain(data: torch.Tensor) -> bool:
    return data.device.type == "cpu" and data.is_contiguous()


def blocks_of(data: torch.Tensor, staging: torch.Tensor | None) -> Iterator[memoryview]:
    """The row-major bytes of a tensor, one block at a time: its own memory where that is plain, else copied to ``staging``."""
    if _is_plain(data):
        everything = data.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(everything), BLOCK_BYTES):
            yield everything[start : start + BLOCK_BYTES]
        return
    assert staging is not None, "data on a device or with gaps needs a staging block"
    step = BLOCK_BYTES // data.element_size()
    room = staging.view(data.dtype)
    for start in range(0, data.numel(), step):
        stop = min(start + step, data.numel())
        at = 0
        for box in flat_boxes(tuple(data.shape), start, stop):
            room[at : at + box.numel].view(box.shape).copy_(part(data.detach(), box))
            at += box.numel
        yield staging.numpy().data[: (stop - start) * data.element_size()]


def part(data: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of ``box``, in the coordinates of ``data``."""
    return data[tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True))]


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


# ---- reading


class Files:
    """Open files of one folder, shared by threads (``pread`` has no position)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def fill(self, file: str, begin: int, buffer: memoryview) -> None:
        """Read ``len(buffer)`` bytes from ``begin`` on. Raises Damage for a file that is missing, too short or unreadable."""
        done = 0
        try:
            descriptor = self._descriptor(file)
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], begin + done)
                if count == 0:
                    raise Damage(file, f"{self.folder / file} ends at byte {begin + done}, before its tensors do", INTACT)
                done += count
        except FileNotFoundError as error:
            raise Damage(file, f"{self.folder / file} is missing", "every file that the manifest names is there") from error
        except OSError as error:
            raise Damage(file, f"{self.folder / file} cannot be read ({error.strerror})", INTACT) from error

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(self.folder / file, os.O_RDONLY)
            return self._open[file]


def read_pieces(folder: Path, reads: Sequence[PieceRead]) -> None:
    """Fill every target. Raises Damage, and then targets are partly filled."""
    local = threading.local()

    def run(read: PieceRead, files: Files) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(BLOCK_BYTES)
        _read_piece(read, files, local.buffer)

    with Files(folder) as files:
        if len(reads) < 2 or READERS == 1:
            for read in reads:
                run(read, files)
            return
        with ThreadPoolExecutor(READERS, thread_name_prefix="checkpoint-read") as pool:
            futures = [pool.submit(run, read, files) for read in reads]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _read_piece(read: PieceRead, files: Files, buffer: bytearray) -> None:
    piece = read.piece
    dtype, itemsize = getattr(torch, piece.dtype), piece.itemsize
    per_block = BLOCK_BYTES // itemsize
    origin = tuple(-offset for offset in piece.box.offset)
    wanted = [(target, shifted(target.overlap, origin)) for target in read.targets]  # in the piece's own coordinates
    spans = [flat_span(piece.box.shape, local) for _, local in wanted]
    low, high = min(first for first, _ in spans), max(end for _, end in spans)
    for number in range(low // per_block, -(-high // per_block)):
        start, stop = number * per_block, min((number + 1) * per_block, piece.box.numel)
        here = [item for item, (first, end) in zip(wanted, spans, strict=True) if first < stop and end > start]
        if not here:
            continue
        if not piece.hashes:  # then nothing asks for the rest of the block
            start, stop = max(start, low), min(stop, high)
        block = memoryview(buffer)[: (stop - start) * itemsize]
        files.fill(piece.file, piece.begin + start * itemsize, block)
        if piece.hashes:
            check_block(files, piece, number, block)
        flat = torch.frombuffer(buffer, dtype=dtype, count=stop - start)
        at = 0
        for box in flat_boxes(piece.box.shape, start, stop):
            values = flat[at : at + box.numel].view(box.shape)
            at += box.numel
            for target, local_box in here:
                common = box.intersect(local_box)
                if common is not None:
                    to = shifted(common, [p - s for p, s in zip(piece.box.offset, target.shard.box.offset, strict=True)])
                    source = part(values, shifted(common, [-offset for offset in box.offset]))
                    part(target.shard.data.detach(), to).copy_(source)


def check_block(files: Files, piece: Piece, number: int, block: memoryview) -> None:
    """Raises Damage where a block is not what was written."""
    if xxhash.xxh3_128_hexdigest(block) != piece.hashes[number]:
        begin = piece.begin + number * BLOCK_BYTES
        where = f"{piece.key} in bytes {begin}..{begin + len(block)}"
        raise Damage(piece.file, f"{files.folder / piece.file} differs from what was written: {where}", INTACT)


def check_piece(files: Files, piece: Piece, buffer: bytearray) -> Iterator[memoryview]:
    """Every block of a piece, read into ``buffer`` and checked. Raises Damage at the first that is not what was written."""
    for number in range(block_count(piece.end - piece.begin)):
        begin = piece.begin + number * BLOCK_BYTES
        block = memoryview(buffer)[: min(BLOCK_BYTES, piece.end - begin)]
        files.fill(piece.file, begin, block)
        check_block(files, piece, number, block)
        yield block
