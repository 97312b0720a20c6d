"""Plain ``python launch/train.py``: this process starts the ranks, passes signals on, and outlives none of them.

Ranks that failed are started again from their newest checkpoint, as a new attempt with its own folder and log (cluster/restarts.py says
whether and when). Each of them is a process of its own, so whatever state a failure left, in NCCL, in a CUDA context, goes with it.
"""

from __future__ import annotations

import sys
import time

from toolkit.cluster import restarts
from toolkit.cluster.environment import HANDOVER, Launch, Launcher
from toolkit.cluster.exit_handling import ExitHandler
from toolkit.cluster.output_log import tee_output
from toolkit.cluster.rank_processes import POLL_SECONDS, RankProcesses
from toolkit.cluster.attempt_spec import AttemptSpec, start_next_attempt
from toolkit.cluster.stop_request import StopRequest
from toolkit.config.cluster import ClusterConfig
from toolkit.errors import ExitCode
from toolkit.plan.types import World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState


def needs_supervisor(launch: Launch, world: World, cluster: ClusterConfig) -> bool:
    """Whether this process is the parent of ranks: plain python, and our jobs of one node. Alone, it is itself the only rank where nobody
    wants it started again: a debugger is there at once."""
    return launch.launcher is Launcher.NONE and (world.ranks > 1 or cluster.restarts > 0)


def supervise_ranks(
    script: str,
    start: AttemptSpec,
    directory: RunDirectory,
    stop: StopRequest,
    exit_handler: ExitHandler,
    cluster: ClusterConfig,
) -> ExitCode:
    """See the start to its end, over as many attempts as it takes and ``cluster.restarts`` allows."""
    stop.arm(None)  # the ranks keep to their grace, and Ranks.wait() has the last word
    fruitless, starts = 0, 1
    while True:
        before = directory.saved_step()
        code, by_itself = _run_attempt(script, start, directory, stop, exit_handler, cluster.grace_seconds)
        saved = directory.saved_step()
        following = restarts.after(
            code,
            asked=stop() is not None,
            hopeless=by_itself and not _has_stepped(directory, starts),
            before=before,
            saved=saved,
            fruitless=fruitless,
            limit=cluster.restarts,
        )
        if isinstance(following, restarts.NoRestart):
            if following.why:
                print(f"it is not started again: {following.why}", file=sys.stderr, flush=True)
            return code
        status = directory.status()
        why = (status.reason if status is not None else None) or "without a word"
        print(
            restarts.words(following, failed=start.attempt, why=why, saved=saved, limit=cluster.restarts),
            file=sys.stderr,
            flush=True,
        )
        # The attempt begins before the pause: whoever looks at status.json meanwhile sees a run that goes on.
        fruitless = following.fruitless
        start = start_next_attempt(start, directory, starts)
        starts += 1
        exit_handler.attempt, exit_handler.code = start.attempt, ExitCode.DONE
        tee_output(directory.log_file(start.attempt))
        if not _wait_unless_stopped(stop, following.seconds):
            exit_handler.code = ExitCode.STOPPED
            exit_handler.record(f"{stop()} before training began")
            return exit_handler.code


def _has_stepped(directory: RunDirectory, starts: int) -> bool:
    """Whether one of the last ``starts`` attempts has made a step."""
    return any(attempt.times.first_step is not None for attempt in directory.tried()[-starts:])


def _wait_unless_stopped(stop: StopRequest, seconds: float) -> bool:
    """Whether nobody asked to stop meanwhile."""
    deadline = time.monotonic() + seconds
    while stop() is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL_SECONDS, left))
    return stop() is None


def _run_attempt(
    script: str,
    start: AttemptSpec,
    directory: RunDirectory,
    stop: StopRequest,
    exit_handler: ExitHandler,
    grace_seconds: float,
) -> tuple[ExitCode, bool]:
    """Hand the start to one process a rank and see them to their end; and whether that was an error of their own, no signal and no hang."""
    handover = directory.attempt_folder(start.attempt).absolute() / "handover.json"
    start.write(handover)
    # The ranks keep the directory taken should this process be killed: they will still be saving.
    ranks = RankProcesses([script, f"{HANDOVER}{handover}"], start.world, keep=[directory.lock_descriptor])

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
    # Of a failure rank 0 saw a lost connection, and this process knows why; of a hang the ranks know more than how they ended, and of a
    # mistake rank 0, unless another rank alone has met it.
    told = directory.hang_file(start.attempt).exists()
    status = directory.status()
    if exit_handler.code is ExitCode.STOPPED and status is not None and status.step is None:
        exit_handler.record(
            f"{stop() or 'a rank was asked to stop'} before training began",
            anew=status.state is not RunState.STOPPED,
        )
    elif exit_handler.code is ExitCode.USER:
        recorded = status is not None and status.exit_code == ExitCode.USER
        exit_handler.record("a mistake that one rank has met: see what was printed", anew=not recorded)
    else:
        failure = ranks.first_failure()
        exit_handler.record(failure or stop(), anew=failure is not None and not told)
    return exit_handler.code, not told and not ranks.killed
