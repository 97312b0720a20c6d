"""Save checkpoints: every rank writes its shards, rank 0 proves completeness and commits. Uses no
collectives.

Ranks communicate through files in a temporary folder named after the step, the attempt and the number of the
save, so that files of a dead attempt are never used:

    every rank  write part-NNNNN.safetensors, sync it, then write report-NNNNN.json with the list of its
                pieces
    rank 0      wait for all reports, prove coverage, write manifest.json, sync, rename the folder to
                step-NNNNNNNN, write ``latest``, apply retention
    others      wait until the temporary folder is gone (committed) or contains ``failed.json``
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

from toolkit import checkpoint_folder
from toolkit.checkpoint.online.commit import RankSave, SavePhase, run_save
from toolkit.checkpoint.online.writing import HostSnapshot, items_to_write
from toolkit.checkpoint.shard import Shard
from toolkit.progress import report_progress

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0  # between reports of progress to the watchdog


class PendingSave:
    """A save in progress. ``path`` is the future checkpoint, ``size`` the bytes that this rank writes, and
    ``advanced`` is set whenever the save makes progress.
    """

    def __init__(
        self, path: Path, future: Future[float], size: int = 0, advanced: threading.Event | None = None
    ) -> None:
        self.path = path
        self.size = size
        self._future = future
        self._advanced = advanced or threading.Event()
        self.waited = False

    def done(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """The error of a failed save; None while it runs and after its commit."""
        return self._future.exception() if self._future.done() else None

    @property
    def seconds(self) -> float | None:
        """Seconds until the commit; None before it."""
        return self._future.result() if self._future.done() and self.error is None else None

    def wait(self) -> Path:
        """Wait until the checkpoint is committed on every rank. Raises the error of a failed save.

        The watchdog learns of the save's progress here only: while training goes on, a save in the background
        must not hide that training hangs.
        """
        self.waited = True
        while not wait_for([self._future], PROGRESS_SECONDS).done:
            if self._advanced.is_set():
                self._advanced.clear()
                report_progress(f"a part of saving {self.path.name}")
        self._future.result()
        return self.path


class CheckpointStore:
    """The checkpoints of one run, on a file system that all ranks share.

    Args:
        directory: The run's ``checkpoints`` folder; the first save creates it.
        keep_last, keep_every: See ``directory.removable_steps``.
        timeout_seconds: Maximum time that ranks wait for each other in a save.
        staging_bytes: Maximum size of the copy of a save in the background; None: unlimited. More state is
            saved in the foreground.
        on_phase: Called with each phase from the writing thread, for crash tests.
        in_use: Returns the steps of checkpoints that are being read or may be needed again, which retention
            keeps.
    """

    def __init__(
        self,
        directory: str | Path,
        keep_last: int = 2,
        keep_every: int = 0,
        *,
        timeout_seconds: float = 1800,
        staging_bytes: int | None = None,
        on_phase: Callable[[SavePhase], None] | None = None,
        in_use: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.directory = Path(directory)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._timeout_seconds, self._staging_bytes = timeout_seconds, staging_bytes
        self._on_phase = on_phase or (lambda phase: None)
        self._in_use = in_use
        self._snapshot = HostSnapshot()
        self._saves = 0
        self._pending: PendingSave | None = None

    def save(
        self,
        step: int,
        shards: Sequence[Shard],
        scalars: Mapping[str, object],
        *,
        namespace: str,
        rank: int,
        ranks: int,
        attempt: int,
        background: bool = False,
        best: Sequence[int] = (),
    ) -> PendingSave:
        """Save the state after ``step`` optimizer steps. Every rank calls it, the same number of times.

        If an intact checkpoint of that step exists (the run went back), it is kept; a damaged one is
        replaced.

        Args:
            step: Completed optimizer steps.
            shards: This rank's shards; may be empty.
            scalars: Plain JSON types; those of rank 0 are recorded.
            namespace: Namespace of the tensors' names.
            rank, ranks: Global rank and world size.
            attempt: Number of this start of the run, unique in this directory.
            background: Copy the state to host memory and return, while a thread writes. Otherwise, and if the
                copy would exceed ``staging_bytes``, return after the commit on every rank.
            best: Steps whose checkpoints retention keeps, the best first; ``checkpoints/best`` names it.

        Raises:
            CheckpointError, SaveFailed: The previous save failed, or with ``background=False`` this one. See
                ``commit.run_save``.
        """
        assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
        self.wait()
        target = self.directory / checkpoint_folder.step_name(step)
        if self._pending is not None and self._pending.path == target and self._pending.error is None:
            # this state is already saved: a periodic save may coincide with the end of the run
            return self._pending
        outgoing = items_to_write(shards)
        size = sum(item.data.numel() * item.data.element_size() for item in outgoing)
        if background and self._staging_bytes is not None and size > self._staging_bytes:
            log.warning(
                "rank %d saves step %d in the foreground: its state of %.3g GiB exceeds "
                "checkpoint.staging_gib=%.3g",
                *(rank, step, size / 2**30, self._staging_bytes / 2**30),
            )
            background = False
        self._saves += 1
        advanced = threading.Event()
        save = RankSave(
            directory=self.directory,
            step=step,
            namespace=namespace,
            rank=rank,
            ranks=ranks,
            attempt=attempt,
            number=self._saves,
            outgoing=self._snapshot.take(outgoing) if background else outgoing,
            scalars=dict(scalars),
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            best=tuple(best),
            in_use=self._in_use,
            timeout_seconds=self._timeout_seconds,
            on_phase=self._on_phase,
            on_progress=advanced.set,
        )
        future = run_in_thread(lambda: run_save(save), f"checkpoint-{step}")
        self._pending = PendingSave(target, future, size, advanced)
        if not background:
            self._pending.wait()
        return self._pending

    def wait(self) -> None:
        """Wait until no save is in progress.

        Raises the error of the last one, unless it was raised before.
        """
        if self._pending is not None and not self._pending.waited:
            self._pending.wait()

    def forget_last_save(self) -> None:
        """Save the next state even if it is of the same step as the last one: the run repeats steps.

        Raises the error of the last save, unless it was raised before.
        """
        self.wait()
        self._pending = None


def run_in_thread(work: Callable[[], None], name: str) -> Future[float]:
    """Run ``work`` in a thread; the result is its duration in seconds.

    The thread is a daemon, unlike a pool's: a rank that dies of another error does not wait for its peers.
    """
    future: Future[float] = Future()

    def run() -> None:
        began = time.monotonic()
        try:
            work()
        except BaseException as error:  # noqa: BLE001  it is raised again by wait() and by the next save
            future.set_exception(error)
        else:
            future.set_result(time.monotonic() - began)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
