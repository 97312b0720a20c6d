"""Convert any catalog to any target, committed completely or not at all. A killed conversion continues.

    hidden folder next to the target, journal -> files with their lengths and fixed bytes -> tensors, over a
    few threads
    -> sync and journal, every ``SYNC_BYTES`` -> checksums -> sync -> manifest -> rename

Memory is two tiles, a block and casts per thread, for tensors of any size. Imports no torch.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import xxhash

import toolkit
from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import BLOCK_BYTES, DamagedFile, TensorPiece
from toolkit.checkpoint.file_reader import UNFINISHED_SUFFIX, CheckpointFiles, open_files, read_stamps
from toolkit.checkpoint.offline.journal import ConversionJournal, is_journal_for
from toolkit.checkpoint.offline.output import Segment, TargetOutput
from toolkit.checkpoint.offline.unit_writer import ConversionUnit, UnitWriter, WrittenPiece, plan_units
from toolkit.checkpoint.piece_reader import parallel_map
from toolkit.checkpoint.source import CheckpointSource
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.errors import CheckpointError, Problem
from toolkit.files import sync_folder, write_whole

OTHER_FILES = 64  # other files that a process has open
SYNC_BYTES = 512 * 2**20  # bytes between two syncs: what a kill loses at most
JOURNAL = "journal.jsonl"


class ConversionPhase(StrEnum):
    """Phases reported to ``on_phase``, for crash tests."""

    PREPARE = "prepare"
    UNITS = "units"
    SYNC = "sync"
    SEAL = "seal"
    MANIFEST = "manifest"  # all files are durable
    RENAME = "rename"  # the manifest is durable
    DONE = "done"


class Conversion:
    """One conversion to the folder ``path``.

    Args:
        source: Checkpoint to read. A killed conversion continues only if its files are unchanged.
        target: Description of what to write.
        path: Folder to create.
        workers: Number of threads.
        examine, advance: See ``UnitWriter``.
        on_phase: Called with each phase.
    """

    def __init__(
        self,
        source: CheckpointSource,
        target: CheckpointTarget,
        path: Path,
        *,
        workers: int = 2,
        examine: bool = True,
        advance: Callable[[int], None] = lambda numbytes: None,
        on_phase: Callable[[ConversionPhase], None] = lambda phase: None,
    ) -> None:
        self.source, self.target, self.path = source, target, path
        self.units, self.unused = plan_units(source.catalog, target)
        self.temporary = path.with_name(f".{path.name}{UNFINISHED_SUFFIX}")
        self._stamps = read_stamps(source.folder)
        determining = (
            toolkit.__version__,
            source.origin(),
            target.format,
            target.identity,
            BLOCK_BYTES,
            examine,
        )
        self._identity = xxhash.xxh3_128_hexdigest("\n".join(map(str, determining)).encode())
        self._workers, self._on_phase = workers, on_phase
        self._unit_writer = UnitWriter(source.catalog, target, examine=examine, advance=advance)

    @property
    def source_bytes(self) -> int:
        """The sum of all calls of ``advance``."""
        return sum(self._unit_writer.source_bytes(unit) for unit in self.units)

    def run(self) -> bool:
        """Write, check and commit the target. Returns whether it continued a killed attempt.

        Raises:
            CheckpointError: The source is damaged or changes, the target exists, or the disk is full. What
                was written stays in the hidden folder for the next attempt.
        """
        try:
            # a previous attempt was killed after the rename
            if is_journal_for(self.path / JOURNAL, self._identity):
                self._complete_rename()
                return True
            if _is_taken(self.path):
                raise self._exists_error()
            self.temporary.mkdir(parents=True, exist_ok=True)
            journal = ConversionJournal(self.temporary / JOURNAL, self._identity)
        except OSError as error:
            raise self._write_error(error) from error
        _allow_open(len(self._stamps) + len(self.target.files) + OTHER_FILES)
        output = TargetOutput(self.temporary, self.target.files)
        try:
            if journal.done and output.exists():
                self._remove_other_files({JOURNAL, *(file.name for file in self.target.files)})
            else:
                self._remove_other_files({JOURNAL})
                journal.start()
            written_units = _WrittenUnits(journal)
            output.prepare()
            self._on_phase(ConversionPhase.PREPARE)
            self._write_units(output, written_units)
            self._commit(output, written_units)
        except OSError as error:
            raise self._write_error(error) from error
        except DamagedFile as damage:
            raise self.source.damage_error(self.source.folder, damage) from damage
        finally:
            output.close()
            journal.close()
        return bool(journal.done)

    def _remove_other_files(self, keep: Collection[str]) -> None:
        """Remove all other files: those of another conversion, or of a manifest that was being written."""
        for entry in sorted(self.temporary.rglob("*"), reverse=True):  # content before its folder
            if entry.is_dir() and not entry.is_symlink():
                if not any(entry.iterdir()):
                    entry.rmdir()
            elif entry.relative_to(self.temporary).as_posix() not in keep:
                entry.unlink()

    def _write_units(self, output: TargetOutput, written_units: _WrittenUnits) -> None:
        def work(unit: ConversionUnit, files: CheckpointFiles) -> None:
            if unit in written_units:
                self._unit_writer.skip(unit)
                return
            written = self._unit_writer.write(unit, files, output)
            due = written_units.add(unit, written, unit.pieces(self.target))
            self._on_phase(ConversionPhase.UNITS)
            if due:
                written_units.sync(output, self._on_phase)

        with open_files(self.source.folder) as files:
            parallel_map(lambda unit: work(unit, files), self.units, self._workers)
            changed = files.changed(self._stamps)
        if changed:
            raise CheckpointError(
                Problem(
                    "source",
                    f"{self.source.folder / changed[0]} changed while it was read",
                    "a source must not change during its conversion",
                    "wait until nothing writes to it, and run the same command again",
                )
            )
        written_units.sync(output, self._on_phase)

    def _commit(self, output: TargetOutput, written_units: _WrittenUnits) -> None:
        self._on_phase(ConversionPhase.SEAL)
        segments: dict[str, list[Segment]] = {file.name: [] for file in self.target.files}
        for unit in self.units:
            for piece, written in zip(unit.pieces(self.target), written_units.written(unit), strict=True):
                segments[piece.file] += written.segments
        sealed = {name: output.seal(name, of_file) for name, of_file in segments.items()}
        output.sync(segments)
        self._on_phase(ConversionPhase.MANIFEST)
        write_whole(
            self.temporary / self.target.manifest, manifest.encode(self._manifest(written_units, sealed))
        )
        self._on_phase(ConversionPhase.RENAME)
        self.temporary.rename(self.path)
        self._complete_rename()

    def _complete_rename(self) -> None:
        """Make the rename durable and remove the journal."""
        sync_folder(self.path.parent)
        (self.path / JOURNAL).unlink(missing_ok=True)
        self._on_phase(ConversionPhase.DONE)

    def _manifest(
        self, written_units: _WrittenUnits, sealed: Mapping[str, Mapping[int, bytes]]
    ) -> manifest.Manifest:
        """Build the manifest. ``sealed`` has each file's checksums by offset."""
        target = self.target
        pieces: list[TensorPiece] = []
        copies: list[TensorPiece] = []
        for unit in self.units:
            written = iter(written_units.written(unit))
            for key in unit.targets:
                pieces += (replace(piece, hashes=next(written).hashes) for piece in target.pieces[key])
                copies += (
                    replace(piece, hashes=next(written).hashes) for piece in target.copies.get(key, ())
                )
        files = tuple(_record(file, sealed[file.name]) for file in target.files if not file.free)
        return manifest.Manifest(
            namespace=target.namespace,
            step=target.step,
            ranks=1,
            scalars=target.scalars,
            files=files,
            pieces=tuple(pieces),
            copies=tuple(copies),
            software=manifest.software_versions(),
            written_as=target.format,
        )

    def _exists_error(self) -> CheckpointError:
        return CheckpointError(
            Problem(
                "target",
                f"{self.path} already exists",
                "a conversion creates a folder and never replaces one",
                "choose another target=PATH, or move the existing folder",
            )
        )

    def _write_error(self, error: OSError) -> CheckpointError:
        if _is_taken(self.path):  # another process created it meanwhile
            return self._exists_error()
        needed = sum(file.numbytes for file in self.target.files)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = (
                f"free disk space there (the whole target takes {needed / 1e9:.3g} GB) and run the same "
                "command again: it continues with "
                f"what is in {self.temporary}"
            )
        else:
            remedy = "make it readable and writable, and run the same command again"
        seen = f"{error.filename or self.temporary}: {error.strerror or error}"
        return CheckpointError(
            Problem("target", seen, "a target must be written completely or not at all", remedy)
        )


