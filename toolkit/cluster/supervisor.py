"""Start the ranks of a run on this machine, forward signals to them, and restart them after a failure.

This is the process of plain ``python launch/train.py``. Failed ranks are restarted from their newest
checkpoint, or from a newer snapshot in memory, as a new attempt with its own folder and log. Every attempt
uses other processes, so no NCCL or CUDA state survives a failure; standbys have done their imports before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.cluster.attempt.attempt_spec import AttemptSpec, start_next_attempt
from toolkit.cluster.attempt.exit_handling import ExitHandler
from toolkit.cluster.attempt.output_log import tee_output
from toolkit.cluster.attempt.rank_processes import ABORT_REAP_SECONDS, POLL_SECONDS, RankProcesses
from toolkit.cluster.standbys.rank_assignment import RankAssignment
from toolkit.cluster.standbys.standby_pool import StandbyPool, count_standbys
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.cluster.world.environment import HANDOVER, Launch, Launcher
from toolkit.commands import python_arguments
from toolkit.config.cluster import ClusterConfig
from toolkit.config.schema import RunConfig
from toolkit.errors import ExitCode
from toolkit.goodput import Attempt
from toolkit.plan.types import RunPlan, World
from toolkit.restart_phases import RestartPhase, RestartPhases
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.snapshot_folder import SnapshotFolder, remove_abandoned_folders, snapshot_root
from toolkit.rundir.status import RunState, Status

log = logging.getLogger(__name__)

# delay of the first restart without progress; doubles with each failure in a row without a newer checkpoint
FIRST_DELAY_SECONDS = 2.0
MAX_DELAY_SECONDS = 300.0


def needs_supervisor(launch: Launch, world: World, cluster: ClusterConfig) -> bool:
    """Return whether this process supervises ranks: plain python, including jobs of one node.

    A single rank without restarts runs in this process itself, which makes debugging easy.
    """
    return launch.launcher is Launcher.NONE and (world.ranks > 1 or cluster.restarts > 0)


def supervise_ranks(
    script: str,
    spec: AttemptSpec,
    directory: RunDirectory,
    stop: StopRequest,
    exit_handler: ExitHandler,
    plan: RunPlan,
) -> ExitCode:
    """Run the ranks until the run ends, with as many attempts as ``cluster.restarts`` allows."""
    # the ranks enforce their grace period; RankProcesses.wait() is the last resort
    stop.arm(None)
    command = python_arguments(script)
    cluster = plan.config.cluster
    standbys = StandbyPool(command, count_standbys(cluster, plan.world, restarts=cluster.restarts))
    snapshots = _open_snapshot_folder(plan.config, directory)
    supervisor = _Supervisor(command, plan, directory, stop, exit_handler, standbys, snapshots)
    try:
        return supervisor.run(spec)
    finally:
        supervisor.clean_up()


def _open_snapshot_folder(config: RunConfig, directory: RunDirectory) -> SnapshotFolder | None:
    """Make the folder for snapshots in memory if the run wants one. Without it, restarts read the disk."""
    root = snapshot_root(config.checkpoint.memory_folder)
    remove_abandoned_folders(root)
    if not config.checkpoint.memory_every or not config.cluster.restarts:
        return None
    try:
        return SnapshotFolder(directory.path, root)
    except OSError as error:
        log.warning("no snapshots in memory (checkpoint.memory_every): %s", error)
        return None


@dataclass(frozen=True, slots=True)
class NewestState:
    """The newest state that a restart can continue from. ``step`` is None if there is none."""

    step: int | None
    in_memory: bool = False

    def __str__(self) -> str:
        if self.step is None:
            return "the beginning"
        return f"the {'snapshot in memory' if self.in_memory else 'checkpoint'} of step {self.step}"


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        code: the exit code.
        by_itself: the ranks failed by an error of their own, not a signal or a hang.
        stop_overdue: ranks that should stop were killed, because they did not end in time.
        stuck: describes the ranks that do not end after SIGKILL, and whose place no others can take.
        phases: of the restart that may follow, so far; None if no rank failed.
    """

    code: ExitCode
    by_itself: bool
    stop_overdue: bool = False
    stuck: str | None = None
    phases: RestartPhases | None = None


