"""Exchange the ranks' reports of a hang or a failure, and write the diagnosis.

Every rank posts a report as a message (``rank_messages.py``). The lowest rank that can respond collects
them, diagnoses the hang (``monitor/hangs``), writes the run's report, status and alert, and posts the
verdict, on which all ranks end.
"""

from __future__ import annotations

import json
import linecache
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from toolkit.engine.collectives import last_calls
from toolkit.errors import ExitCode
from toolkit.monitor.alert import Alert
from toolkit.monitor.collective_calls import CollectiveCall, calls_from_flight_recorder
from toolkit.monitor.hangs import stacks
from toolkit.monitor.hangs.diagnosis import Diagnosis, diagnose, diagnose_mismatch
from toolkit.monitor.hangs.rank_reports import (
    HangEvidence,
    Neighbour,
    RankReport,
    combine_reports,
    format_call,
)
from toolkit.monitor.hangs.report_text import format_report
from toolkit.monitor.hangs.stacks import ProcessId
from toolkit.monitor.sink import Sink
from toolkit.observe.context import RankContext
from toolkit.observe.emergency_io import append_row, run_with_timeout, write_file, write_stderr
from toolkit.observe.last_collective import read_last_collective
from toolkit.observe.rank_messages import RankMessages
from toolkit.rundir.status import RunState

COLLECT_SECONDS = 4.0  # for the other ranks' reports
VERDICT_SECONDS = 4.0  # for the verdict of the rank that collects, after that
FAILURE_SECONDS = 2.0  # for the other ranks' reports if this rank fails
TRACE_SECONDS = 2.0  # for NCCL's flight recorder, which may ask a device that does not respond
FLUSH_SECONDS = 4.0  # for the sinks to write what they have
LINGER_SECONDS = 2.0  # how long rank 0, which may serve the store, stays for other nodes
POLL_ONE_NODE, POLL_SEVERAL_NODES = 0.1, 0.5  # seconds between two reads; a thousand ranks may poll
MAX_COMPARED = 8  # ranks whose calls a failing rank compares with its own