def _is_taken(path: Path) -> bool:
    """Return whether a folder cannot be renamed to ``path``: that requires an empty folder of the same
    file system, or none.
    """
    return (
        path.is_symlink() or path.is_mount() or (path.exists() and (not path.is_dir() or any(path.iterdir())))
    )


def _allow_open(files: int) -> None:
    """Raise the limit of open files: each file is opened once and stays open, and ZeRO-3 of 1,024 ranks
    has 2,049 files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or files <= soft:
        return
    if hard != resource.RLIM_INFINITY and files > hard:
        raise CheckpointError(
            Problem(
                "target",
                f"{files} files in source and target, and this process may open {hard}",
                "every file stays open during a conversion",
                f"raise the limit: ulimit -n {files}",
            )
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _record(file: TargetFile, sealed: Mapping[int, bytes]) -> manifest.FileRecord:
    """Return the file's record, whose header includes checksums that were unknown when the file was
    laid out."""
    header = bytearray(file.fixed.get(0, b""))
    for offset, crc in sealed.items():
        if offset + len(crc) <= len(header):
            header[offset : offset + len(crc)] = crc
    return manifest.FileRecord(file.name, file.numbytes, len(header), xxhash.xxh3_128_hexdigest(header))


class _WrittenUnits:
    """Written units, the durable ones of which are in the journal; shared by threads."""

    def __init__(self, journal: ConversionJournal) -> None:
        self._journal = journal
        self._units = {
            name: [
                WrittenPiece(tuple(hashes), tuple((begin, length, crc) for begin, length, crc in segments))
                for hashes, segments in record
            ]
            for name, record in journal.done.items()
        }
        self._lock = threading.Lock()  # protects the following fields
        self._syncing = threading.Lock()
        self._waiting: dict[str, list[WrittenPiece]] = {}
        self._dirty: set[str] = set()
        self._waiting_bytes = 0
        self._sync_failed = False

    def __contains__(self, unit: ConversionUnit) -> bool:
        return str(unit.source) in self._units

    def written(self, unit: ConversionUnit) -> list[WrittenPiece]:
        """Return the written pieces, in the order of the unit's pieces."""
        return self._units[str(unit.source)]

    def add(self, unit: ConversionUnit, written: list[WrittenPiece], pieces: list[TensorPiece]) -> bool:
        """Record a written unit. Returns whether it is time to sync."""
        with self._lock:
            self._units[str(unit.source)] = self._waiting[str(unit.source)] = written
            self._dirty |= {piece.file for piece in pieces}
            self._waiting_bytes += sum(piece.end - piece.begin for piece in pieces)
            return self._waiting_bytes >= SYNC_BYTES

    def sync(self, output: TargetOutput, on_phase: Callable[[ConversionPhase], None]) -> None:
        """Make the added units durable. One thread waits for the disk while the others continue.

        After a failure nothing more is recorded, because the kernel reports a failed page write only once, to
        one caller.
        """
        with self._syncing:
            with self._lock:
                waiting, dirty = self._waiting, self._dirty
                self._waiting, self._dirty, self._waiting_bytes = {}, set(), 0
            if waiting and not self._sync_failed:
                self._sync_failed = True
                on_phase(ConversionPhase.SYNC)
                output.sync(dirty)
                self._journal.record(
                    {
                        name: [[piece.hashes, piece.segments] for piece in written]
                        for name, written in waiting.items()
                    }
                )
                self._sync_failed = False
