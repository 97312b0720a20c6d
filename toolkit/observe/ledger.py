"""Gather the step times of all ranks in the background and log on rank 0 where the time went
(``monitor/ledger_rows.py``).

The training thread makes no collective calls for this. About once a second rank 0 requests a gather, with
one integer in the exchange that every step has anyway. A background thread of each rank then sends the steps
that its clocks have completed; the rest follows with the next gather.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from toolkit.checkpoint_folder import step_of
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.ledger_rows import LedgerAssembler, LedgerTotals, StepVectors, part_names
from toolkit.monitor.recorder import StepRecorder, StepTime
from toolkit.monitor.sink import Row
from toolkit.observe.context import RankContext
from toolkit.observe.gather import Gather, make_gather

log = logging.getLogger(__name__)

GATHER_SECONDS = 1.0
END_SECONDS = 5.0  # how long the end waits for other ranks' last steps
LAST_STEP_SECONDS, LAST_STEP_POLLS = (
    0.5,
    100,
)  # how long, and how often, the end polls for this rank's last step
SPARE_SLOTS = 4  # steps of a gather beyond those since the last one, for ranks whose clocks lag
MAX_GATHER_BYTES = 4 * 2**20  # that reach rank 0 in one gather
MIN_SLOTS, MAX_SLOTS = 16, 1024  # steps of a gather, whatever the number of ranks


def max_slots(ranks: int, width: int) -> int:
    """Return how many steps one gather may hold."""
    return min(MAX_SLOTS, max(MIN_SLOTS, MAX_GATHER_BYTES // (4 * width * ranks)))


class LedgerHook(Hook):
    """
    Args:
        take_steps: returns the steps that the clocks have completed since the previous call, in order.
            Called by the training thread.
        gather: gathers on rank 0.
        log_row: takes the rows, on rank 0, in the background thread.
    """

    def __init__(
        self,
        take_steps: Callable[[], Iterable[StepTime]],
        vectors: StepVectors,
        gather: Gather,
        log_row: Callable[[Row], None],
        *,
        rank: int,
        ranks: int,
        end_seconds: float = END_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take_steps, self._vectors, self._gather, self._log_row = take_steps, vectors, gather, log_row
        self._rank, self._ranks, self._end_seconds, self._clock = rank, ranks, end_seconds, clock
        self._max_slots = max_slots(ranks, vectors.width)
        self._assembly, self._totals = LedgerAssembler(vectors, ranks), LedgerTotals()
        self._pending: deque[StepTime] = deque(maxlen=2 * self._max_slots)  # of the thread: not sent yet
        # An event asks the thread to forget what it has not logged.
        self._queue: queue.SimpleQueue[tuple[int, int, Iterable[StepTime]] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._first_step = 0  # of this attempt, which includes warm-up
        self._step = 0  # the newest completed step
        self._last_gather = 0  # step of the newest gather
        self._requested, self._completed = 0, 0  # gathers; the thread counts the latter
        self._next = 0.0
        self._taken: list[StepTime] = []  # not handed to the thread yet
        self._newest_taken = 0
        self._closing = False  # errors of the thread no longer matter

    def due(self) -> int:
        """Return how many steps each rank shall send after this step; 0 for none.

        The maximum over all ranks counts. Only rank 0 requests gathers, and only when the previous one is
        complete, which bounds what can queue up.
        """
        if self._rank != 0 or self._requested > self._completed:
            return 0
        steps = self._step - self._last_gather
        return self._slots(steps) if self._clock() >= self._next or steps >= self._max_slots // 2 else 0

    def _slots(self, steps: int) -> int:
        return min(self._max_slots, steps + SPARE_SLOTS)

    def on_start(self, step: int) -> None:
        self._first_step, self._step, self._last_gather, self._newest_taken = step + 1, step, step, step
        self._next = self._clock() + GATHER_SECONDS
        self._thread.start()

    def on_step(self, completed: CompletedStep) -> None:
        self._step = completed.step
        if completed.consensus.ledger_steps:
            self._request(completed.consensus.ledger_steps)

    def on_rollback(self, path: Path) -> None:
        """Forget the steps that are repeated, after the gathers that the thread has begun."""
        self._step = self._last_gather = self._newest_taken = step_of(path) or 0
        self._taken, forgotten = [], threading.Event()
        self._queue.put(forgotten)
        if self._thread.is_alive():
            forgotten.wait(self._end_seconds)

    def on_end(self, step: int) -> None:
        """Gather the last steps. All ranks end after the same step, so this needs no exchange."""
        for _ in range(LAST_STEP_POLLS):
            self._take()
            if self._newest_taken >= step:
                break
            # the device has not reached the end of the step yet
            time.sleep(LAST_STEP_SECONDS / LAST_STEP_POLLS)
        self._request(self._slots(step - self._last_gather))
        self._queue.put(None)
        self._thread.join(self._end_seconds)
        self._closing = True
        if self._rank != 0:
            return
        if self._thread.is_alive():
            log.warning(
                f"the ledger lacks the last steps: a rank did not send them within {self._end_seconds:g} s"
            )
        elif self._totals.steps:
            log.info(f"where the time went, by the median rank: {self._totals.format_shares()}")

    def close(self) -> None:
        """Stop the thread. A thread that waits for a lost rank ends with the process."""
        self._closing = True
        self._queue.put(None)

    def _request(self, slots: int) -> None:
        self._requested += 1
        self._last_gather, self._next = self._step, self._clock() + GATHER_SECONDS
        self._take()
        self._queue.put((self._step, slots, self._taken))
        self._taken = []

    def _take(self) -> None:
        self._taken += self._take_steps()
        self._newest_taken = self._taken[-1].step if self._taken else self._newest_taken

    # ---- the background thread

    def _run(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                if isinstance(job, threading.Event):
                    self._pending.clear()
                    self._assembly = LedgerAssembler(self._vectors, self._ranks)
                    job.set()
                    continue
                self._send(*job)
                self._completed += 1
            self._log_rows(self._assembly.flush())
        except Exception as error:  # noqa: BLE001  training continues without its ledger
            if not self._closing and self._rank == 0:
                log.warning(f"the ledger ends: {type(error).__name__}: {error}")

    def _send(self, base: int, slots: int, taken: Iterable[StepTime]) -> None:
        self._pending.extend(taken)
        steps = [self._pending.popleft() for _ in range(min(slots, len(self._pending)))]
        blocks = self._gather(self._vectors.pack(steps, base, slots))
        if blocks is not None:
            self._log_rows(self._assembly.add(base, blocks))

    def _log_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._log_row(row)
            if row["step"] != self._first_step:
                self._totals.add(row)


def make_ledger(context: RankContext, recorder: StepRecorder, log_row: Callable[[Row], None]) -> LedgerHook:
    """Create this rank's ledger. Collective."""
    plan = context.plan
    return LedgerHook(
        recorder.take_steps,
        StepVectors(part_names(plan.axes)),
        make_gather(context.rank, context.ranks, plan.world.ranks_per_node),
        log_row,
        rank=context.rank,
        ranks=context.ranks,
    )
