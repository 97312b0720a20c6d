"""Upload the checkpoints that a run has committed on its disk, without delaying training.

Every rank has one thread. Rank 0 decides which checkpoint is sent; the others follow it through files in
``uploads`` (``upload_folder.py``), as ranks do in a save:

    every rank  sends the files that it wrote (file i of the checkpoint is of rank i modulo ranks)
    rank 0      waits for all records, lists the store and compares sizes and versions; sends the manifest;
                replaces the pointer; applies retention

One checkpoint is sent at a time, and an upload that has started is finished, however many checkpoints are
saved meanwhile. Then the newest one is sent, and those in between never are. So an upload slower than
``checkpoint.every`` skips checkpoints, but never starves. An object with a record that agrees with the store
is not sent again. Failures delay an upload, without end; training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.directory import load_manifest
from toolkit.checkpoint.file_reader import verify_pieces
from toolkit.checkpoint.manifest import FileRecord, Manifest
from toolkit.checkpoint.remote.claim import StoreState
from toolkit.checkpoint.remote.pointer import (
    POINTER,
    Pointer,
    StoredCheckpoint,
    hash_manifest,
    parse_pointer,
    removed_pointer_error,
    writer_error,
)
from toolkit.checkpoint.remote.retention import StoreRetention
from toolkit.checkpoint.remote.upload_folder import UploadFolder, WantedUpload
from toolkit.checkpoint_folder import step_of
from toolkit.errors import UserError
from toolkit.progress import duration, quantity, report_progress
from toolkit.remote.objects import Conflict, ObjectVersion, StoreObjects

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
READS_PER_SECOND = 100.0  # of all ranks together, from a file system that they share during the whole run
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 5.0, 60.0  # after a failure; doubled up to the maximum
END_OUTAGE_SECONDS = 600.0  # after the last step: give up if nothing succeeded for this long


class UploadPhase(StrEnum):
    """Phases reported to ``on_phase``, on entry: FILES before each file, RETENTION before each removal."""

    FILES = "files"
    VERIFY = "verify"  # rank 0: every rank has sent its files
    MANIFEST = "manifest"
    POINTER = "pointer"  # everything of the checkpoint is in the store
    RETENTION = "retention"  # the pointer names the checkpoint


class IncompleteUpload(Exception):
    """Objects that were sent are absent from the store, or differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSettings:
    """
    Attributes:
        checkpoints: The run's ``checkpoints`` folder, which all ranks share.
        folder: The run's ``uploads`` folder.
        attempt: Number of this start of the run.
        keep_last, keep_every: See ``directory.removable_steps``.
        on_phase: For crash tests.
        pause_seconds: After the first failure.
    """

    checkpoints: Path
    folder: Path
    rank: int
    ranks: int
    attempt: int
    keep_last: int
    keep_every: int
    on_phase: Callable[[UploadPhase], None] = lambda phase: None
    pause_seconds: float = FIRST_PAUSE_SECONDS


