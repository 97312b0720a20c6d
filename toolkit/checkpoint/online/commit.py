"""The protocol of one save, as executed by one rank; ``_commit`` makes it atomic. See ``store.py`` for the
sequence.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from toolkit import checkpoint_folder
from toolkit.checkpoint import directory, manifest
from toolkit.checkpoint.catalog import DamagedFile, TensorPiece
from toolkit.checkpoint.file_reader import verify_pieces
from toolkit.checkpoint.manifest import FileRecord, Manifest
from toolkit.checkpoint.online.liveness import has_died, hold_liveness_lock
from toolkit.checkpoint.online.writing import WriteItem, write_data_file
from toolkit.checkpoint.planner import MAX_PROBLEMS, find_coverage_errors
from toolkit.errors import CheckpointError, Problem
from toolkit.files import sync_folder, write_whole

log = logging.getLogger(__name__)

FAILED = "failed.json"
LIVENESS_CHECK_SECONDS = 1.0  # between checks that awaited ranks are alive
COMMIT_RULE = "a checkpoint is committed only after every rank has written its part"
# Errors that the user must fix, because another start would fail too. Other file system errors may be
# transient, such as those of a restarting server.
USER_FIXABLE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class SaveFailed(RuntimeError):
    """A save failed without a mistake of the user: a rank was late or died, or the file system failed. A
    restart may succeed.
    """


class SavePhase(StrEnum):
    """Phases reported to ``on_phase``: on entry, in PIECES after each piece, in RETENTION before each
    removal.
    """

    PIECES = "pieces"
    FSYNC = "fsync"  # data is written but not durable
    RENAME = "rename"  # rank 0: everything is durable under the temporary name
    POINTER = "pointer"  # rank 0: the folder is renamed, ``latest`` is not updated
    RETENTION = "retention"  # rank 0: ``latest`` is updated


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSave:
    """One rank's part of one save. ``number`` counts the saves of this attempt and is equal on all ranks.

    ``in_use`` returns steps whose checkpoints retention keeps, because they are being uploaded or may be
    needed again. ``on_progress`` is called after each block that this rank writes. Waiting for other ranks is
    no progress: one of them may be frozen, which the watchdog notices sooner than ``timeout_seconds``.
    """

    directory: Path
    step: int
    namespace: str
    rank: int
    ranks: int
    attempt: int
    number: int
    outgoing: Sequence[WriteItem]
    scalars: Mapping[str, Any]
    keep_last: int
    keep_every: int
    best: Sequence[int]
    in_use: Callable[[], Collection[int]]
    timeout_seconds: float
    on_phase: Callable[[SavePhase], None]
    on_progress: Callable[[], None]

    @property
    def temporary(self) -> Path:
        name = f"{checkpoint_folder.step_name(self.step)}-{_attempt_name(self.attempt)}-{self.number}"
        return self.directory / f"{checkpoint_folder.TEMPORARY}{name}"

    @property
    def target(self) -> Path:
        return self.directory / checkpoint_folder.step_name(self.step)

    def data_file(self, rank: int) -> Path:
        return self.temporary / f"part-{rank:05d}.safetensors"

    def report(self, rank: int) -> Path:
        return self.temporary / f"report-{rank:05d}.json"

    def lock_file(self, rank: int) -> Path:
        """Return the file that a rank keeps locked during the save. It is outside ``temporary``, which the
        commit renames.
        """
        return (
            self.directory
            / f"{checkpoint_folder.TEMPORARY}ranks-{_attempt_name(self.attempt)}-{self.number}"
            / f"{rank:05d}"
        )


def _attempt_name(attempt: int) -> str:
    return f"attempt-{attempt:03d}"


def run_save(save: RankSave) -> None:
    """Write this rank's part and take part in the commit. Earlier checkpoints stay, whatever happens.

    Raises:
        CheckpointError: No disk space or no access, which the user must fix before a restart.
        SaveFailed: Any other error in writing, also of another rank.
    """
    try:
        if save.rank == 0:
            _clean_up(_remove_leftovers, save)
        save.temporary.mkdir(parents=True, exist_ok=True)
        with hold_liveness_lock(save.lock_file(save.rank)) if save.ranks > 1 else nullcontext():
            _write_part(save)
            if save.rank == 0:
                _commit(save, _gather_reports(save))
            else:
                _await_commit(save)
    except Exception as error:
        reason = (
            error.problems[0].seen
            if isinstance(error, CheckpointError)
            else f"{type(error).__name__}: {error}"
        )
        translated = _not_written(save, error) if isinstance(error, OSError) else error
        _report_failure(save, reason, error, user_error=isinstance(translated, CheckpointError))
        if translated is not error:
            raise translated from error
        raise


# ---- every rank


def _write_part(save: RankSave) -> None:
    save.on_phase(SavePhase.PIECES)
    files: list[FileRecord] = []
    pieces: list[TensorPiece] = []
    if save.outgoing:
        record, pieces = write_data_file(
            save.data_file(save.rank),
            save.outgoing,
            {"format": manifest.FORMAT, "namespace": save.namespace, "step": str(save.step)},
            on_piece=lambda: save.on_phase(SavePhase.PIECES),
            on_sync=lambda: save.on_phase(SavePhase.FSYNC),
            on_block=save.on_progress,
        )
        files = [record]
    else:
        save.on_phase(SavePhase.FSYNC)
    report = {
        "rank": save.rank,
        "ranks": save.ranks,
        "files": [asdict(record) for record in files],
        "pieces": [manifest.piece_to_json(piece) for piece in pieces],
    }
    # The report is a message to rank 0 and is removed before the commit; only the data must be durable, and
    # it is.
    write_whole(save.report(save.rank), json.dumps(report), durable=False)


def _await_commit(save: RankSave) -> None:
    def committed() -> bool:
        if (save.temporary / FAILED).is_file():
            failure = json.loads((save.temporary / FAILED).read_text(encoding="utf-8"))
            raise _peer_error(save, failure)
        return not save.temporary.is_dir()

    _wait(save, committed, lambda: [0], lambda: "rank 0 has not committed")
    if not (save.target / manifest.NAME).is_file():
        raise _failed(save, f"{save.temporary} was removed before step {save.step} was committed")


def _report_failure(save: RankSave, reason: str, error: Exception, user_error: bool) -> None:
    """Free the disk and inform the other ranks, so that they need not wait. Errors here are only noted."""
    failure = json.dumps({"rank": save.rank, "reason": reason, "mistake": user_error})
    try:
        save.data_file(save.rank).unlink(missing_ok=True)
        write_whole(
            save.temporary / FAILED if save.rank == 0 else save.report(save.rank), failure, durable=False
        )
    except OSError as silent:
        error.add_note(f"the other ranks could not be informed: {silent}")


def _wait(
    save: RankSave,
    ready: Callable[[], bool],
    awaited: Callable[[], Sequence[int]],
    missing: Callable[[], str],
) -> None:
    """Wait until ``ready`` returns true.

    Args:
        save: This rank's part of the save.
        ready: Condition.
        awaited: Returns the ranks that this rank waits for. If one of them dies, the save fails at once.
        missing: Returns what to report after ``timeout_seconds``.
    """
    now = time.monotonic()
    deadline, next_check, pause = now + save.timeout_seconds, now + LIVENESS_CHECK_SECONDS, 0.001
    while not ready():
        now = time.monotonic()
        if now > deadline:
            raise _failed(save, f"{missing()} within {save.timeout_seconds:.0f} s of saving step {save.step}")
        if now > next_check:
            dead = [rank for rank in awaited() if has_died(save.lock_file(rank))]
            if dead and not ready():  # a rank that finished its part exits too
                raise _failed(
                    save, f"rank {', '.join(map(str, dead))} died while step {save.step} was being saved"
                )
            next_check = now + LIVENESS_CHECK_SECONDS
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


# ---- rank 0


def _clean_up(work: Callable[[RankSave], None], save: RankSave) -> None:
    """Call ``work``, which the next save repeats: its errors are no reason to give up this save."""
    try:
        work(save)
    except OSError as error:
        log.warning(f"{save.directory} could not be cleaned up, and the next save tries again: {error}")


def _remove_leftovers(save: RankSave) -> None:
    """Remove what dead attempts left, and what could not be removed before.

    Also write a pointer that an attempt died before writing: a second such death would leave two checkpoints
    that ``latest`` does not name. The folder of this attempt's previous save may still inform a slow rank why
    it failed.
    """
    if not save.directory.is_dir():
        return
    found = checkpoint_folder.find_newest(save.directory)
    newest, pointer = found.checkpoint, checkpoint_folder.read_pointer(save.directory)
    is_own = isinstance(newest, Path) and newest.parent == save.directory
    if newest is not None and is_own and not found.disagreements and newest.name != pointer:
        write_whole(save.directory / checkpoint_folder.POINTER, newest.name + "\n")
    own = {f"-{_attempt_name(save.attempt)}-{number}" for number in (save.number, save.number - 1)}
    for entry in save.directory.iterdir():
        temporary = entry.name.startswith(checkpoint_folder.TEMPORARY) and not entry.name.endswith(tuple(own))
        if temporary or entry.name.startswith(checkpoint_folder.REMOVED):
            shutil.rmtree(entry, ignore_errors=True)


def _gather_reports(save: RankSave) -> list[dict[str, Any]]:
    """Return every rank's report, in the order of ranks."""
    reports: dict[int, dict[str, Any]] = {}

    def all_reported() -> bool:
        for rank in range(save.ranks):
            if rank not in reports and save.report(rank).is_file():
                report = json.loads(save.report(rank).read_text(encoding="utf-8"))
                if "reason" in report:
                    raise _peer_error(save, report)
                assert report["ranks"] == save.ranks, (
                    f"rank {rank} saves with {report['ranks']} ranks, not {save.ranks}"
                )
                reports[rank] = report
        return len(reports) == save.ranks

    def absent_ranks() -> list[int]:
        return [rank for rank in range(save.ranks) if rank not in reports]

    def missing() -> str:
        absent = absent_ranks()
        listed = ", ".join(map(str, absent[:8])) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        if len(absent) == 1:
            return f"rank {listed} did not write its part"
        return f"ranks {listed} did not write their parts"

    _wait(save, all_reported, absent_ranks, missing)
    return [reports[rank] for rank in range(save.ranks)]


