r"""Verify every byte of a checkpoint of any format.

    python -c "from toolkit.checkpoint.verify import verify; print(*verify('runs/RUN'), sep='\n')"

With hashes (written by this toolkit) every changed byte is detected. Without hashes, these are detected:
elements that are missing or stored twice, values that are not finite, negative second moments, weights that
are not their masters cast, copies that differ, and steps that disagree. A changed byte that leaves a
plausible value in a tensor stored once, such as a first moment, is not.

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
from toolkit.checkpoint.catalog import BLOCK_BYTES, DamagedFile, byte_length
from toolkit.checkpoint.catalog_reader import read_windows
from toolkit.checkpoint.file_reader import CheckpointFiles, numpy_dtype, open_files, verify_piece
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.piece_reader import parallel_map
from toolkit.checkpoint.planner import find_coverage_errors
from toolkit.checkpoint.scalars import OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTUM,
    WEIGHT,
    Box,
    StateReader,
    TensorKey,
)
from toolkit.checkpoint.source import CheckpointSource, locate_checkpoint, open_source, source_from_manifest
from toolkit.checkpoint.tile_reader import WORKER_THREADS, ByteProgress, TileReader, as_bits, tile_box
from toolkit.checkpoint.value_checks import differs_from_cast, find_value_faults
from toolkit.config.urls import is_url
from toolkit.errors import CheckpointError
from toolkit.families.base import ModelShape
from toolkit.paths import Location
from toolkit.remote.storage import parse_location


@dataclass(frozen=True, slots=True)
class VerifyFinding:
    """One fault. ``where`` is a file or a tensor."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


SHAPED_LIKE_THE_WEIGHT = frozenset({WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ, MOMENTUM})


