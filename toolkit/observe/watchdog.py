"""A run that makes no progress is told, with its cause, and ended: a thread on each rank that looks whether the main one still moves.

Progress is what all ranks finish together: a step, a batch of an evaluation, a save. So where it stops, it stops on all of them, and each
rank's own clock says so without asking anybody. The first rank whose limit is over asks the others for their word; the lowest one that
can speak puts them together, and all end as by a failure, at once: who waits in a collective that never ends cannot be got out of it.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from toolkit.engine.collectives import last_calls, tell_each
from toolkit.errors import ExitCode, UserError
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.alert import Alert
from toolkit.monitor.collective_calls import CollectiveCall, calls_from_flight_recorder
from toolkit.monitor.hangs import diagnosis, hang_text, stacks
from toolkit.monitor.hangs.reports import Found, Neighbour, Report, call_words, found_of
from toolkit.monitor.hangs.stacks import ProcessId
from toolkit.monitor.recorder import StepRecorder
from toolkit.monitor.sink import Row, Sink
from toolkit.monitor.step_parts import UNEXPLAINED
from toolkit.observe import last_collective
from toolkit.observe.emergency_io import append_row, run_with_timeout, write_file, write_stderr
from toolkit.observe.rank_messages import RankMessages
from toolkit.plan.types import Device, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

START_SECONDS = (
    600.0  # until a start has made its first step, which compiles, the limit is no shorter than this
)
POLL_SECONDS = 1.0  # between two looks; a tenth of a short limit
PAUSE_SECONDS = 3.0  # a look that comes so much too late says that this process itself did not run
COLLECT_SECONDS = 4.0  # for the other ranks' words
VERDICT_SECONDS = 4.0  # for the word of the rank that collects, after that
FAILURE_SECONDS = 2.0  # for the other ranks' words where this one fails by itself
TRACE_SECONDS = 2.0  # for NCCL's flight recorder, which may ask a device that does not answer
FLUSH_SECONDS = 4.0  # for sinks to write what they have
LINGER_SECONDS = 2.0  # that rank 0, which may serve the store, stays for other nodes
LAST_SECONDS = 30.0  # after that the process ends, whatever it is at
PAUSE_NODE, PAUSE_NODES = (
    0.1,
    0.5,
)  # between two looks for other ranks' words: on one node, and where a thousand may look
MOST_COMPARED = 8  # ranks whose calls a failing rank looks at

OWN_THREADS = ("watchdog", "mailbox", "processor")  # which only measure and report
MISMATCH = "mismatch"  # the alert of a run that fails where ranks call different collectives
ASKED, VERDICT = "asked", "verdict"
HANG, FAILURE = "rank", "failure"  # why words are asked for, and what they are called: rank-3.json


class Progress(Hook):
    """Who is told that the run goes on. This one does nothing with it: nobody watches."""

    def beat(self, what: str) -> None:
        """All ranks have finished ``what``: ``step 16``."""

    def stop(self) -> None:
        """From now on nothing is expected."""

    def failed(self, error: Exception) -> None:
        """The run ends by ``error``, which gets a note where ranks are found to be at odds."""


class Watchdog(Progress):
    """
    Args:
        limit_seconds: without progress the run is over. Before the first step it is START_SECONDS at least.
        processes: of all ranks, by rank; this one's has the file that its frozen stacks go to.
        boxes: of neighbours' last calls, by rank: ``last_collective.open_neighbour_records``.
        part: the part of the step that the main thread is in.
        calls: this rank's last ones, as its process knows them.
        trace: NCCL's record of this rank's calls, as JSON; None where there is no GPU.
        end: what ends the process.
    """

    def __init__(
        self,
        limit_seconds: float,
        *,
        rank: int,
        processes: Sequence[ProcessId],
        messages: RankMessages,
        directory: RunDirectory,
        attempt: int,
        alert: Callable[[Alert], None],
        sink: Sink,
        part: Callable[[], str],
        boxes: Mapping[int, int] | None = None,
        calls: Callable[[], list[CollectiveCall]] = last_calls,
        trace: Callable[[], str] | None = None,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady_limit, self._rank, self._processes, self._messages = (
            limit_seconds,
            rank,
            processes,
            messages,
        )
        self._limit = max(limit_seconds, START_SECONDS)
        self._directory, self._attempt, self._alert, self._sink, self._part = (
            directory,
            attempt,
            alert,
            sink,
            part,
        )
        self._boxes = dict(boxes or {})
        self._calls, self._trace, self._end, self._clock = calls, trace, end, clock
        self._poll = min(POLL_SECONDS, limit_seconds / 10)
        self._nodes = len({process.host for process in processes})
        self._pause = PAUSE_NODE if self._nodes == 1 else PAUSE_NODES
        self._step = 0
        self._beat = ("the start of the process", clock())
        self._armed = float("-inf")
        self._answered = False
        self._stopped = threading.Event()
        self._hanging = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- progress, on the main thread

    def beat(self, what: str) -> None:
        self._beat = (what, self._clock())

    def on_start(self, step: int) -> None:
        self._step = step
        self.beat("building and loading")
        last_collective.extend_group_timeouts(self._limit)

    def on_step(self, done: StepDone) -> None:
        self._step = done.step
        if self._limit != self._steady_limit:
            self._limit, self._armed = self._steady_limit, float("-inf")
            self._arm(self._clock())
        self.beat(f"step {done.step}")

    def on_eval(self, row: Row) -> None:
        self.beat(f"the evaluation of {row['set']} after step {row['step']}")

    def on_checkpoint(self, path: Path) -> None:
        self.beat(f"saving {path.name}")

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(LAST_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    def failed(self, error: Exception) -> None:
        if self._hanging:  # the others' end is what broke the call that this rank waited in, and the watching thread ends it too
            self._thread.join(LAST_SECONDS)
        if len(self._processes) == 1 or isinstance(error, UserError) or self._stopped.is_set():
            return
        self._stopped.set()
        words = f"{type(error).__name__}: {error}"
        own = self._report("\n".join([words, *traceback.format_exception(error)]), FAILURE)
        self._post(f"{FAILURE}-{self._rank}", own.to_json())
        call = own.waits_in
        if call is None:
            return
        self._ask(FAILURE)
        with_it = [rank for rank in call.ranks if rank != self._rank][:MOST_COMPARED]
        reports = self._collect(FAILURE, own, with_it, FAILURE_SECONDS)
        reports |= {
            rank: word
            for rank in with_it
            if rank not in reports and (word := self._last_word(rank, call)) is not None
        }
        found = found_of(reports, self._processes, {}, asked=(self._rank, *with_it))
        said = diagnosis.mismatch(found)
        if said is not None:
            error.add_note(f"{said.cause} ({said.evidence})")
            self._try(
                lambda: self._write_report(said, found, f"Rank {self._rank} failed after {own.last}: {words}")
            )
            if self._rank == 0 or self._gone(0):
                self._raise(replace(said.alert(self._step), name=MISMATCH))

    # ---- watching, on a thread of its own

    def _watch(self) -> None:
        looked = self._clock()
        while not self._stopped.wait(self._poll):
            now = self._clock()
            if now - looked > self._poll + PAUSE_SECONDS:
                # Stopped and continued, or the machine slept: what has not run has not hung. Others who did run say so by themselves.
                what, at = self._beat
                self._beat = (what, at + now - looked)
            looked = now
            self._arm(now)
            asked = self._messages.look(ASKED)
            why = json.loads(asked)["why"] if asked is not None else None
            if why == HANG or now - self._beat[1] > self._limit:
                return self._hang()
            if why == FAILURE and not self._answered:
                self._answered = True
                self._post(f"{FAILURE}-{self._rank}", self._report("", FAILURE).to_json())

    def _arm(self, now: float) -> None:
        """Where native code keeps the interpreter, no thread of Python can speak. Then a thread of C writes the stacks, shortly before the
        others' limit is over, into memory that they can read."""
        if now - self._armed < self._steady_limit / 10:
            return
        self._armed = now
        notes = self._processes[self._rank].notes
        os.ftruncate(notes, 0)
        os.lseek(notes, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(self._limit * 0.9, file=notes)

    # ---- the end

    def _hang(self) -> None:
        self._hanging = True
        threading.Thread(target=self._at_last, name="watchdog-end", daemon=True).start()
        try:
            self._tell_and_leave()
        except BaseException:  # noqa: BLE001  the run is over in any case
            write_stderr(f"rank {self._rank} could not tell of its hang: {traceback.format_exc()}")
        self._left.set()
        self._end(int(ExitCode.FAILURE))

    def _tell_and_leave(self) -> None:
        self._ask(HANG)
        own = self._report("", HANG)
        self._post(f"{HANG}-{self._rank}", own.to_json())
        if self._trace is not None:
            own = self._with_trace(own, self._trace)
            self._post(f"{HANG}-{self._rank}", own.to_json())
        if self._collects():
            self._conclude(own)
        verdict = self._await(VERDICT, VERDICT_SECONDS)
        if verdict is None:
            write_stderr(
                f"rank {self._rank}: no progress for {own.idle:.0f} s after {own.last}, and no word of the rank that should say "
                f"why"
            )
        else:
            self._end_neighbours(json.loads(verdict)["silent"])
        run_with_timeout(self._close_sinks, FLUSH_SECONDS)
        if self._rank == 0 and self._nodes > 1:
            time.sleep(LINGER_SECONDS)

    def _end_neighbours(self, silent: Sequence[int]) -> None:
        """Ranks of this host that can no longer end themselves: torchrun would wait for half a minute before it does that."""
        own = self._processes[self._rank]
        for process in (self._processes[rank] for rank in silent):
            if process.beside(own) and process != own and stacks.process_state(process) not in stacks.ENDED:
                with suppress(ProcessLookupError):  # it has ended in between
                    os.kill(process.pid, signal.SIGKILL)

    def _close_sinks(self) -> None:
        self._sink.flush()
        self._sink.close(int(ExitCode.FAILURE))

    def _collects(self) -> bool:
        """Whether this is the lowest rank that can speak. Rank 0 knows; the others find out while rank 0 collects."""
        if self._rank == 0:
            return True
        if self._await(VERDICT, COLLECT_SECONDS) is not None:
            return False
        return all(self._messages.read(f"{HANG}-{rank}") is None for rank in range(self._rank))

    def _conclude(self, own: Report) -> None:
        found = self._found(
            self._collect(
                HANG, own, range(len(self._processes)), COLLECT_SECONDS if self._rank == 0 else self._pause
            )
        )
        said = diagnosis.diagnose(found)
        head = (
            f"No progress for {own.idle:.0f} s after {own.last} (monitor.hang_seconds={self._steady_limit:g}); told by "
            f"rank {self._rank} at {time.strftime('%Y-%m-%d %H:%M:%S')}."
        )
        file = self._directory.hang_file(self._attempt)
        alert = replace(said.alert(self._step), evidence=f"{said.evidence}; stacks of all ranks: {file}")
        self._try(lambda: self._write_report(said, found, head))
        self._try(
            lambda: self._directory.finish(
                RunState.FAILED,
                int(ExitCode.FAILURE),
                f"hang: {said.cause}; see {file}",
                attempt=self._attempt,
            )
        )
        write_stderr(f"the run hangs after {own.last}: {said.cause}. It ends; see {file}")
        self._post(VERDICT, json.dumps({"cause": said.cause, "report": str(file), "silent": found.silent}))
        self._raise(alert)  # sinks may take their time, and the others need not wait for them

    def _raise(self, alert: Alert) -> None:
        """Through rank 0's sinks, or past them where it cannot."""
        if self._rank == 0:
            run_with_timeout(lambda: self._alert(alert), FLUSH_SECONDS)
        else:
            self._try(lambda: append_row(self._directory.alerts_file, alert.to_row()))

    def _write_report(self, said: diagnosis.Diagnosis, found: Found, head: str) -> None:
        write_file(
            self._directory.hang_file(self._attempt),
            hang_text.report_text(said, found, head, linecache.getline),
        )

    def _at_last(self) -> None:
        if not self._left.wait(LAST_SECONDS):
            write_stderr(f"rank {self._rank} hangs, and could not tell why within {LAST_SECONDS:g} s")
            self._end(int(ExitCode.FAILURE))

    # ---- words

    def _report(self, failure: str, why: str) -> Report:
        now, wall = time.monotonic(), time.time()
        own = self._processes[self._rank]
        what, at = self._beat
        calls = tuple(replace(call, begun=call.begun - now + wall) for call in self._calls())
        threads = tuple(thread for thread in stacks.threads() if not thread.name.startswith(OWN_THREADS))
        return Report(
            rank=self._rank,
            host=own.host,
            pid=own.pid,
            at=wall,
            step=self._step,
            last=what,
            idle=self._clock() - at,
            part=self._part(),
            threads=threads,
            calls=calls,
            neighbours=self._neighbours(),
            failure=failure,
            whole=why == FAILURE or self._trace is None,
        )

    def _with_trace(self, own: Report, trace: Callable[[], str]) -> Report:
        """NCCL's own record takes the place of the process's: it knows what the GPU has finished."""
        text = run_with_timeout(trace, TRACE_SECONDS)
        if text is None:
            return replace(own, whole=True)
        self._try(
            lambda: write_file(
                self._directory.hang_folder(self._attempt) / f"rank-{self._rank}.nccl.json", text
            )
        )
        calls = calls_from_flight_recorder(json.loads(text), own.calls)
        there = {call.group for call in calls}
        return replace(
            own, calls=(*(call for call in own.calls if call.group not in there), *calls), whole=True
        )

    def _neighbours(self) -> dict[int, Neighbour]:
        """Ranks of this host that cannot speak for themselves."""
        own = self._processes[self._rank]
        seen = {
            rank: self._seen(rank)
            for rank, process in enumerate(self._processes)
            if process.beside(own) and rank != self._rank
        }
        return {rank: neighbour for rank, neighbour in seen.items() if neighbour.silent}

    def _seen(self, rank: int) -> Neighbour:
        process = self._processes[rank]
        last = last_collective.read_last_collective(self._boxes[rank]) if rank in self._boxes else None
        return Neighbour(
            stacks.process_state(process),
            stacks.notes_of(process),
            call_words(last) if last is not None else "",
        )

    def _last_word(self, rank: int, call: CollectiveCall) -> Report | None:
        """Of a rank that ended without one: its last call, if that was one of the group of ``call``."""
        last = last_collective.read_last_collective(self._boxes[rank]) if rank in self._boxes else None
        if last is None or last.group != call.group:
            return None
        process = self._processes[rank]
        return Report(
            rank=rank,
            host=process.host,
            pid=process.pid,
            at=time.time(),
            step=self._step,
            last=self._beat[0],
            idle=0.0,
            calls=(replace(last, ranks=call.ranks),),
        )

    def _gone(self, rank: int) -> bool:
        process = self._processes[rank]
        return process.beside(self._processes[self._rank]) and stacks.process_state(process) in stacks.ENDED

    def _collect(self, why: str, own: Report, ranks: Sequence[int], seconds: float) -> dict[int, Report]:
        """This rank's word and those of ``ranks``, as far as they come."""
        reports = {self._rank: own}
        deadline = self._clock() + seconds
        while True:
            for rank in ranks:
                if (rank not in reports or not reports[rank].whole) and (
                    text := self._messages.read(f"{why}-{rank}")
                ) is not None:
                    reports[rank] = Report.from_json(text)
            open_ones = [rank for rank in ranks if rank not in reports or not reports[rank].whole]
            if all(map(self._gone, open_ones)) or self._clock() > deadline:
                return dict(sorted(reports.items()))
            time.sleep(self._pause)

    def _found(self, reports: Mapping[int, Report]) -> Found:
        """With the last words of ranks that have failed before."""
        gone = {
            rank: Report.from_json(text)
            for rank in range(len(self._processes))
            if rank not in reports and (text := self._messages.read(f"{FAILURE}-{rank}")) is not None
        }
        failed = {rank: report for rank, report in gone.items() if report.failure}
        own = self._processes[self._rank]
        states = {
            rank: self._seen(rank)
            for rank, process in enumerate(self._processes)
            if rank not in reports and process.beside(own)
        }
        return found_of({**reports, **failed}, self._processes, states)

    def _await(self, name: str, seconds: float) -> str | None:
        deadline = self._clock() + seconds
        while (text := self._messages.read(name)) is None and self._clock() < deadline:
            time.sleep(self._pause)
        return text

    def _ask(self, why: str) -> None:
        """For the other ranks' words."""
        if self._messages.look(ASKED) is None or why == HANG:
            self._post(ASKED, json.dumps({"why": why, "by": self._rank}))

    def _post(self, name: str, text: str) -> None:
        self._try(lambda: self._messages.post(name, text))

    def _try(self, action: Callable[[], object]) -> None:
        """A step of telling that may fail without keeping the next one from being taken."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  said, and the run ends all the same
            write_stderr(f"rank {self._rank}: {type(error).__name__}: {error}")


@contextmanager
def watchdog(
    plan: RunPlan,
    directory: RunDirectory,
    sink: Sink,
    alert: Callable[[Alert], None],
    recorder: StepRecorder | None,
    *,
    rank: int,
    attempt: int,
) -> Iterator[Progress]:
    """From before the engine is built until the run is over. All ranks enter it together."""
    limit, ranks = plan.config.monitor.hang_seconds, plan.world.ranks
    if limit == 0:
        yield Progress()
        return

    def part() -> str:
        open_part = recorder.current[1] if recorder is not None else UNEXPLAINED
        return "" if open_part == UNEXPLAINED else open_part

    notes, box = os.memfd_create("stacks", os.MFD_CLOEXEC), last_collective.LastCollective()
    processes = last_collective.gather_process_ids(ranks, notes, box.descriptor)
    boxes = last_collective.open_neighbour_records(processes, rank)
    if plan.world.device is Device.CPU:  # gloo's calls take much longer; NCCL's do not end a process
        tell_each(box.note)
    store = last_collective.clone_store() if plan.world.nodes > 1 else None
    trace = last_collective.dump_nccl_trace if plan.world.device is Device.CUDA else None
    watch = Watchdog(
        limit,
        rank=rank,
        processes=processes,
        messages=RankMessages(directory.hang_folder(attempt), store),
        directory=directory,
        attempt=attempt,
        alert=alert,
        sink=sink,
        part=part,
        boxes=boxes,
        trace=trace,
    )
    watch.start()
    try:
        yield watch
    except Exception as error:
        watch.failed(error)
        raise
    finally:
        watch.stop()
        tell_each(None)
        box.close()
        for descriptor in (notes, *boxes.values()):
            os.close(descriptor)