def _commit(save: RankSave, reports: Sequence[Mapping[str, Any]]) -> None:
    """Prove that the parts are complete, write the manifest, and rename the temporary folder.

    The rename makes the commit atomic: before it there is no checkpoint of this step, after it a whole one.
    """
    written = Manifest(
        namespace=save.namespace,
        step=save.step,
        ranks=save.ranks,
        scalars=save.scalars,
        software=manifest.software_versions(),
        files=tuple(manifest.file_from_json(record) for report in reports for record in report["files"]),
        pieces=tuple(manifest.piece_from_json(entry) for report in reports for entry in report["pieces"]),
    )
    wrong = find_coverage_errors(written.by_tensor())
    if wrong:
        raise _incomplete(save, f"step {save.step} is inconsistent: {'; '.join(wrong[:MAX_PROBLEMS])}")
    manifest.check_files(save.temporary, written.files)
    for rank in range(save.ranks):
        save.report(rank).unlink()
    # This also syncs the folder with the names of the data files.
    write_whole(save.temporary / manifest.NAME, manifest.encode(written))

    save.on_phase(SavePhase.RENAME)
    name = save.temporary.name.removeprefix(checkpoint_folder.TEMPORARY)
    removed = save.directory / f"{checkpoint_folder.REMOVED}{name}"
    if _is_already_saved(save):
        save.temporary.rename(removed)
    else:
        if save.target.exists():
            save.target.rename(removed)
        save.temporary.rename(save.target)
    sync_folder(save.directory)

    save.on_phase(SavePhase.POINTER)
    write_whole(save.directory / checkpoint_folder.POINTER, save.target.name + "\n")

    save.on_phase(SavePhase.RETENTION)
    shutil.rmtree(removed, ignore_errors=True)
    shutil.rmtree(save.lock_file(0).parent, ignore_errors=True)
    _clean_up(_apply_retention, save)


