"""Start the ranks of a run on this machine, forward signals to them, and restart them after a failure.

This is the process of plain ``python launch/train.py``. Failed ranks are restarted from their newest
checkpoint as a new attempt with its own folder and log. Every attempt uses new processes, so no NCCL or CUDA
state survives a failure.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from toolkit.cluster.attempt_spec import AttemptSpec, start_next_attempt
from toolkit.cluster.environment import HANDOVER, Launch, Launcher
from toolkit.cluster.exit_handling import ExitHandler
from toolkit.cluster.output_log import tee_output
from toolkit.cluster.rank_processes import POLL_SECONDS, RankProcesses
from toolkit.cluster.stop_request import StopRequest
from toolkit.commands import python_arguments
from toolkit.config.cluster import ClusterConfig
from toolkit.errors import ExitCode
from toolkit.plan.types import World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

log = logging.getLogger(__name__)

# delay of the first restart; doubles with each failure in a row without a newer checkpoint
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
    cluster: ClusterConfig,
) -> ExitCode:
    """Run the ranks until the run ends, with as many attempts as ``cluster.restarts`` allows."""
    # the ranks enforce their grace period; RankProcesses.wait() is the last resort
    stop.arm(None)
    failures, starts = 0, 1
    while True:
        before = directory.saved_step()
        code, by_itself = _run_attempt(script, spec, directory, stop, exit_handler, cluster.grace_seconds)
        saved = directory.saved_step()
        decision = decide_restart(
            code,
            stop_requested=stop() is not None,
            failed_early=by_itself and not _has_stepped(directory, starts),
            before=before,
            saved=saved,
            failures=failures,
            limit=cluster.restarts,
        )
        if isinstance(decision, NoRestart):
            if decision.why:
                log.warning("not restarted: %s", decision.why)
            return code
        status = directory.status()
        why = (status.reason if status is not None else None) or "no reason was recorded"
        log.warning(
            describe_restart(decision, failed=spec.attempt, why=why, saved=saved, limit=cluster.restarts)
        )
        # The attempt begins before the pause, so status.json shows a run that continues.
        failures = decision.failures
        spec = start_next_attempt(spec, directory, starts)
        starts += 1
        exit_handler.attempt, exit_handler.code = spec.attempt, ExitCode.DONE
        tee_output(directory.log_file(spec.attempt))
        if not _wait_unless_stopped(stop, decision.seconds):
            exit_handler.code = ExitCode.STOPPED
            exit_handler.record(f"{stop()} before training began")
            return exit_handler.code


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the ranks.

    Attributes:
        failures: failures in a row without a newer checkpoint, including this one.
        seconds: delay, since a broken resource may need time to recover.
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
        before, saved: step of the newest checkpoint at the beginning and at the end of the attempt; None:
            there is none.
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
        return Restart(0, FIRST_DELAY_SECONDS)
    if failures >= limit:
        return NoRestart(
            f"it failed {failures + 1} times in a row without a newer checkpoint (cluster.restarts={limit})"
        )
    return Restart(failures + 1, min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2**failures))


def describe_restart(restart: Restart, *, failed: int, why: str, saved: int | None, limit: int) -> str:
    """Describe a restart for the user.

    Args:
        failed: the failed attempt.
        why: the reason of its failure.
    """
    origin = f"the checkpoint of step {saved}" if saved is not None else "the beginning"
    count = f" (restart {restart.failures} of {limit} without a newer checkpoint)" if restart.failures else ""
    return (
        f"attempt {failed} failed: {why}\nattempt {failed + 1} starts in {restart.seconds:g} s from "
        f"{origin}{count}"
    )


def _has_stepped(directory: RunDirectory, starts: int) -> bool:
    """Return whether one of the last ``starts`` attempts completed a step."""
    return any(attempt.times.first_step is not None for attempt in directory.attempt_times()[-starts:])


def _wait_unless_stopped(stop: StopRequest, seconds: float) -> bool:
    """Sleep; return False if a stop was requested meanwhile."""
    deadline = time.monotonic() + seconds
    while stop() is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL_SECONDS, left))
    return stop() is None


def _run_attempt(
    script: str,
    spec: AttemptSpec,
    directory: RunDirectory,
    stop: StopRequest,
    exit_handler: ExitHandler,
    grace_seconds: float,
) -> tuple[ExitCode, bool]:
    """Start one process per rank and wait for them.

    Returns:
        The exit code, and whether the ranks failed by an error of their own (not a signal or a hang).
    """
    handover = directory.attempt_folder(spec.attempt).absolute() / "handover.json"
    spec.write(handover)
    # The ranks inherit the lock, so the directory stays locked if this process is killed while they save.
    ranks = RankProcesses(
        [*python_arguments(script), f"{HANDOVER}{handover}"], spec.world, keep=[directory.lock_descriptor]
    )

    def abort(reason: str, code: ExitCode) -> None:
        ranks.kill()
        exit_handler.abort(reason, code)

    stop.abort = abort
    try:
        exit_handler.code = ranks.wait(
            stop,
            grace_seconds,
            lambda: (status := directory.status()) is not None and status.step is not None,
        )
    finally:
        ranks.kill()
    # After a failure rank 0 may only have seen a lost connection, so this process overwrites the reason. The
    # ranks know more about a hang, and rank 0 about a mistake, unless only another rank found it.
    hang_reported = directory.hang_file(spec.attempt).exists()
    status = directory.status()
    if exit_handler.code is ExitCode.STOPPED and status is not None and status.step is None:
        exit_handler.record(
            f"{stop() or 'a rank was asked to stop'} before training began",
            overwrite=status.state is not RunState.STOPPED,
        )
    elif exit_handler.code is ExitCode.USER:
        recorded = status is not None and status.exit_code == ExitCode.USER
        exit_handler.record("one rank found a mistake: see the output above", overwrite=not recorded)
    else:
        failure = ranks.first_failure()
        exit_handler.record(failure or stop(), overwrite=failure is not None and not hang_reported)
    return exit_handler.code, not hang_reported and not ranks.killed
