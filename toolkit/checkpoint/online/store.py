"""Saving: every rank writes what it holds, rank 0 proves that it is whole and commits it. No collectives.

Ranks meet through files in a temporary folder that is named with the step, the attempt and the number of the save, so that
nothing of a dead attempt is ever taken for this one's:

    every rank  write part-NNNNN.safetensors, sync it, then write report-NNNNN.json with the list of its pieces
    rank 0      wait for all reports, prove coverage, write manifest.json, sync, rename the folder to step-NNNNNNNN,
                write ``latest``, remove what retention lets go
    others      wait until the temporary folder is gone (committed) or holds ``failed.json``
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from toolkit import checkpoint_folder
from toolkit.checkpoint import directory
from toolkit.checkpoint.blocks import view_box
from toolkit.checkpoint.online.commit import RankSave, SavePhase, run_save
from toolkit.checkpoint.online.writing import HostSnapshot, WriteItem
from toolkit.checkpoint.planner import boxes_to_write, shift_box
from toolkit.checkpoint.shard import Shard


class PendingSave:
    """A save under way. ``path`` is where the checkpoint will be, ``size`` the bytes that this rank writes."""

    def __init__(self, path: Path, future: Future[float], size: int = 0) -> None:
        self.path = path
        self.size = size
        self._future = future
        self.waited = False

    def done(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What went wrong; None while it runs and when it is committed."""
        return self._future.exception() if self._future.done() else None

    @property
    def seconds(self) -> float | None:
        """That it took to its commit; None until then."""
        return self._future.result() if self._future.done() and self.error is None else None

    def wait(self) -> Path:
        """Return when the checkpoint is committed, on every rank. Raises what went wrong."""
        self.waited = True
        self._future.result()
        return self.path


class CheckpointStore:
    """The checkpoints of one run, on a file system that all ranks see.

    Args:
        directory: the run's ``checkpoints`` folder; made by the first save.
        keep_last, keep_every: see ``directory.removable``.
        timeout_seconds: how long ranks wait for each other in one save.
        on_phase: told of each phase from the writing thread: what crash tests hook into.
    """

    def __init__(
        self,
        directory: str | Path,
        keep_last: int = 2,
        keep_every: int = 0,
        *,
        timeout_seconds: float = 1800,
        on_phase: Callable[[SavePhase], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._timeout_seconds = timeout_seconds
        self._on_phase = on_phase or (lambda phase: None)
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
    ) -> PendingSave:
        """Save the state after ``step`` optimizer steps. Every rank of the run calls it, the same number of times.

        Where a complete checkpoint of that step is there (the run went back and came here again), it is kept if all its
        bytes are intact, and replaced if not.

        Args:
            shards: what this rank holds; may be empty.
            scalars: plain JSON types; those of rank 0 are recorded.
            attempt: number of this start of the run; never used before in this directory.
            background: copy the state to host memory and return; a thread writes while training goes on. Otherwise
                return when the checkpoint is committed on every rank.

        Raises:
            CheckpointError, SaveFailed: the save before this one failed, or (``background=False``) this one: see ``commit.carry_out``.
        """
        assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
        self.wait()
        target = self.directory / checkpoint_folder.step_name(step)
        if self._pending is not None and self._pending.path == target and self._pending.error is None:
            return (
                self._pending
            )  # this very state is saved: a cadence and the end of the run may fall together
        outgoing = [
            WriteItem(
                shard.key,
                shard.global_shape,
                box,
                view_box(shard.data.detach(), shift_box(box, [-o for o in shard.box.offset])),
            )
            for shard in shards
            for box in boxes_to_write(shard)
        ]
        self._saves += 1
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
            timeout_seconds=self._timeout_seconds,
            on_phase=self._on_phase,
        )
        size = sum(item.data.numel() * item.data.element_size() for item in outgoing)
        self._pending = PendingSave(target, _in_thread(lambda: run_save(save), f"checkpoint-{step}"), size)
        if not background:
            self._pending.wait()
        return self._pending

    def wait(self) -> None:
        """Return when no save is under way. Raises what went wrong in the last one, unless it was raised before."""
        if self._pending is not None and not self._pending.waited:
            self._pending.wait()

    def newest(self) -> Path | None:
        """The checkpoint to continue from, see ``checkpoint_folder.newest``. Raises CheckpointError: the files do not agree on one."""
        return checkpoint_folder.newest_checkpoint(self.directory)

    def complete(self) -> list[Path]:
        """Whole checkpoints in rising order of steps."""
        return directory.complete_checkpoints(self.directory)


def _in_thread(work: Callable[[], None], name: str) -> Future[float]:
    """The seconds that it takes. A daemon, unlike a pool's thread: a rank that dies of something else does not wait for its peers."""
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