def _is_already_saved(save: RankSave) -> bool:
    """Return whether an intact checkpoint of this step and namespace exists."""
    if not save.target.exists():
        return False
    try:
        found = directory.load_manifest(save.target)
        manifest.check_files(save.target, found.files)
        verify_pieces(save.target, found.pieces)
    except DamagedFile:
        return False
    if found.namespace != save.namespace:
        raise CheckpointError(
            Problem(
                str(save.target),
                f"{save.target} has namespace={found.namespace}",
                f"a run directory contains one run, here of {save.namespace}",
                "give this run its own run.name or run.dir",
            )
        )
    return True


def _apply_retention(save: RankSave) -> None:
    """Point to the best checkpoint, and remove old ones: rename each first, so that a partly removed
    checkpoint is never mistaken for a complete one.
    """
    committed = checkpoint_folder.committed_checkpoints(save.directory)
    complete = {step for step, folder in committed.items() if directory.is_complete(folder)}
    best = [step for step in save.best if step in complete]
    pointer = save.directory / checkpoint_folder.BEST_POINTER
    if best:  # before the checkpoint that it named until now is removed
        write_whole(pointer, f"{checkpoint_folder.step_name(best[0])}\n")
    else:
        pointer.unlink(missing_ok=True)
    removable = directory.removable_steps(
        committed,
        complete,
        saved=save.step,
        keep_last=save.keep_last,
        keep_every=save.keep_every,
        best=[*best, *save.in_use()],
        sound=directory.newest_sound_step(save.directory),
    )
    for step in removable:
        removed = save.directory / f"{checkpoint_folder.REMOVED}{committed[step].name}"
        committed[step].rename(removed)
        save.on_phase(SavePhase.RETENTION)
        shutil.rmtree(removed, ignore_errors=True)


