"""From any catalog to any target, committed whole or not at all; killed, it goes on where it was.

    hidden folder beside the target, journal -> files with their lengths and fixed bytes -> tensors, over a few threads
    -> sync and journal, every ``SYNC_BYTES`` -> checksums -> sync -> manifest -> rename

Memory is two tiles, a block and casts a thread, whatever the sizes of tensors. Imports no torch.
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
from toolkit.checkpoint.blocks import UNFINISHED, CheckpointFiles, read_stamps
from toolkit.checkpoint.catalog import BLOCK_BYTES, Catalog, DamagedFile, TensorPiece
from toolkit.checkpoint.executor import parallel_map
from toolkit.checkpoint.offline.fill import ConversionUnit, UnitWriter, WrittenPiece, plan_units
from toolkit.checkpoint.offline.journal import ConversionJournal, is_journal_for
from toolkit.checkpoint.offline.output import Segment, TargetOutput
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.errors import CheckpointError, Problem
from toolkit.files import sync_folder, write_whole

OTHER_FILES = 64  # that a process has open besides
SYNC_BYTES = 512 * 2**20  # written between two records of the journal: what a kill costs at most
JOURNAL = "journal.jsonl"


class ConversionPhase(StrEnum):
    """Told to ``on_phase``: what crash tests hook into."""

    PREPARE = "prepare"  # the files have their lengths
    UNITS = "units"  # after each tensor
    SYNC = "sync"  # some tensors are written, not yet durable
    SEAL = "seal"  # all tensors are durable
    MANIFEST = "manifest"  # all files are
    RENAME = "rename"  # the manifest is
    DONE = "done"


class Conversion:
    """One conversion to the folder ``path``.

    Args:
        origin: what the source is, so that a killed conversion goes on from the same one only: its path and its files' sizes and
            times, for instance.
        refuse: the error for a damaged source.
        workers: threads.
        examine, advance: see ``Filler``.
    """

    def __init__(
        self,
        source: Catalog,
        target: CheckpointTarget,
        path: Path,
        *,
        origin: str,
        refuse: Callable[[Path, DamagedFile], CheckpointError],
        workers: int = 2,
        examine: bool = True,
        advance: Callable[[int], None] = lambda numbytes: None,
        on_phase: Callable[[ConversionPhase], None] = lambda phase: None,
    ) -> None:
        self.source, self.target, self.path = source, target, path
        self.units, self.unused = plan_units(source, target)
        self.temporary = path.with_name(f".{path.name}{UNFINISHED}")
        self._stamps = read_stamps(source.folder)
        decides = (toolkit.__version__, origin, target.format, target.identity, BLOCK_BYTES, examine)
        self._identity = xxhash.xxh3_128_hexdigest("\n".join(map(str, decides)).encode())
        self._refuse, self._workers, self._on_phase = refuse, workers, on_phase
        self._filler = UnitWriter(source, target, examine=examine, advance=advance)

    @property
    def source_bytes(self) -> int:
        """What ``advance`` adds up to."""
        return sum(self._filler.numbytes(unit) for unit in self.units)

    def run(self) -> bool:
        """Write, check and commit. Returns whether it went on where an earlier attempt was killed.

        Raises:
            CheckpointError: the source is damaged or changes meanwhile, the target's name is taken, the disk is full. What was written
                stays for the next attempt, hidden beside the target.
        """
        try:
            if is_journal_for(self.path / JOURNAL, self._identity):  # killed when it had its name
                self._conclude()
                return True
            if _is_taken(self.path):
                raise self._taken()
            self.temporary.mkdir(parents=True, exist_ok=True)
            journal = ConversionJournal(self.temporary / JOURNAL, self._identity)
        except OSError as error:
            raise self._no_room_or_access(error) from error
        _allow_open(len(self._stamps) + len(self.target.files) + OTHER_FILES)
        output = TargetOutput(self.temporary, self.target.files)
        try:
            if journal.done and output.is_there():
                self._clean({JOURNAL, *(file.name for file in self.target.files)})
            else:
                self._clean({JOURNAL})
                journal.start()
            done = _Done(journal)
            output.prepare()
            self._on_phase(ConversionPhase.PREPARE)
            self._fill(output, done)
            self._commit(output, done)
        except OSError as error:
            raise self._no_room_or_access(error) from error
        except DamagedFile as damage:
            raise self._refuse(self.source.folder, damage) from damage
        finally:
            output.close()
            journal.close()
        return bool(journal.done)

    def _clean(self, keep: Collection[str]) -> None:
        """Remove all but these files: what another conversion left, what a kill left of the manifest."""
        for entry in sorted(self.temporary.rglob("*"), reverse=True):  # what is in a folder before it
            if entry.is_dir() and not entry.is_symlink():
                if not any(entry.iterdir()):
                    entry.rmdir()
            elif entry.relative_to(self.temporary).as_posix() not in keep:
                entry.unlink()

    def _fill(self, output: TargetOutput, done: _Done) -> None:
        def work(unit: ConversionUnit, files: CheckpointFiles) -> None:
            if unit in done:
                self._filler.skip(unit)
                return
            written = self._filler.fill(unit, files, output)
            due = done.add(unit, written, unit.pieces(self.target))
            self._on_phase(ConversionPhase.UNITS)
            if due:
                done.sync(output, self._on_phase)

        with CheckpointFiles(self.source.folder) as files:
            parallel_map(lambda unit: work(unit, files), self.units, self._workers)
            changed = files.changed(self._stamps)
        if changed:
            raise CheckpointError(
                Problem(
                    "source",
                    f"{self.source.folder / changed[0]} changed while it was read",
                    "a source stays as it is until its conversion is done",
                    "let what writes it end, and start the same command again",
                )
            )
        done.sync(output, self._on_phase)

    def _commit(self, output: TargetOutput, done: _Done) -> None:
        self._on_phase(ConversionPhase.SEAL)
        segments: dict[str, list[Segment]] = {file.name: [] for file in self.target.files}
        for unit in self.units:
            for piece, written in zip(unit.pieces(self.target), done.written(unit), strict=True):
                segments[piece.file] += written.segments
        sealed = {name: output.seal(name, of_file) for name, of_file in segments.items()}
        output.sync(segments)
        self._on_phase(ConversionPhase.MANIFEST)
        write_whole(self.temporary / self.target.manifest, manifest.encode(self._manifest(done, sealed)))
        self._on_phase(ConversionPhase.RENAME)
        self.temporary.rename(self.path)
        self._conclude()

    def _conclude(self) -> None:
        """The target has its name."""
        sync_folder(self.path.parent)
        (self.path / JOURNAL).unlink(missing_ok=True)
        self._on_phase(ConversionPhase.DONE)

    def _manifest(self, done: _Done, sealed: Mapping[str, Mapping[int, bytes]]) -> manifest.Manifest:
        """``sealed``: the checksums that each file got, by their places."""
        target = self.target
        pieces: list[TensorPiece] = []
        copies: list[TensorPiece] = []
        for unit in self.units:
            written = iter(done.written(unit))
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

    def _taken(self) -> CheckpointError:
        return CheckpointError(
            Problem(
                "target",
                f"{self.path} is there already",
                "a conversion makes a folder and replaces none",
                "name another target=PATH, or move that one away",
            )
        )

    def _no_room_or_access(self, error: OSError) -> CheckpointError:
        if _is_taken(self.path):  # since we began
            return self._taken()
        needed = sum(file.numbytes for file in self.target.files)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = (
                f"free room there (the whole target takes {needed / 1e9:.3g} GB) and start the same command again: it goes on with "
                f"what is in {self.temporary}"
            )
        else:
            remedy = "make it readable and writable, and start the same command again"
        seen = f"{error.filename or self.temporary}: {error.strerror or error}"
        return CheckpointError(Problem("target", seen, "a target is written whole", remedy))


def _is_taken(path: Path) -> bool:
    """Whether a folder cannot be renamed to ``path``: only over an empty one, of the same file system."""
    return (
        path.is_symlink() or path.is_mount() or (path.exists() and (not path.is_dir() or any(path.iterdir())))
    )


def _allow_open(files: int) -> None:
    """Each file is opened once and stays open: ZeRO-3 of 1,024 ranks has 2,049, and shells allow 1,024 unless told otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or files <= soft:
        return
    if hard != resource.RLIM_INFINITY and files > hard:
        raise CheckpointError(
            Problem(
                "target",
                f"{files} files of source and target, of which this process may open {hard}",
                "every file is open while tensors move",
                f"start it where more are allowed: ulimit -n {files}",
            )
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _record(file: TargetFile, sealed: Mapping[int, bytes]) -> manifest.FileRecord:
    """The header as it lies in the file, with the checksums that were not known when the file was laid out."""
    header = bytearray(file.fixed.get(0, b""))
    for place, crc in sealed.items():
        if place + len(crc) <= len(header):
            header[place : place + len(crc)] = crc
    return manifest.FileRecord(file.name, file.numbytes, len(header), xxhash.xxh3_128_hexdigest(header))


class _Done:
    """Units that are written, and of these the durable ones in the journal; shared by threads."""

    def __init__(self, journal: ConversionJournal) -> None:
        self._journal = journal
        self._units = {
            name: [
                WrittenPiece(tuple(hashes), tuple((begin, length, crc) for begin, length, crc in segments))
                for hashes, segments in record
            ]
            for name, record in journal.done.items()
        }
        self._lock = threading.Lock()  # of what follows
        self._syncing = threading.Lock()
        self._waiting: dict[str, list[WrittenPiece]] = {}
        self._dirty: set[str] = set()
        self._waiting_bytes = 0
        self._lost = False

    def __contains__(self, unit: ConversionUnit) -> bool:
        return str(unit.source) in self._units

    def written(self, unit: ConversionUnit) -> list[WrittenPiece]:
        """In the order of the unit's pieces."""
        return self._units[str(unit.source)]

    def add(self, unit: ConversionUnit, written: list[WrittenPiece], pieces: list[TensorPiece]) -> bool:
        """Returns whether it is time to sync."""
        with self._lock:
            self._units[str(unit.source)] = self._waiting[str(unit.source)] = written
            self._dirty |= {piece.file for piece in pieces}
            self._waiting_bytes += sum(piece.end - piece.begin for piece in pieces)
            return self._waiting_bytes >= SYNC_BYTES

    def sync(self, output: TargetOutput, on_phase: Callable[[ConversionPhase], None]) -> None:
        """Make what was added durable. One thread waits for the disk; the others go on.

        After a failure nothing more is recorded: the system tells of a page that it could not write once, and to one caller.
        """
        with self._syncing:
            with self._lock:
                waiting, dirty = self._waiting, self._dirty
                self._waiting, self._dirty, self._waiting_bytes = {}, set(), 0
            if waiting and not self._lost:
                self._lost = True
                on_phase(ConversionPhase.SYNC)
                output.sync(dirty)
                self._journal.record(
                    {
                        name: [[one.hashes, one.segments] for one in written]
                        for name, written in waiting.items()
                    }
                )
                self._lost = False
