"""Gathers the ranks' times of each step beside training, and tells rank 0's sinks where they went: ``monitor/ledger_rows.py``.

The training thread makes no collective for it. About once a second rank 0 asks for a gather, with one integer in the exchange that every
step has anyway; a thread of each rank then sends what its clocks have passed. What is not passed yet goes with the next gather.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from toolkit.hooks import Hook, StepDone
from toolkit.monitor.ledger_rows import LedgerAssembler, LedgerTotals, StepVectors, part_names
from toolkit.monitor.recorder import StepRecorder, StepTime
from toolkit.monitor.sink import Row
from toolkit.observe.gather import Gather, gather_of
from toolkit.plan.types import RunPlan

GATHER_SECONDS = 1.0
END_SECONDS = 5.0  # how long the end waits for other ranks' last steps
LAST_SECONDS, LAST_LOOKS = 0.5, 100  # how long, and how often, it looks for this rank's own last step
SPARE = 4  # steps of a gather beside those since the last one: ranks whose clocks lagged catch up
MOST_BYTES = 4 * 2**20  # that reach rank 0 in one gather
FEWEST, MOST = 16, 1024  # steps of a gather, whatever the number of ranks


def most_slots(ranks: int, width: int) -> int:
    """Steps that one gather may have."""
    return min(MOST, max(FEWEST, MOST_BYTES // (4 * width * ranks)))


class Ledger(Hook):
    """
    Args:
        taken: hands over the steps that the clocks have passed since it was last called, in order; called by the training thread.
        gather: this rank's way to rank 0.
        log: takes the rows, on rank 0, in the thread.
        say, tell: for results, for trouble; on rank 0.
    """

    def __init__(
        self,
        taken: Callable[[], Iterable[StepTime]],
        vectors: StepVectors,
        gather: Gather,
        log: Callable[[Row], None],
        *,
        rank: int,
        ranks: int,
        say: Callable[[str], None],
        tell: Callable[[str], None],
        end_seconds: float = END_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._taken, self._vectors, self._gather, self._log = taken, vectors, gather, log
        self._rank, self._say, self._tell = rank, say, tell
        self._end_seconds, self._clock = end_seconds, clock
        self._most = most_slots(ranks, vectors.width)
        self._assembly, self._totals = LedgerAssembler(vectors, ranks), LedgerTotals()
        self._waiting: deque[StepTime] = deque(maxlen=2 * self._most)
        self._jobs: queue.SimpleQueue[tuple[int, int, Iterable[StepTime]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._first = 0  # the first step of this attempt, which has warm-up in it
        self._step = 0  # the newest that is done
        self._asked_at = 0  # the newest gather's step
        self._asked, self._answered = 0, 0  # gathers; the thread counts the latter
        self._next = 0.0
        self._held: list[StepTime] = []  # taken and not handed to the thread yet
        self._newest = 0  # step that was taken
        self._left = False  # nobody wants to know any more what becomes of the thread

    def due(self) -> int:
        """How many steps each rank shall send after this step, 0: none. Asked on every rank before ``on_step``; rank 0's answer counts.

        Never before the last gather is through on rank 0, and so on all ranks: that bounds what can pile up on any of them.
        """
        if self._rank != 0 or self._asked > self._answered:
            return 0
        since = self._step - self._asked_at
        return self._slots(since) if self._clock() >= self._next or since >= self._most // 2 else 0

    def _slots(self, since: int) -> int:
        return min(self._most, since + SPARE)

    def on_start(self, step: int) -> None:
        self._first, self._step, self._asked_at, self._newest = step + 1, step, step, step
        self._next = self._clock() + GATHER_SECONDS
        self._thread.start()

    def on_step(self, done: StepDone) -> None:
        self._step = done.step
        if done.agreed.ledger:
            self._ask(done.agreed.ledger)

    def on_end(self, step: int) -> None:
        """All ranks come here after the same step, so that no exchange is needed for the last gather."""
        for _ in range(LAST_LOOKS):
            self._take()
            if self._newest >= step:
                break
            time.sleep(LAST_SECONDS / LAST_LOOKS)  # the device is about to come by the end of the last step
        self._ask(self._slots(step - self._asked_at))
        self._jobs.put(None)
        self._thread.join(self._end_seconds)
        self._left = True
        if self._rank != 0:
            return
        if self._thread.is_alive():
            self._tell(
                f"the ledger lacks the last steps: some rank did not send them within {self._end_seconds:g} s"
            )
        elif self._totals.steps:
            self._say(f"where the time went, by the median rank: {self._totals.format_shares()}")

    def close(self) -> None:
        """Whatever ended the run. A thread that waits for a rank that is gone is left to the end of the process."""
        self._left = True
        self._jobs.put(None)

    def _ask(self, slots: int) -> None:
        self._asked += 1
        self._asked_at, self._next = self._step, self._clock() + GATHER_SECONDS
        self._take()
        self._jobs.put((self._step, slots, self._held))
        self._held = []

    def _take(self) -> None:
        self._held += self._taken()
        self._newest = self._held[-1].step if self._held else self._newest

    # ---- the thread

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._send(*job)
                self._answered += 1
            self._tell_rows(self._assembly.flush())
        except Exception as error:  # noqa: BLE001  training goes on without its ledger
            if not self._left:
                self._tell(f"no more rows of the ledger: {type(error).__name__}: {error}")

    def _send(self, base: int, slots: int, taken: Iterable[StepTime]) -> None:
        self._waiting.extend(taken)
        steps = [self._waiting.popleft() for _ in range(min(slots, len(self._waiting)))]
        blocks = self._gather(self._vectors.pack(steps, base, slots))
        if blocks is not None:
            self._tell_rows(self._assembly.add(base, blocks))

    def _tell_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._log(row)
            if row["step"] != self._first:
                self._totals.add(row)


def ledger_of(
    plan: RunPlan,
    recorder: StepRecorder,
    log: Callable[[Row], None],
    *,
    rank: int,
    say: Callable[[str], None],
    tell: Callable[[str], None],
) -> Ledger:
    """Collective."""
    ranks = plan.world.ranks
    return Ledger(
        recorder.take_steps,
        StepVectors(part_names(plan.axes)),
        gather_of(rank, ranks, plan.world.ranks_per_node),
        log,
        rank=rank,
        ranks=ranks,
        say=say,
        tell=tell if rank == 0 else lambda words: None,
    )
