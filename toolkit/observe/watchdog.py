"""End a run that makes no progress, and report why: a thread on each rank watches the main thread.

Progress is what all ranks complete together: a step, a batch of an evaluation, a save; at the start also each
part of the state that a rank draws or reads. When it stops, it stops on all ranks, and each rank's own clock
notices without communication. The first rank whose limit expires asks the others for a report
(``hang_reporter.py``), the lowest rank that can respond combines them, and all ranks end as failures at once,
because a thread that waits in a collective cannot be interrupted.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.engine.collectives import set_call_listener
from toolkit.errors import ExitCode, UserError
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.recorder import StepRecorder
from toolkit.monitor.sink import Row, Sink
from toolkit.observe import last_collective
from toolkit.observe.context import RankContext
from toolkit.observe.emergency_io import write_stderr
from toolkit.observe.hang_reporter import FAILURE, HANG, HangReporter, HangSources, Heartbeat
from toolkit.observe.rank_messages import RankMessages
from toolkit.plan.types import Device
from toolkit.progress import set_progress_listener
from toolkit.step_parts import UNEXPLAINED

# Minimum of the limit until the first step of a start, which compiles, is completed. Drawing or reading the
# state of a large model may take longer; each part of it counts as progress.
START_SECONDS = 600.0
POLL_SECONDS = 1.0  # between two checks; at most a tenth of the limit
PAUSE_SECONDS = 3.0  # a check that is this late shows that this process itself did not run
EXIT_SECONDS = 30.0  # after which the process ends, whatever its report is waiting for


class HangMonitor(Hook):
    """Receive signs of progress and ignore them. :class:`Watchdog` ends a run without progress.

    Attributes:
        user_code: the key of the user's hook that runs now, such as ``hooks.mine.on_step``; empty: none.
    """

    user_code = ""

    def enter(self, key: str) -> None:
        """Set ``user_code``."""
        self.user_code = key

    def beat(self, what: str) -> None:
        """All ranks have completed ``what``, such as ``step 16``."""

    def stop(self) -> None:
        """Stop watching."""

    def failed(self, error: Exception) -> None:
        """The run ends with ``error``. Add a note to it if the ranks' collective calls do not match."""