class Uploader:
    """The thread of one rank. ``state`` is None except on rank 0.

    Args:
        on_delay: Called on rank 0 when an upload fails, with the failure and the seconds since uploads began
            to fail.

    Attributes:
        error: Why this run may not write any more; the caller ends the run with it.
        upload_seconds: Duration of the last complete upload, on rank 0; 0: there was none.
    """

    def __init__(
        self,
        objects: StoreObjects,
        settings: UploadSettings,
        state: StoreState | None,
        on_delay: Callable[[str, float], None] = lambda failure, seconds: None,
    ) -> None:
        self.error: UserError | None = None
        self.upload_seconds = 0.0
        self._objects, self._settings, self._state, self._on_delay = objects, settings, state, on_delay
        self._folder = UploadFolder(settings.folder)
        self._retention = StoreRetention(
            objects,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            on_delete=lambda: settings.on_phase(UploadPhase.RETENTION),
        )
        self._newest: Path | None = None  # the checkpoint to send next, of rank 0
        self._lock = threading.Lock()  # of _newest, and whether it is pending
        self._in_use: int | None = None
        self._number = 0
        # By folder of the store, which is named after the manifest's hash: it never changes.
        self._closing, self._give_up = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._failing_since: float | None = None  # of rank 0
        self._differs = False  # of rank 0: objects of the current checkpoint differed from what was sent
        if state is not None:
            for rank in self._folder.failing_ranks():  # in an earlier attempt
                self._folder.clear_failing(rank)
        work = self._follow if state is None else self._lead
        self._thread = threading.Thread(target=work, name="upload", daemon=True)
        self._thread.start()

    def send(self, checkpoint: Path) -> None:
        """Send ``checkpoint`` in the background, unless a newer one follows. Returns at once."""
        if self._state is None:
            return
        with self._lock:
            self._newest = checkpoint
            with suppress(OSError):  # the disk may be full; the checkpoint is complete
                self._folder.set_pending(checkpoint)
        self._wake.set()

    def steps_in_use(self) -> Collection[int]:
        """Return the step that is being sent: retention keeps its files."""
        step = self._in_use
        return () if step is None else (step,)

    def close(self, seconds_left: Callable[[], float | None] = lambda: None) -> bool:
        """Wait until the newest checkpoint is in the store. Every rank calls it after the last save.

        Args:
            seconds_left: Returns the time until this process is killed; None: it is not.

        Returns:
            Whether the store has it. False if ``seconds_left`` came to an end, or uploads have failed for
            ``END_OUTAGE_SECONDS`` since this call. Then the next start of the run sends it.
        """
        closed_at = time.monotonic()
        self._closing.set()
        self._wake.set()
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            report_progress("uploading the last checkpoint")
            left = seconds_left()
            failing = self._failing_since
            outage = failing is not None and time.monotonic() - max(failing, closed_at) > END_OUTAGE_SECONDS
            if outage or (left is not None and left < 2 * POLL_SECONDS):
                self._give_up.set()
                break
        if self._state is not None and self._give_up.is_set():
            self._announce_end()
        return not self._folder.pending

    # ---- rank 0

    def _lead(self) -> None:
        pause = self._settings.pause_seconds
        checkpoint: Path | None = None
        while not self._give_up.is_set():
            checkpoint = checkpoint or self._take_newest()
            if checkpoint is None:
                if self._closing.is_set():
                    break
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._upload(checkpoint)
            except Conflict:
                self.error = self._conflict()
                break
            except Exception as error:  # noqa: BLE001  an upload is repeated, and never ends training
                self._report_failure(_describe(error))
                if isinstance(error, (DamagedFile, FileNotFoundError)):  # repeating may not help
                    newer = self._take_newest()
                    if newer is not None or not checkpoint.is_dir():
                        checkpoint = newer
                self._give_up.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                checkpoint, self._in_use, pause = None, None, self._settings.pause_seconds
        self._in_use = None
        self._announce_end()

    def _take_newest(self) -> Path | None:
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    def _upload(self, checkpoint: Path) -> None:
        """Make ``checkpoint`` the one that the pointer names. Raises Conflict, or an error that may pass."""
        assert self._state is not None
        settings, begin = self._settings, time.monotonic()
        self._in_use = step_of(checkpoint)  # before its files are looked at
        content, stored = _read_manifest(checkpoint)
        written = load_manifest(checkpoint)
        if self._state.pointer.checkpoint != stored or self._state.pointer.went_back:
            self._announce(checkpoint, stored)
            self._send_files(checkpoint, stored, written)
            self._await_records(stored, written.files)
            settings.on_phase(UploadPhase.VERIFY)
            self._verify(stored, written.files)
            settings.on_phase(UploadPhase.MANIFEST)
            self._objects.put(f"{stored.folder}/{manifest.NAME}", content)
            settings.on_phase(UploadPhase.POINTER)
            pointer = Pointer(writer=self._state.pointer.writer, checkpoint=stored)
            version = self._objects.replace(POINTER, pointer.encode(), self._state.version)
            self._state = StoreState(pointer, version)
            size, seconds = sum(record.bytes for record in written.files), time.monotonic() - begin
            self.upload_seconds = seconds
            log.info(
                f"step {stored.step} is in {self._objects.url / stored.folder}: {quantity(size, 'B')} in "
                f"{duration(seconds)}"
            )
        with self._lock:
            if self._newest is None:
                self._folder.clear_pending()
        self._retention.apply(self._state.pointer, stored, written.scalars)
        self._folder.keep_only(stored)
        self._failing_since = None

    def _announce(self, checkpoint: Path | None, stored: StoredCheckpoint | None = None) -> None:
        self._number += 1
        wanted = WantedUpload(
            attempt=self._settings.attempt,
            number=self._number,
            name=None if checkpoint is None else checkpoint.name,
            folder=None if stored is None else stored.folder,
        )
        self._folder.write_wanted(wanted)

    def _announce_end(self) -> None:
        """Let the other ranks end their threads."""
        try:
            self._announce(None)
        except OSError as error:
            log.warning(f"the other ranks could not be informed that uploads have ended: {error}")

    def _await_records(self, stored: StoredCheckpoint, files: Collection[FileRecord]) -> None:
        """Wait for the other ranks, each of which repeats its part until it succeeds.

        Raises:
            DamagedFile: A file of another rank is damaged on disk, and a newer checkpoint waits.
        """
        reported, missing = -MAX_PAUSE_SECONDS, list(files)
        while missing := [record for record in missing if self._folder.record(stored, record) is None]:
            if self._give_up.is_set():
                raise IncompleteUpload("there is no time left")
            failing = self._folder.failing_ranks()
            if not failing and not self._differs:
                self._failing_since = None
            elif time.monotonic() - reported > MAX_PAUSE_SECONDS:
                reported = time.monotonic()
                self._report_failure(f"uploads of rank {min(failing)} fail")
            if self._newest is not None and any(failing.values()):
                raise DamagedFile(stored.folder, "a file of another rank is damaged", "files stay as written")
            self._give_up.wait(poll_seconds(self._settings.ranks) / 5)

    def _verify(self, stored: StoredCheckpoint, files: Collection[FileRecord]) -> None:
        """Raise IncompleteUpload unless every object is there with its size and the version that was sent."""
        found = {entry.name: entry for entry in self._objects.listing(stored.folder)}
        wrong = []
        for record in files:
            entry = found.get(f"{stored.folder}/{record.file}")
            sent = self._folder.record(stored, record)
            if entry is None or entry.bytes != record.bytes or not _same_version(sent, entry.version):
                wrong.append(record.file)
                self._folder.remove_record(stored, record)
        self._differs = bool(wrong)
        if wrong:
            raise IncompleteUpload(f"{', '.join(wrong[:3])} of {stored.folder} differ from what was sent")

    def _report_failure(self, failure: str) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        self._on_delay(failure, now - self._failing_since)

    def _conflict(self) -> UserError:
        other = None
        try:
            found = self._objects.read(POINTER)
            if found is None:
                return removed_pointer_error(self._objects.url)
            other = parse_pointer(found[0], POINTER).writer
        except (DamagedFile, OSError, UserError):  # who it was is only part of the message
            pass
        return writer_error(self._objects.url, other)

    # ---- every rank

    def _follow(self) -> None:
        done, pause = 0, self._settings.pause_seconds
        while not self._give_up.is_set():
            try:
                wanted = self._folder.read_wanted(self._settings.attempt)
                if wanted is None or wanted.number == done:
                    self._give_up.wait(poll_seconds(self._settings.ranks))
                    continue
                if wanted.name is None:
                    return
                self._send_part(wanted.name, wanted.folder)
                self._folder.clear_failing(self._settings.rank)
            except Exception as error:  # noqa: BLE001  an upload is repeated, and never ends training
                with suppress(OSError):  # the disk may be full
                    self._folder.set_failing(self._settings.rank, damaged=isinstance(error, DamagedFile))
                log.warning(f"rank {self._settings.rank} could not upload its part: {_describe(error)}")
                self._give_up.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                done, pause = wanted.number, self._settings.pause_seconds

    def _send_part(self, name: str, folder: str | None) -> None:
        checkpoint = self._settings.checkpoints / name
        _, stored = _read_manifest(checkpoint)
        if stored.folder != folder:
            raise IncompleteUpload(f"{checkpoint} is not {folder} any more")
        self._send_files(checkpoint, stored, load_manifest(checkpoint))

    def _send_files(self, checkpoint: Path, stored: StoredCheckpoint, written: Manifest) -> None:
        """Send the files of this rank that the store does not have yet, after checking their hashes."""
        settings = self._settings
        for index, record in enumerate(written.files):
            if _owner(record.file, index) % settings.ranks != settings.rank:
                continue
            if self._is_sent(stored, record):
                continue
            settings.on_phase(UploadPhase.FILES)
            _check_file(checkpoint, record, written)
            version = self._objects.upload(f"{stored.folder}/{record.file}", checkpoint / record.file)
            self._folder.write_record(stored, record, version)

    def _is_sent(self, stored: StoredCheckpoint, record: FileRecord) -> bool:
        sent = self._folder.record(stored, record)
        if sent is None:
            return False
        found = self._objects.head(f"{stored.folder}/{record.file}")
        return found is not None and found.bytes == record.bytes and _same_version(sent, found.version)


