"""Looking at every byte of any checkpoint: what a reader checks of the part it reads, and what can be known without a reference.

    python -c "from toolkit.checkpoint.verify import verify; print(*verify('runs/RUN'), sep='\\n')"

What is known: where there are hashes (this toolkit wrote it), any byte that changed. Anywhere: elements that no file or two have, values
that are not finite, negative averages of squares, weights that are not their masters cast, copies that differ, steps that disagree. What
cannot be known without hashes: a changed byte that leaves a possible value in what is stored once, such as a first moment.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from toolkit import checkpoint_folder
from toolkit.checkpoint import manifest
from toolkit.checkpoint.blocks import CheckpointFiles, numpy_dtype, verify_piece
from toolkit.checkpoint.catalog import BLOCK_BYTES, DamagedFile, byte_length
from toolkit.checkpoint.executor import parallel_map
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.planner import find_coverage_errors
from toolkit.checkpoint.reader import read_windows
from toolkit.checkpoint.scalars import OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, StateReader, TensorKey
from toolkit.checkpoint.source import CheckpointSource, locate_checkpoint, open_source, source_from_manifest
from toolkit.checkpoint.tile_reader import WORKERS, ByteProgress, TileReader, as_bits, tile_box
from toolkit.checkpoint.value_checks import differs_from_cast, find_value_faults
from toolkit.errors import CheckpointError
from toolkit.families.base import ModelShape


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """``where`` is a file or a tensor."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def verify(
    path: str | Path,
    model: ModelShape | None = None,
    *,
    workers: int = WORKERS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[VerifyFinding]:
    """Everything that is wrong with a checkpoint; empty if it is sound.

    Args:
        path: a checkpoint of any format, or what points to one: a run directory (then its newest).
        model: what it is of, for formats that do not say it.
        workers: threads.
        advance: told of bytes that were looked at since it was told last, and of how many there are.

    Raises:
        CheckpointError: there is no checkpoint at ``path``. InputError: the model must be said.
    """
    path = Path(path).expanduser()
    name, folder = locate_checkpoint(path)
    recorded = {None: manifest.FOREIGN_NAME, manifest.NATIVE: manifest.NAME}.get(name)
    if recorded is None:
        try:
            return verify_source(open_source(path, model), workers=workers, advance=advance)
        except CheckpointError as error:
            return _findings_of(error)
    try:
        found = manifest.load(folder, recorded)
    except DamagedFile as damage:
        return [VerifyFinding(damage.file, damage.seen)]
    findings = list(_check_headers(folder, found))
    return findings + verify_source(
        source_from_manifest(folder, found, model), workers=workers, advance=advance
    )


def _findings_of(error: CheckpointError) -> list[VerifyFinding]:
    """What the reader of a format refused."""
    if isinstance(error.__cause__, DamagedFile):
        return [VerifyFinding(error.__cause__.file, error.__cause__.seen)]
    return [VerifyFinding(problem.key, problem.seen) for problem in error.problems]


def _check_headers(folder: Path, found: Manifest) -> Iterator[VerifyFinding]:
    """Readers go by the manifest, but other tools by the files' own headers."""
    for record in found.files:
        try:
            manifest.check_files(folder, [record])
        except DamagedFile as damage:
            yield VerifyFinding(damage.file, damage.seen)
            continue
        with (folder / record.file).open("rb") as file:
            if xxhash.xxh3_128_hexdigest(file.read(record.header_bytes)) != record.header_hash:
                yield VerifyFinding(record.file, "its header differs from what was written")