class Watchdog(HangMonitor):
    """
    Args:
        limit_seconds: end the run after this long without progress. Before the first step at least
            START_SECONDS.
        stacks_fd: the file that ``faulthandler`` writes to while native code holds the interpreter's lock.
        exit_process: ends the process with an exit code.
    """

    def __init__(
        self,
        limit_seconds: float,
        reporter: HangReporter,
        *,
        stacks_fd: int,
        exit_process: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady_limit, self._limit = limit_seconds, max(limit_seconds, START_SECONDS)
        self._reporter, self._stacks_fd = reporter, stacks_fd
        self._exit_process, self._clock = exit_process, clock
        self._poll = min(POLL_SECONDS, limit_seconds / 10)
        self._step = 0
        self._beat = ("the start of the process", clock())
        self._armed = float("-inf")
        self._answered = False
        self._stopped = threading.Event()
        self._hanging = False
        self._reported = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- progress, from the main thread and from those that draw or read the state

    def beat(self, what: str) -> None:
        self._beat = (what, self._clock())

    def on_start(self, step: int) -> None:
        self._step = step
        self.beat("building and loading")
        last_collective.extend_group_timeouts(self._limit)

    def on_step(self, completed: CompletedStep) -> None:
        self._step = completed.step
        if self._limit != self._steady_limit:
            self._limit, self._armed = self._steady_limit, float("-inf")
            self._arm(self._clock())
        self.beat(f"step {completed.step}")

    def on_eval(self, row: Row) -> None:
        self.beat(f"the evaluation of {row['set']} after step {row['step']}")

    def on_checkpoint(self, path: Path) -> None:
        self.beat(f"saving {path.name}")

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(EXIT_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    def failed(self, error: Exception) -> None:
        # another rank's end broke the call that this rank waited in; the thread ends this one too
        if self._hanging:
            self._thread.join(EXIT_SECONDS)
        if isinstance(error, UserError) or self._stopped.is_set():
            return
        self._stopped.set()
        note = self._reporter.report_failure(error, self._heartbeat())
        if note is not None:
            error.add_note(note)

    def _heartbeat(self) -> Heartbeat:
        what, at = self._beat
        return Heartbeat(self._step, what, self._clock() - at)

    # ---- the watching thread

    def _run(self) -> None:
        checked = self._clock()
        while not self._stopped.wait(self._poll):
            now = self._clock()
            if now - checked > self._poll + PAUSE_SECONDS:
                # The process was stopped or the machine slept. Ranks that did run notice a hang by
                # themselves.
                what, at = self._beat
                self._beat = (what, at + now - checked)
            checked = now
            self._arm(now)
            requested = self._reporter.requested()
            if requested == HANG or now - self._beat[1] > self._limit:
                return self._end_hang()
            if requested == FAILURE and not self._answered:
                self._answered = True
                self._reporter.answer_failure(self._heartbeat())

    def _arm(self, now: float) -> None:
        """Let a C thread write the stacks shortly before the limit, in case native code holds the
        interpreter's lock.
        """
        if now - self._armed < self._steady_limit / 10:
            return
        self._armed = now
        os.ftruncate(self._stacks_fd, 0)
        os.lseek(self._stacks_fd, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(self._limit * 0.9, file=self._stacks_fd)

    def _end_hang(self) -> None:
        self._hanging = True
        threading.Thread(target=self._end_at_last, name="watchdog-end", daemon=True).start()
        try:
            self._reporter.report_hang(self._heartbeat(), self._steady_limit)
        except BaseException:  # noqa: BLE001  the run is over in any case
            write_stderr(f"this rank could not report its hang: {traceback.format_exc()}")
        self._reported.set()
        self._exit_process(int(ExitCode.FAILURE))

    def _end_at_last(self) -> None:
        if not self._reported.wait(EXIT_SECONDS):
            write_stderr(f"this rank hangs, and could not report why within {EXIT_SECONDS:g} s")
            self._exit_process(int(ExitCode.FAILURE))


@contextmanager
def watch_for_hangs(
    context: RankContext, sink: Sink, alert: Callable[[Alert], None], recorder: StepRecorder | None
) -> Iterator[HangMonitor]:
    """Watch from before the engine is built until the run is over. Collective."""
    plan, limit = context.plan, context.plan.config.monitor.hang_seconds
    if limit == 0:
        yield HangMonitor()
        return

    def open_part() -> str:
        if watchdog.user_code:
            return watchdog.user_code
        part = recorder.current[1] if recorder is not None else UNEXPLAINED
        return "" if part == UNEXPLAINED else part

    stacks_fd, last_call = os.memfd_create("stacks", os.MFD_CLOEXEC), last_collective.LastCollective()
    processes = last_collective.gather_process_ids(context.ranks, stacks_fd, last_call.descriptor)
    neighbour_calls = last_collective.open_neighbour_records(processes, context.rank)
    # only gloo terminates processes, and its calls outweigh the recording
    if plan.world.device is Device.CPU:
        set_call_listener(last_call.record)
    store = last_collective.clone_store() if plan.world.nodes > 1 else None
    sources = HangSources(
        processes=processes,
        neighbour_calls=neighbour_calls,
        part=open_part,
        nccl_trace=last_collective.dump_nccl_trace if plan.world.device is Device.CUDA else None,
    )
    messages = RankMessages(context.directory.hang_folder(context.attempt), store)
    reporter = HangReporter(context, sources, messages, alert=alert, sink=sink)
    watchdog = Watchdog(limit, reporter, stacks_fd=stacks_fd)
    watchdog.start()
    set_progress_listener(watchdog.beat)
    try:
        yield watchdog
    except Exception as error:
        watchdog.failed(error)
        raise
    finally:
        watchdog.stop()
        set_progress_listener(None)
        set_call_listener(None)
        last_call.close()
        for descriptor in (stacks_fd, *neighbour_calls.values()):
            os.close(descriptor)