def verify(
    path: str | Path,
    model: ModelShape | None = None,
    *,
    workers: int = WORKER_THREADS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[VerifyFinding]:
    """Return everything that is wrong with a checkpoint; an empty list if it is correct.

    Args:
        path: A checkpoint of any format, or a path that leads to one: a run directory (its newest checkpoint
            is used).
        model: Shape of the model, for formats that do not record it.
        workers: Number of threads.
        advance: Called with the bytes verified since the last call, and the total.

    Raises:
        CheckpointError: There is no checkpoint at ``path``. InputError: The model must be given.
    """
    if is_url(path):
        return _verify_url(parse_location(path, "source"), model, workers, advance)
    path = Path(path).expanduser()
    name, folder = locate_checkpoint(path)
    manifest_name = {None: manifest.FOREIGN_NAME, manifest.NATIVE: manifest.NAME}.get(name)
    if manifest_name is None:
        try:
            return verify_source(open_source(path, model), workers=workers, advance=advance)
        except CheckpointError as error:
            return _findings_from_error(error)
    try:
        recorded = manifest.load(folder, manifest_name)
    except DamagedFile as damage:
        return [VerifyFinding(damage.file, damage.seen)]
    findings = list(_check_headers(folder, recorded))
    return findings + verify_source(
        source_from_manifest(folder, recorded, model), workers=workers, advance=advance
    )


def _verify_url(
    location: Location, model: ModelShape | None, workers: int, advance: Callable[[int, int], None]
) -> list[VerifyFinding]:
    """Verify a checkpoint in a store; of a ``file://`` URL, the folder."""
    if isinstance(location, Path):
        return verify(location, model, workers=workers, advance=advance)
    from toolkit.checkpoint.remote.source import locate

    found = locate(location)
    source = source_from_manifest(found.url, found.manifest, model)
    return [
        *_check_headers(found.url, found.manifest),
        *verify_source(source, workers=workers, advance=advance),
    ]


def _findings_from_error(error: CheckpointError) -> list[VerifyFinding]:
    """Convert an error of a format's reader to findings."""
    if isinstance(error.__cause__, DamagedFile):
        return [VerifyFinding(error.__cause__.file, error.__cause__.seen)]
    return [VerifyFinding(problem.key, problem.seen) for problem in error.problems]


def _check_headers(folder: Location, recorded: Manifest) -> Iterator[VerifyFinding]:
    """Check the files' own headers: readers use the manifest, but other tools use the headers."""
    with open_files(folder) as files:
        for record in recorded.files:
            header = bytearray(record.header_bytes)
            try:
                if isinstance(folder, Path):
                    manifest.check_files(folder, [record])
                files.read_into(record.file, 0, memoryview(header))
            except DamagedFile as damage:
                yield VerifyFinding(damage.file, damage.seen)
                continue
            if xxhash.xxh3_128_hexdigest(header) != record.header_hash:
                yield VerifyFinding(record.file, "its header differs from what was written")


def verify_source(
    source: CheckpointSource,
    *,
    workers: int = WORKER_THREADS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[VerifyFinding]:
    """Verify an open checkpoint: its tensors, parameter by parameter, and its steps."""
    catalog = source.catalog
    by_name: dict[str, list[TensorKey]] = {}
    for key in catalog.tensors:
        by_name.setdefault(key.name, []).append(key)
    total = sum(byte_length(info.dtype, info.shape) for info in catalog.tensors.values())
    try:
        total += sum(piece.end - piece.begin for of_key in catalog.copies.values() for piece in of_key)
    except DamagedFile as damage:  # creating pieces may open files
        return [VerifyFinding(damage.file, damage.seen)]
    with open_files(catalog.folder) as files:
        verifier = _ParameterVerifier(source, files, ByteProgress(advance, total))
        return [
            *_check_steps(source),
            *(
                finding
                for found in parallel_map(verifier.verify_parameter, by_name.values(), workers)
                for finding in found
            ),
        ]


def _check_steps(source: CheckpointSource) -> Iterator[VerifyFinding]:
    """Check that everything that records the step agrees."""
    scalars = source.catalog.scalars
    recorded = {"the checkpoint is": source.step, "its scalars are": scalars.get(STEP)}
    if source.format == manifest.NATIVE and isinstance(source.folder, Path):
        recorded["its folder's name is"] = checkpoint_folder.step_of(source.folder)
    numbers = {label: step for label, step in recorded.items() if isinstance(step, int)}
    if len(set(numbers.values())) > 1:
        yield VerifyFinding(
            str(source.folder),
            "steps disagree: " + ", ".join(f"{label} of step {step}" for label, step in numbers.items()),
        )
    of_optimizer = scalars.get(OPTIMIZER_STEP)
    if isinstance(of_optimizer, int) and numbers and of_optimizer > max(numbers.values()):
        yield VerifyFinding(
            str(source.folder),
            f"steps disagree: the optimizer counts {of_optimizer} of {max(numbers.values())}",
        )


class _ParameterVerifier:
    """Verify all states of one parameter at a time, from several threads."""

    def __init__(self, source: CheckpointSource, files: CheckpointFiles, advance: ByteProgress) -> None:
        self._catalog, self._files, self._advance = source.catalog, files, advance
        # Two readers, because two arrays are compared at a time.
        self._first, self._second = TileReader(source.catalog, files), TileReader(source.catalog, files)

    def verify_parameter(self, keys: Sequence[TensorKey]) -> list[VerifyFinding]:
        """Return the findings for ``keys``, the states of one parameter."""
        tensors = self._catalog.tensors
        found: list[VerifyFinding] = []
        # An optimizer may have states of other shapes, such as factored moments.
        alike = [key for key in keys if key.state in SHAPED_LIKE_THE_WEIGHT]
        if len({tensors[key].shape for key in alike}) > 1:
            shapes = ", ".join(f"{key.state} {tensors[key].shape}" for key in alike)
            found.append(VerifyFinding(str(keys[0]), f"its states differ in shape: {shapes}"))
        intact = []
        for key in keys:
            try:
                faults = list(self._check_bytes(key))
            except DamagedFile as damage:  # creating pieces may open files
                faults = [VerifyFinding(damage.file, damage.seen)]
            found += faults
            if not faults:  # comparing damaged values would only repeat the finding
                intact.append(key)
        master, weight = (TensorKey(state, keys[0].name) for state in (MASTER, WEIGHT))
        try:
            for key in intact:
                found += self._compare_copies(key)
            if master in intact and weight in intact and tensors[master].shape == tensors[weight].shape:
                found += self._compare_master(master, weight)
        except DamagedFile as damage:  # the file changed after it was read before
            found.append(VerifyFinding(damage.file, damage.seen))
        return found

    def _check_bytes(self, key: TensorKey) -> Iterator[VerifyFinding]:
        """Check that every element is stored once, that blocks match their hashes, and that values are
        plausible.
        """
        pieces, copies = self._catalog.pieces[key], self._catalog.copies.get(key, ())
        if not pieces and Box.whole(self._catalog.tensors[key].shape).numel:
            yield VerifyFinding(str(key), "no file contains it")
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

    def _compare_copies(self, key: TensorKey) -> Iterator[VerifyFinding]:
        """Check that all copies are equal."""
        info = self._catalog.tensors[key]
        for copy in self._catalog.copies.get(key, ()):
            if copy.dtype != info.dtype:
                yield VerifyFinding(str(key), f"it is {info.dtype}, its copy in {copy.file} {copy.dtype}")
                continue
            count, file = self._count_differences(
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

    def _compare_master(self, master: TensorKey, weight: TensorKey) -> Iterator[VerifyFinding]:
        """Check that each weight is its master weight, cast."""
        of_master, info = self._catalog.tensors[master], self._catalog.tensors[weight]
        whole, by_columns = (
            Box.whole(info.shape),
            any(piece.transposed for piece in self._catalog.pieces[weight]),
        )
        count, file = self._count_differences(
            weight,
            (
                (box, differs_from_cast(self._first.read(master, box), self._second.read(weight, box)))
                for box in tile_box(whole, info.dtype, of_master.dtype, by_columns=by_columns)
            ),
        )
        if count:
            seen = f"{count} of {whole.numel} values are not their master weights, cast to {info.dtype}"
            yield VerifyFinding(str(weight), f"{seen}; the first is in {file}")

    def _count_differences(self, key: TensorKey, compared: Iterable[tuple[Box, Any]]) -> tuple[int, str]:
        """Return how many elements differ, and the file of ``key`` that contains the first one."""
        count, file = 0, ""
        for box, differs in compared:
            here = int(np.count_nonzero(differs))
            if here and not count:
                index = np.unravel_index(int(np.argmax(differs)), box.shape) if box.shape else ()
                element = Box(
                    tuple(int(a) + b for a, b in zip(index, box.offset, strict=True)), (1,) * len(box.shape)
                )
                file = next(
                    piece.file
                    for piece in self._catalog.pieces[key]
                    if piece.box.intersect(element) is not None
                )
            count += here
        return count, file


@dataclass(frozen=True, slots=True)
class CheckpointDigest:
    """xxh3-128 in hex of each tensor's row-major bytes, and of all of them with their names, dtypes and
    shapes.
    """

    overall: str
    tensors: Mapping[TensorKey, str]


def compute_digest(reader: StateReader) -> CheckpointDigest:
    """Return a digest that is equal for equal values and dtypes in any layout. Reads every tensor once."""
    total, tensors = xxhash.xxh3_128(), {}
    for key in sorted(reader.tensors):
        info, tensor_hash = reader.tensors[key], xxhash.xxh3_128()
        for window in read_windows(reader, key, info.shape, Box.whole(info.shape), info.dtype):
            tensor_hash.update(window.view(np.uint8).data)
        tensors[key] = tensor_hash.hexdigest()
        total.update(f"{key} {info.dtype} {list(info.shape)} {tensors[key]}\n".encode())
    return CheckpointDigest(total.hexdigest(), tensors)