def verify_source(
    source: CheckpointSource,
    *,
    workers: int = WORKERS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[VerifyFinding]:
    """``verify`` of what is open: its tensors, parameter after parameter, and its steps."""
    catalog = source.catalog
    by_name: dict[str, list[TensorKey]] = {}
    for key in catalog.tensors:
        by_name.setdefault(key.name, []).append(key)
    total = sum(byte_length(info.dtype, info.shape) for info in catalog.tensors.values())
    try:
        total += sum(piece.end - piece.begin for of_key in catalog.copies.values() for piece in of_key)
    except DamagedFile as damage:  # pieces may be made when they are asked for, from files
        return [VerifyFinding(damage.file, damage.seen)]
    with CheckpointFiles(catalog.folder) as files:
        work = _Parameters(source, files, ByteProgress(advance, total))
        return [
            *_steps(source),
            *(
                finding
                for found in parallel_map(work.look_at, by_name.values(), workers)
                for finding in found
            ),
        ]


def _steps(source: CheckpointSource) -> Iterator[VerifyFinding]:
    """Everything that says which step a checkpoint is of says the same."""
    scalars = source.catalog.scalars
    said = {"the checkpoint is": source.step, "its scalars are": scalars.get(STEP)}
    if source.format == manifest.NATIVE:
        said["its folder's name is"] = checkpoint_folder.step_of(source.folder)
    numbers = {who: step for who, step in said.items() if isinstance(step, int)}
    if len(set(numbers.values())) > 1:
        yield VerifyFinding(
            str(source.folder),
            "steps disagree: " + ", ".join(f"{who} of step {step}" for who, step in numbers.items()),
        )
    of_optimizer = scalars.get(OPTIMIZER_STEP)
    if isinstance(of_optimizer, int) and numbers and of_optimizer > max(numbers.values()):
        yield VerifyFinding(
            str(source.folder),
            f"steps disagree: the optimizer counts {of_optimizer} of {max(numbers.values())}",
        )


class _Parameters:
    """Looks at all states of one parameter after the other, in several threads."""

    def __init__(self, source: CheckpointSource, files: CheckpointFiles, advance: ByteProgress) -> None:
        self._catalog, self._files, self._advance = source.catalog, files, advance
        # Two arrays at a time.
        self._first, self._second = TileReader(source.catalog, files), TileReader(source.catalog, files)

    def look_at(self, keys: Sequence[TensorKey]) -> list[VerifyFinding]:
        """``keys``: the states of one parameter."""
        tensors = self._catalog.tensors
        found: list[VerifyFinding] = []
        if len({tensors[key].shape for key in keys}) > 1:
            shapes = ", ".join(f"{key.state} {tensors[key].shape}" for key in keys)
            found.append(VerifyFinding(str(keys[0]), f"its states differ in shape: {shapes}"))
        sound = []
        for key in keys:
            try:
                wrong = list(self._bytes(key))
            except DamagedFile as damage:  # pieces may be made when they are asked for, from files
                wrong = [VerifyFinding(damage.file, damage.seen)]
            found += wrong
            if not wrong:  # where bytes are damaged, comparing values would only say so again
                sound.append(key)
        master, weight = (TensorKey(state, keys[0].name) for state in (MASTER, WEIGHT))
        try:
            for key in sound:
                found += self._copies(key)
            if master in sound and weight in sound and tensors[master].shape == tensors[weight].shape:
                found += self._master(master, weight)
        except DamagedFile as damage:  # since it was read before
            found.append(VerifyFinding(damage.file, damage.seen))
        return found

    def _bytes(self, key: TensorKey) -> Iterator[VerifyFinding]:
        """Every element is there once; every block is as it was written, and its values can be."""
        pieces, copies = self._catalog.pieces[key], self._catalog.copies.get(key, ())
        if not pieces and Box.whole(self._catalog.tensors[key].shape).numel:
            yield VerifyFinding(str(key), "no file has any of it")
        for sentence in find_coverage_errors({key: pieces} if pieces else {}):
            yield VerifyFinding(str(key), sentence.removeprefix(str(key)).lstrip(": "))
        buffer = bytearray(
            max((min(BLOCK_BYTES, piece.end - piece.begin) for piece in (*pieces, *copies)), default=0)
        )
        for piece in (*pieces, *copies):
            try:
                for block in verify_piece(self._files, piece, buffer):
                    for seen, _ in find_value_faults(
                        key.state, np.frombuffer(block, numpy_dtype(piece.dtype))
                    ):
                        yield VerifyFinding(str(key), f"{seen}, in {piece.file}")
                    self._advance(len(block))
            except DamagedFile as damage:
                yield VerifyFinding(damage.file, damage.seen)

    def _copies(self, key: TensorKey) -> Iterator[VerifyFinding]:
        """What stands in several places is the same in all."""
        info = self._catalog.tensors[key]
        for copy in self._catalog.copies.get(key, ()):
            if copy.dtype != info.dtype:
                yield VerifyFinding(str(key), f"it is {info.dtype}, its copy in {copy.file} {copy.dtype}")
                continue
            count, file = self._differing(
                key,
                (
                    (box, as_bits(self._first.read(key, box)) != as_bits(self._second.read_from(copy, box)))
                    for box in tile_box(copy.box, info.dtype, by_columns=copy.transposed)
                ),
            )
            if count:
                yield VerifyFinding(
                    str(key), f"{count} of {copy.box.numel} values differ between {file} and {copy.file}"
                )

    def _master(self, master: TensorKey, weight: TensorKey) -> Iterator[VerifyFinding]:
        """Each weight is its master weight, cast."""
        of_master, info = self._catalog.tensors[master], self._catalog.tensors[weight]
        whole, by_columns = (
            Box.whole(info.shape),
            any(piece.transposed for piece in self._catalog.pieces[weight]),
        )
        count, file = self._differing(
            weight,
            (
                (box, differs_from_cast(self._first.read(master, box), self._second.read(weight, box)))
                for box in tile_box(whole, info.dtype, of_master.dtype, by_columns=by_columns)
            ),
        )
        if count:
            seen = f"{count} of {whole.numel} values are not their master weights, cast to {info.dtype}"
            yield VerifyFinding(str(weight), f"{seen}; the first is in {file}")

    def _differing(self, key: TensorKey, compared: Iterable[tuple[Box, Any]]) -> tuple[int, str]:
        """How many elements differ, given where they do box after box, and which file of ``key`` has the first."""
        count, file = 0, ""
        for box, differs in compared:
            here = int(np.count_nonzero(differs))
            if here and not count:
                place = np.unravel_index(int(np.argmax(differs)), box.shape) if box.shape else ()
                one = Box(
                    tuple(int(a) + b for a, b in zip(place, box.offset, strict=True)), (1,) * len(box.shape)
                )
                file = next(
                    piece.file for piece in self._catalog.pieces[key] if piece.box.intersect(one) is not None
                )
            count += here
        return count, file


@dataclass(frozen=True, slots=True)
class CheckpointDigest:
    """xxh3-128 in hex of each tensor's row-major bytes, and over all of them with their names, dtypes and shapes."""

    overall: str
    tensors: Mapping[TensorKey, str]


def compute_digest(reader: StateReader) -> CheckpointDigest:
    """What a source holds, whatever its layout: equal for equal values in equal dtypes. Reads everything once."""
    total, tensors = xxhash.xxh3_128(), {}
    for key in sorted(reader.tensors):
        info, one = reader.tensors[key], xxhash.xxh3_128()
        for window in read_windows(reader, key, info.shape, Box.whole(info.shape), info.dtype):
            one.update(window.view(np.uint8).data)
        tensors[key] = one.hexdigest()
        total.update(f"{key} {info.dtype} {list(info.shape)} {tensors[key]}\n".encode())
    return CheckpointDigest(total.hexdigest(), tensors)