def poll_seconds(ranks: int) -> float:
    """Return the pause of a rank between two looks at what rank 0 wants."""
    return max(POLL_SECONDS, ranks / READS_PER_SECOND)


def _same_version(sent: ObjectVersion | None, found: ObjectVersion) -> bool:
    """Return whether an object is the one that was sent. Listings of some stores have no versions."""
    if sent is None:
        return False
    tags = (sent.e_tag, found.e_tag)
    return not all(tags) or len({str(tag).strip('"') for tag in tags}) == 1


def _owner(file: str, index: int) -> int:
    """Return the rank that wrote ``part-00003.safetensors``; of another file, its place in the manifest."""
    digits = file.removeprefix("part-").partition(".")[0]
    return int(digits) if digits.isdigit() else index


def _read_manifest(checkpoint: Path) -> tuple[bytes, StoredCheckpoint]:
    """Return the manifest of a checkpoint of the run, and which checkpoint in a store has the same one."""
    content = (checkpoint / manifest.NAME).read_bytes()
    step = step_of(checkpoint)
    assert step is not None, f"{checkpoint} is a checkpoint of this run"
    return content, StoredCheckpoint(step, hash_manifest(content))


def _check_file(checkpoint: Path, record: FileRecord, written: Manifest) -> None:
    """Raise DamagedFile if a file on disk differs from what was saved: it must not replace a good one."""
    manifest.check_files(checkpoint, [record])
    verify_pieces(checkpoint, (piece for piece in written.pieces if piece.file == record.file))


def _describe(error: Exception) -> str:
    return error.problems[0].seen if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