# ---- errors


def _peer_error(save: RankSave, failure: Mapping[str, Any]) -> CheckpointError | SaveFailed:
    """Return the error for a failure that another rank reported."""
    seen = f"rank {failure['rank']} could not save step {save.step}: {failure['reason']}"
    return _incomplete(save, seen) if failure["mistake"] else _failed(save, seen)


def _newest_text(save: RankSave) -> str:
    newest = checkpoint_folder.find_newest(save.directory).checkpoint
    return (
        f"the newest complete checkpoint is {newest}" if newest else "no checkpoint was saved before this one"
    )


def _failed(save: RankSave, seen: str) -> SaveFailed:
    return SaveFailed(f"{seen}; {_newest_text(save)}")


def _incomplete(save: RankSave, seen: str) -> CheckpointError:
    return CheckpointError(
        Problem("checkpoint", seen, COMMIT_RULE, f"fix the cause and start again: {_newest_text(save)}")
    )


def _not_written(save: RankSave, error: OSError) -> CheckpointError | SaveFailed:
    seen = (
        f"step {save.step} could not be written to {error.filename or save.temporary}: "
        f"{error.strerror or error}"
    )
    if error.errno not in USER_FIXABLE_ERRORS:
        return _failed(save, seen)
    then = f"then start again: {_newest_text(save)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        numbytes = sum(item.data.numel() * item.data.element_size() for item in save.outgoing)
        remedy = (
            f"free {numbytes / 1e9:.3g} GB for this rank there, or keep fewer checkpoints: "
            f"checkpoint.keep_last=1; {then}"
        )
    else:
        remedy = f"make it writable; {then}"
    return CheckpointError(Problem("checkpoint", seen, COMMIT_RULE, remedy))
