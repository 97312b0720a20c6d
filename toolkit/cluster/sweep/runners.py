"""Run points: as a process on this machine with its own GPUs or cores, or as a job in a cluster's queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from toolkit.cluster.jobs import backends, submission
from toolkit.cluster.jobs.backends import local
from toolkit.cluster.jobs.job import JobId, JobState, create_job, create_job_folder, write_files
from toolkit.cluster.sweep.points import SweepPoint
from toolkit.cluster.sweep.resources import Reservation, ResourcePool, compute_resources
from toolkit.cluster.sweep.store import is_done
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import InputError

KILL_SECONDS = 30.0  # in addition to the grace period: launchers end after their ranks
FILE_SECONDS = 1.0  # poll interval of a queued job's status.json
QUEUE_SECONDS = 5.0  # minimum poll interval of a queued job's state
MIN_POLL_GAP_SECONDS = 0.5  # minimum interval between two such polls of any job
OUTPUT_TAIL = 2000  # characters of a process's output, if it left no status


class PointHandle(Protocol):
    """A point that has been started."""

    def ended(self) -> bool: ...

    def stop(self, number: signal.Signals) -> bool:
        """Make the point save and end, after this process received signal ``number``. False: it keeps
        running.
        """

    def end_message(self) -> str | None:
        """Describe its end if it left no status."""


class PointRunner(Protocol):
    def start(self, point: SweepPoint, claim: int) -> PointHandle | None:
        """Start the point; None if resources are not free now. Raises InputError if it cannot start."""


class LocalPoint:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        output: Path,
        reservation: Reservation,
        pool: ResourcePool,
        grace_seconds: float,
    ) -> None:
        self._process, self._output, self._reservation, self._pool = process, output, reservation, pool
        self._grace_seconds = grace_seconds
        self._kill_at: float | None = None

    def ended(self) -> bool:
        if self._process.poll() is None:
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                with suppress(ProcessLookupError):
                    self._process.kill()  # its ranks notice this and exit
            return False
        self._pool.release(self._reservation)
        return True

    def stop(self, number: signal.Signals) -> bool:
        self._kill_at = time.monotonic() + self._grace_seconds + KILL_SECONDS
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        return True

    def end_message(self) -> str | None:
        code = self._process.returncode
        end = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        printed = self._output.read_text(encoding="utf-8", errors="replace")[-OUTPUT_TAIL:].strip()
        return f"{end}: {printed}" if printed else end


class LocalRunner:
    """Runs points as processes on this machine.

    Args:
        points: number of points to run at a time, resources permitting.
    """

    def __init__(
        self, script: str, machine: MachineInfo, points: int, pool: ResourcePool | None = None
    ) -> None:
        self._script, self._machine, self._points = script, machine, points
        self._pool = pool or ResourcePool(machine)

    def start(self, point: SweepPoint, claim: int) -> PointHandle | None:
        assert point.plan is not None
        needed = compute_resources(point.plan, self._machine, self._points)
        reservation = self._pool.acquire(needed)
        if reservation is None:
            return None
        try:
            job = create_job_folder(create_job(point.plan, self._script))
            write_files(job, local.render(job))
            with _cpu_affinity(reservation.cores):
                process = local.start_process(
                    job, reservation.build_environ(needed, os.environ), keep=(claim, *reservation.locks)
                )
        except BaseException:
            self._pool.release(reservation)
            raise
        return LocalPoint(
            process,
            job.folder / local.OUTPUT,
            reservation,
            self._pool,
            point.plan.config.cluster.grace_seconds,
        )


@contextmanager
def _cpu_affinity(cores: tuple[int, ...]) -> Iterator[None]:
    """Restrict processes that are started within to these cores; they inherit the affinity of this thread."""
    last = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, last)


class QueuedPoint:
    """A job in a cluster's queue. It outlives this process; the next one finds it again by its
    ``job.json``.
    """

    def __init__(self, id: JobId, point: SweepPoint, runner: QueueRunner) -> None:
        self._id, self._point, self._runner = id, point, runner
        self._file_at = time.monotonic()
        self._queue_at = self._file_at + QUEUE_SECONDS
        runner.jobs += 1

    def ended(self) -> bool:
        now = time.monotonic()
        if now < self._file_at:
            return False
        self._file_at = now + FILE_SECONDS
        if is_done(self._point):
            return self._over()
        if now < self._queue_at:
            return False
        self._queue_at = now + max(QUEUE_SECONDS, self._runner.jobs * MIN_POLL_GAP_SECONDS)
        with suppress(InputError):  # the cluster does not respond; the job may still be running
            if backends.get_backend(self._id.where).state(self._id) is JobState.ENDED:
                return self._over()
        return False

    def _over(self) -> bool:
        self._runner.jobs -= 1
        return True

    def stop(self, number: signal.Signals) -> bool:
        """Cancel the job on Ctrl-C; leave it in the queue after any other signal, such as a closed
        terminal. If the cluster does not respond, it stays too.
        """
        if number is not signal.SIGINT:
            return False
        try:
            backends.get_backend(self._id.where).cancel(self._id)
        except InputError as error:
            print(error, file=sys.stderr)
            return False
        self._queue_at = time.monotonic() + FILE_SECONDS  # it ends soon, and the user is waiting
        return True

    def end_message(self) -> str | None:
        return f"{self._id.where.value} job {self._id.id} ended without a status"


class QueueRunner:
    """Runs points as jobs in a cluster's queue.

    Attributes:
        jobs: number of jobs being waited for; the more there are, the less often each is polled.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self.jobs = 0

    def start(self, point: SweepPoint, claim: int) -> PointHandle | None:
        assert point.plan is not None
        run_dir = Path(point.plan.run_dir)
        last = submission.find_last_job(run_dir)
        if (
            last is not None
            and backends.get_backend(last[1].id.where).state(last[1].id) is not JobState.ENDED
        ):
            return QueuedPoint(last[1].id, point, self)
        return QueuedPoint(submission.submit(create_job(point.plan, self._script))[1], point, self)


def make_runner(where: ClusterBackend, script: str, machine: MachineInfo, points: int) -> PointRunner:
    return LocalRunner(script, machine, points) if where is ClusterBackend.local else QueueRunner(script)