OWN_THREADS = ("watchdog", "mailbox", "delays")  # threads that only measure and report
MISMATCH = "mismatch"  # the alert of a run that fails because ranks make different calls
REQUEST, VERDICT = "asked", "verdict"  # names of messages
HANG, FAILURE = "rank", "failure"  # why reports are requested, and their messages: rank-3.json


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The newest progress of this rank.

    Attributes:
        step: number of completed steps.
        what: the newest progress, such as ``step 16``.
        idle: seconds from then until this object was created.
        created: ``time.monotonic()`` of its creation.
    """

    step: int
    what: str
    idle: float
    created: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSources:
    """The sources of a rank's report.

    Attributes:
        processes: of all ranks, by rank.
        part: returns the part of the step that the main thread is in.
        neighbour_calls: descriptors of the neighbours' records, by rank (``open_neighbour_records``).
        calls: returns this rank's last calls, as its process recorded them.
        nccl_trace: returns NCCL's recording of this rank's calls as JSON; None without a GPU.
    """

    processes: Sequence[ProcessId]
    part: Callable[[], str]
    neighbour_calls: Mapping[int, int] = field(default_factory=dict)
    calls: Callable[[], list[CollectiveCall]] = last_calls
    nccl_trace: Callable[[], str] | None = None


class HangReporter:
    """One rank's side of the exchange. Its methods bound their waiting and continue if one step fails."""

    def __init__(
        self,
        context: RankContext,
        sources: HangSources,
        messages: RankMessages,
        *,
        alert: Callable[[Alert], None],
        sink: Sink,
    ) -> None:
        self._directory, self._attempt, self._rank = context.directory, context.attempt, context.rank
        self._sources, self._messages, self._alert, self._sink = sources, messages, alert, sink
        self._processes, self._own = sources.processes, sources.processes[context.rank]
        self._nodes = len({process.host for process in sources.processes})
        self._poll = POLL_ONE_NODE if self._nodes == 1 else POLL_SEVERAL_NODES

    def requested(self) -> str | None:
        """Return why a rank has requested reports, HANG or FAILURE; None if none has."""
        request = self._messages.poll(REQUEST)
        return json.loads(request)["why"] if request is not None else None

    def answer_failure(self, heartbeat: Heartbeat) -> None:
        """Post this rank's report for a rank that fails."""
        self._post(f"{FAILURE}-{self._rank}", self._report(heartbeat, FAILURE).to_json())

    def report_failure(self, error: Exception, heartbeat: Heartbeat) -> str | None:
        """Compare this rank's calls with the other ranks', because ``error`` ends it.

        Returns:
            how the calls differ, if they do.
        """
        if len(self._processes) == 1:
            return None
        summary = f"{type(error).__name__}: {error}"
        failure = "\n".join([summary, *traceback.format_exception(error)])
        own = self._report(heartbeat, FAILURE, failure)
        self._post(f"{FAILURE}-{self._rank}", own.to_json())
        call = own.blocking_call
        if call is None:
            return None
        self._request(FAILURE)
        others = [rank for rank in call.ranks if rank != self._rank][:MAX_COMPARED]
        reports = self._collect(FAILURE, own, others, FAILURE_SECONDS)
        for rank in others:
            if rank not in reports and (ended := self._reconstruct(rank, call, heartbeat)) is not None:
                reports[rank] = ended
        evidence = combine_reports(reports, self._processes, {}, expected=(self._rank, *others))
        diagnosis = diagnose_mismatch(evidence)
        if diagnosis is None:
            return None
        head = f"Rank {self._rank} failed after {own.last}: {summary}"
        self._try(lambda: self._write_report(diagnosis, evidence, head))
        if self._rank == 0 or self._has_ended(0):
            self._log_alert(replace(diagnosis.alert(heartbeat.step), name=MISMATCH))
        return f"{diagnosis.cause} ({diagnosis.evidence})"

    def report_hang(self, heartbeat: Heartbeat, limit_seconds: float) -> None:
        """Post this rank's report, and collect and conclude or wait for the rank that does."""
        self._request(HANG)
        own = self._report(heartbeat, HANG)
        self._post(f"{HANG}-{self._rank}", own.to_json())
        if self._sources.nccl_trace is not None:
            own = self._with_nccl_trace(own, self._sources.nccl_trace)
            self._post(f"{HANG}-{self._rank}", own.to_json())
        if self._is_collector():
            self._conclude(own, limit_seconds)
        verdict = self._wait_for(VERDICT, VERDICT_SECONDS)
        if verdict is None:
            write_stderr(
                f"rank {self._rank}: no progress for {own.idle:.0f} s after {own.last}, and no verdict "
                "from the rank that collects the reports"
            )
        else:
            self._kill_neighbours(json.loads(verdict)["silent"])
        run_with_timeout(self._close_sinks, FLUSH_SECONDS)
        if self._rank == 0 and self._nodes > 1:
            time.sleep(LINGER_SECONDS)

    # ---- the verdict

    def _is_collector(self) -> bool:
        """Return whether this is the lowest rank that can respond. Other ranks than 0 wait for rank 0's
        verdict first.
        """
        if self._rank == 0:
            return True
        if self._wait_for(VERDICT, COLLECT_SECONDS) is not None:
            return False
        return all(self._messages.read(f"{HANG}-{rank}") is None for rank in range(self._rank))

    def _conclude(self, own: RankReport, limit_seconds: float) -> None:
        seconds = COLLECT_SECONDS if self._rank == 0 else self._poll
        evidence = self._combine(self._collect(HANG, own, range(len(self._processes)), seconds))
        diagnosis = diagnose(evidence)
        head = (
            f"No progress for {own.idle:.0f} s after {own.last} (monitor.hang_seconds={limit_seconds:g}); "
            f"reported by rank {self._rank} at {time.strftime('%Y-%m-%d %H:%M:%S')}."
        )
        file = self._directory.hang_file(self._attempt)
        reason = f"hang: {diagnosis.cause}; see {file}"
        self._try(lambda: self._write_report(diagnosis, evidence, head))
        self._try(
            lambda: self._directory.finish(
                RunState.FAILED, int(ExitCode.FAILURE), reason, attempt=self._attempt
            )
        )
        write_stderr(f"the run hangs after {own.last}: {diagnosis.cause}. It ends; see {file}")
        verdict = {"cause": diagnosis.cause, "report": str(file), "silent": evidence.silent}
        self._post(VERDICT, json.dumps(verdict))
        # After the verdict, because sinks may be slow and the other ranks need not wait for them.
        alert = diagnosis.alert(own.step)
        self._log_alert(replace(alert, evidence=f"{diagnosis.evidence}; stacks of all ranks: {file}"))

    def _kill_neighbours(self, ranks: Sequence[int]) -> None:
        """End ranks of this host that cannot end themselves; torchrun would wait half a minute before it
        does.
        """
        for process in (self._processes[rank] for rank in ranks):
            alive = process.shares_host(self._own) and stacks.read_process_state(process) not in stacks.ENDED
            if alive and process != self._own:
                with suppress(ProcessLookupError):  # it has ended in between
                    os.kill(process.pid, signal.SIGKILL)

    def _close_sinks(self) -> None:
        self._sink.flush()
        self._sink.close(int(ExitCode.FAILURE))

    def _log_alert(self, alert: Alert) -> None:
        """Log through rank 0's sinks, or append to its file from another rank."""
        if self._rank == 0:
            run_with_timeout(lambda: self._alert(alert), FLUSH_SECONDS)
        else:
            self._try(lambda: append_row(self._directory.alerts_file, alert.to_row()))

    def _write_report(self, diagnosis: Diagnosis, evidence: HangEvidence, head: str) -> None:
        text = format_report(diagnosis, evidence, head, linecache.getline)
        write_file(self._directory.hang_file(self._attempt), text)

    # ---- reports

    def _report(self, heartbeat: Heartbeat, why: str, failure: str = "") -> RankReport:
        now, wall = time.monotonic(), time.time()
        return RankReport(
            rank=self._rank,
            host=self._own.host,
            pid=self._own.pid,
            at=wall,
            step=heartbeat.step,
            last=heartbeat.what,
            # Formatting a traceback takes milliseconds. Without them a call that began right after the newest
            # progress would seem older than it, and so not to block this rank.
            idle=heartbeat.idle + now - heartbeat.created,
            part=self._sources.part(),
            threads=tuple(
                thread for thread in stacks.read_thread_stacks() if not thread.name.startswith(OWN_THREADS)
            ),
            calls=tuple(replace(call, begun=call.begun - now + wall) for call in self._sources.calls()),
            neighbours=self._silent_neighbours(),
            failure=failure,
            whole=why == FAILURE or self._sources.nccl_trace is None,
        )

    def _with_nccl_trace(self, own: RankReport, nccl_trace: Callable[[], str]) -> RankReport:
        """Replace the process's recording by NCCL's, which knows what the GPU has finished."""
        text = run_with_timeout(nccl_trace, TRACE_SECONDS)
        if text is None:
            return replace(own, whole=True)
        file = self._directory.hang_folder(self._attempt) / f"rank-{self._rank}.nccl.json"
        self._try(lambda: write_file(file, text))
        calls = calls_from_flight_recorder(json.loads(text), own.calls)
        groups = {call.group for call in calls}
        others = (call for call in own.calls if call.group not in groups)
        return replace(own, calls=(*others, *calls), whole=True)

    def _silent_neighbours(self) -> dict[int, Neighbour]:
        """Return the ranks of this host that cannot report."""
        neighbours = {
            rank: self._read_neighbour(rank)
            for rank, process in enumerate(self._processes)
            if process.shares_host(self._own) and rank != self._rank
        }
        return {rank: neighbour for rank, neighbour in neighbours.items() if neighbour.silent}

    def _read_neighbour(self, rank: int) -> Neighbour:
        process, last = self._processes[rank], self._read_last_call(rank)
        return Neighbour(
            stacks.read_process_state(process),
            stacks.read_frozen_stacks(process),
            format_call(last) if last is not None else "",
        )

    def _read_last_call(self, rank: int) -> CollectiveCall | None:
        descriptor = self._sources.neighbour_calls.get(rank)
        return read_last_collective(descriptor) if descriptor is not None else None

    def _reconstruct(self, rank: int, call: CollectiveCall, heartbeat: Heartbeat) -> RankReport | None:
        """Report for a rank that ended without a report, if its last call was on the group of ``call``."""
        last = self._read_last_call(rank)
        if last is None or last.group != call.group:
            return None
        process = self._processes[rank]
        return RankReport(
            rank=rank,
            host=process.host,
            pid=process.pid,
            at=time.time(),
            step=heartbeat.step,
            last=heartbeat.what,
            idle=0.0,
            calls=(replace(last, ranks=call.ranks),),
        )

    def _has_ended(self, rank: int) -> bool:
        process = self._processes[rank]
        return process.shares_host(self._own) and stacks.read_process_state(process) in stacks.ENDED

    def _collect(
        self, why: str, own: RankReport, ranks: Sequence[int], seconds: float
    ) -> dict[int, RankReport]:
        """Return this rank's report and those of ``ranks`` that arrive in time."""
        reports = {self._rank: own}
        deadline = time.monotonic() + seconds
        while True:
            missing = [rank for rank in ranks if rank not in reports or not reports[rank].whole]
            for rank in missing:
                if (text := self._messages.read(f"{why}-{rank}")) is not None:
                    reports[rank] = RankReport.from_json(text)
            missing = [rank for rank in missing if rank not in reports or not reports[rank].whole]
            if all(map(self._has_ended, missing)) or time.monotonic() > deadline:
                return dict(sorted(reports.items()))
            time.sleep(self._poll)

    def _combine(self, reports: Mapping[int, RankReport]) -> HangEvidence:
        """Add the reports of ranks that failed before."""
        earlier = {
            rank: RankReport.from_json(text)
            for rank in range(len(self._processes))
            if rank not in reports and (text := self._messages.read(f"{FAILURE}-{rank}")) is not None
        }
        failed = {rank: report for rank, report in earlier.items() if report.failure}
        neighbours = {
            rank: self._read_neighbour(rank)
            for rank, process in enumerate(self._processes)
            if rank not in reports and process.shares_host(self._own)
        }
        return combine_reports({**reports, **failed}, self._processes, neighbours)

    # ---- messages

    def _wait_for(self, name: str, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while (text := self._messages.read(name)) is None and time.monotonic() < deadline:
            time.sleep(self._poll)
        return text

    def _request(self, why: str) -> None:
        """Request the other ranks' reports."""
        if self._messages.poll(REQUEST) is None or why == HANG:
            self._post(REQUEST, json.dumps({"why": why, "by": self._rank}))

    def _post(self, name: str, text: str) -> None:
        self._try(lambda: self._messages.post(name, text))

    def _try(self, action: Callable[[], object]) -> None:
        """Run one step of the report, which may fail without preventing the next."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  reported, and the run ends all the same
            write_stderr(f"rank {self._rank}: {type(error).__name__}: {error}")