@dataclass(frozen=True, slots=True)
class _Supervisor:
    """Runs the attempts of one command.

    Attributes:
        command: the script or module that every rank runs.
        snapshots: the folder for snapshots in memory; None: none are taken.
    """

    command: Sequence[str]
    plan: RunPlan
    directory: RunDirectory
    stop: StopRequest
    exit_handler: ExitHandler
    standbys: StandbyPool
    snapshots: SnapshotFolder | None

    def run(self, spec: AttemptSpec) -> ExitCode:
        """Run the attempts until one is not followed by a restart."""
        directory, exit_handler, limit = self.directory, self.exit_handler, self.plan.config.cluster.restarts
        failures, starts = 0, 1
        if self.snapshots is not None:
            spec = replace(spec, memory=str(self.snapshots.path))
        while True:
            before = self._newest_state()
            end = self._run_attempt(spec)
            if end.stuck is not None:
                log.error("not restarted: %s", end.stuck)
                return end.code
            newest = self._newest_state()
            attempts = directory.attempt_times()[-starts:]
            decision = decide_restart(
                end.code,
                stop_requested=self.stop() is not None or end.stop_overdue,
                failed_early=end.by_itself and not has_stepped(attempts),
                progressed=has_progressed(attempts),
                before=before.step,
                saved=newest.step,
                failures=failures,
                limit=limit,
            )
            if isinstance(decision, NoRestart):
                if decision.why:
                    log.warning("not restarted: %s", decision.why)
                return end.code
            status = directory.status()
            why = (status.reason if status is not None else None) or "no reason was recorded"
            log.warning(describe_restart(decision, failed=spec.attempt, why=why, newest=newest, limit=limit))
            # The attempt begins before the pause, so status.json shows a run that continues.
            failures = decision.failures
            spec = start_next_attempt(spec, self.plan, directory, starts)
            starts += 1
            exit_handler.attempt, exit_handler.code = spec.attempt, ExitCode.DONE
            tee_output(directory.log_file(spec.attempt))
            if not _wait_unless_stopped(self.stop, decision.seconds):
                exit_handler.code = ExitCode.STOPPED
                exit_handler.record(f"{self.stop()} before training began")
                return exit_handler.code
            phases = None if end.phases is None else end.phases.ended(RestartPhase.PREPARE)
            spec = replace(spec, restart=phases)

    def _newest_state(self) -> NewestState:
        saved = self.directory.saved_step()
        kept = None if self.snapshots is None else self.snapshots.newest_step()
        if kept is not None and (saved is None or kept > saved):
            return NewestState(kept, in_memory=True)
        return NewestState(saved)

    def _run_attempt(self, spec: AttemptSpec) -> AttemptEnd:
        """Start the ranks, wait for them, and record how they ended."""
        directory, standbys = self.directory, self.standbys
        handover = directory.attempt_folder(spec.attempt).absolute() / "handover.json"
        if spec.restart is not None:
            ready = standbys.discard_unready()
            spec = replace(spec, restart=replace(spec.restart, ranks=spec.world.ranks, standbys=ready))
        spec.write(handover)
        # The ranks inherit the lock, so the directory stays locked if this process is killed while they save.
        lock = directory.lock_descriptor
        try:
            ranks = RankProcesses(
                [*self.command, f"{HANDOVER}{handover}"],
                spec.world,
                keep=[lock],
                take_standby=lambda rank, environ: standbys.take(
                    rank, RankAssignment(environ=environ, arguments=[f"{HANDOVER}{handover}"]), [lock]
                ),
            )
        except OSError as error:  # no memory, too many processes or no port, perhaps only for now
            self.exit_handler.code, reason = ExitCode.FAILURE, f"the ranks cannot be started: {error}"
            log.error(reason)
            self.exit_handler.record(reason)
            return AttemptEnd(ExitCode.FAILURE, by_itself=True)

        def abort(reason: str, code: ExitCode) -> None:
            ranks.kill(ABORT_REAP_SECONDS)  # before the record, which rank 0 could overwrite
            self.exit_handler.abort(reason, code)
            self.clean_up()

        def has_started() -> bool:
            return directory.has_stepped(spec.attempt)

        standbys_started = False

        def start_standbys() -> None:
            nonlocal standbys_started
            if not standbys_started and has_started():
                standbys_started = True
                standbys.start(handover)

        self.stop.abort = abort
        try:
            grace_seconds = self.plan.config.cluster.grace_seconds
            code = ranks.wait(self.stop, grace_seconds, has_started, on_poll=start_standbys)
        finally:
            ranks.kill()
        self.exit_handler.code = code
        times, phases = ranks.failure_times, None
        if times is not None:
            detected = RestartPhases(times.alive).ended(RestartPhase.DETECT, times.noticed)
            phases = detected.ended(RestartPhase.STOP)
        steps = self.plan.config.train.steps
        _record_end(directory, spec.attempt, self.stop, self.exit_handler, ranks, steps=steps)
        hang_reported = directory.hang_file(spec.attempt).exists()
        by_itself = not hang_reported and not ranks.killed
        return AttemptEnd(self.exit_handler.code, by_itself, ranks.stop_overdue, ranks.stuck, phases)

    def clean_up(self) -> None:
        """End the standbys and remove the snapshots."""
        self.standbys.kill()
        if self.snapshots is not None:
            self.snapshots.remove()


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the ranks.

    Attributes:
        failures: failures in a row without a newer checkpoint, including this one.
        seconds: delay, since a broken resource may need time to recover; none after progress.
    """

    failures: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NoRestart:
    """Do not restart. ``why`` is empty if the run is done, was stopped, or is misconfigured."""

    why: str = ""


def decide_restart(
    code: ExitCode,
    *,
    stop_requested: bool,
    failed_early: bool,
    progressed: bool,
    before: int | None,
    saved: int | None,
    failures: int,
    limit: int,
) -> Restart | NoRestart:
    """Decide what follows the end of an attempt.

    Args:
        stop_requested: a stop was requested; the run is never restarted then.
        failed_early: the attempt failed by an error of its own before the run's first step, for example in a
            user's model, so a restart would fail in the same way.
        progressed: the attempt completed a step that no attempt before it had.
        before, saved: step of the newest checkpoint, or snapshot in memory, at the beginning and at the end
            of the attempt; None: there is none.
        failures: failures in a row without a newer checkpoint before this one.
        limit: ``cluster.restarts``.
    """
    if code is ExitCode.DIVERGED and limit:
        return NoRestart(
            "the loss, a gradient or a weight is not finite, and restarting from the same checkpoint "
            "would not help"
        )
    if code is not ExitCode.FAILURE or stop_requested or not limit:
        return NoRestart()
    if failed_early:
        return NoRestart("it failed before its first step, with an error that a restart would repeat")
    if saved is not None and saved != before:
        return Restart(0, 0.0 if progressed else FIRST_DELAY_SECONDS)
    if failures >= limit:
        return NoRestart(
            f"it failed {failures + 1} times in a row without a newer checkpoint (cluster.restarts={limit})"
        )
    delay = 0.0 if progressed else min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2**failures)
    return Restart(failures + 1, delay)


def describe_restart(restart: Restart, *, failed: int, why: str, newest: NewestState, limit: int) -> str:
    """Describe a restart for the user.

    Args:
        failed: the failed attempt.
        why: the reason of its failure.
        newest: what the next attempt continues from.
    """
    count = f" (restart {restart.failures} of {limit} without a newer checkpoint)" if restart.failures else ""
    when = f"in {restart.seconds:g} s" if restart.seconds else "now"
    return f"attempt {failed} failed: {why}\nattempt {failed + 1} starts {when} from {newest}{count}"


def has_stepped(attempts: Sequence[Attempt]) -> bool:
    """Return whether one of the attempts completed a step."""
    return any(attempt.times.first_step is not None for attempt in attempts)


def has_progressed(attempts: Sequence[Attempt]) -> bool:
    """Return whether the last attempt completed a step that none before it had."""
    *earlier, last = ((attempt.times.first_step, attempt.times.step or 0) for attempt in attempts)
    first_step, step = last
    return first_step is not None and all(step > reached for _, reached in earlier)


def _wait_unless_stopped(stop: StopRequest, seconds: float) -> bool:
    """Sleep; return False if a stop was requested meanwhile."""
    deadline = time.monotonic() + seconds
    while stop() is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL_SECONDS, left))
    return stop() is None


def _record_end(
    directory: RunDirectory,
    attempt: int,
    stop: StopRequest,
    exit_handler: ExitHandler,
    ranks: RankProcesses,
    *,
    steps: int,
) -> None:
    """Record the end of an attempt.

    After a failure rank 0 may only have seen a lost connection, so this process overwrites the reason. The
    ranks know more about a hang and a stop, and rank 0 about a mistake, unless only another rank found it.
    A run is not done if rank 0 has not recorded that, unless only its end was overdue.

    Args:
        steps: after which the run is complete.
    """
    hang_reported = directory.hang_file(attempt).exists()
    status = directory.status()
    if exit_handler.code is ExitCode.STOPPED and status is not None and status.step is None:
        exit_handler.record(
            f"{stop() or 'a rank was asked to stop'} before training began",
            overwrite=status.state is not RunState.STOPPED,
        )
    elif exit_handler.code is ExitCode.USER and ranks.rank_0_code == ExitCode.USER and _is_live(status):
        exit_handler.code = ExitCode.FAILURE  # Python ends with the same code if it cannot open the script
        exit_handler.record("rank 0 ended with exit code 2, but recorded no mistake: see the output above")
    elif exit_handler.code is ExitCode.USER:
        recorded = status is not None and status.exit_code == ExitCode.USER
        exit_handler.record("one rank found a mistake: see the output above", overwrite=not recorded)
    elif exit_handler.code is ExitCode.DONE and not _is_complete(status, ranks, steps):
        exit_handler.code = ExitCode.FAILURE
        reason = "a rank ended with exit code 0 before the run was complete, as after os._exit(0) in a hook"
        log.error(reason)
        exit_handler.record(reason)
    else:
        failure = ranks.first_failure()
        asked_to_end = ranks.stop_overdue or (stop() is not None and not ranks.killed)
        known = (hang_reported or asked_to_end) and ranks.stuck is None
        exit_handler.record(failure or stop(), overwrite=failure is not None and not known)


def _is_complete(status: Status | None, ranks: RankProcesses, steps: int) -> bool:
    """Return whether a run is complete whose ranks have all ended with exit code 0, or were late to end."""
    return not _is_live(status) or (ranks.end_overdue and status is not None and status.step == steps)


def _is_live(status: Status | None) -> bool:
    """Return whether no end is recorded."""
    return status is None or status.state.live
