"""Who carries out a point: a process on this machine with GPUs or cores of its own, or a job in the queue of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from toolkit.cluster import backends, submission
from toolkit.cluster.backends import local
from toolkit.cluster.job import JobId, JobState, make_job, take_folder, write_files
from toolkit.cluster.machine import Machine
from toolkit.cluster.sweep.points import Point
from toolkit.cluster.sweep.record import is_done
from toolkit.cluster.sweep.slots import Place, Slots, need_of
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import InputError

KILL_SECONDS = 30.0  # after the grace of a stop: launchers end after their ranks
FILE_SECONDS = 1.0  # between two looks at the status.json of a job in a queue
QUEUE_SECONDS = 5.0  # between two questions to a cluster about a job, and
BETWEEN_SECONDS = 0.5  # between two about any
TAIL = 2000  # characters of what a process printed, where that is its only word


class Handle(Protocol):
    """A point under way."""

    def ended(self) -> bool: ...

    def stop(self, number: signal.Signals) -> bool:
        """Ask for a save and an end, once, since this process was asked by ``number``. False: the point is left to itself."""

    def last_words(self) -> str | None:
        """What there is to say of its end besides its status.json."""


class Carrier(Protocol):
    def start(self, point: Point, claim: int) -> Handle | None:
        """None: there is no room now. Raises InputError where it cannot be started."""


class LocalPoint:
    def __init__(
        self, process: subprocess.Popen[bytes], output: Path, place: Place, slots: Slots, grace_seconds: float
    ) -> None:
        self._process, self._output, self._place, self._slots = process, output, place, slots
        self._grace_seconds = grace_seconds
        self._kill_at: float | None = None

    def ended(self) -> bool:
        if self._process.poll() is None:
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                with suppress(ProcessLookupError):
                    self._process.kill()  # its ranks see that it is gone, and leave
            return False
        self._slots.release(self._place)
        return True

    def stop(self, number: signal.Signals) -> bool:
        self._kill_at = time.monotonic() + self._grace_seconds + KILL_SECONDS
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        return True

    def last_words(self) -> str | None:
        code = self._process.returncode
        how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        printed = self._output.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()
        return f"{how}: {printed}" if printed else how


class LocalCarrier:
    """
    Args:
        points: that shall run at a time, if there is room.
    """

    def __init__(self, script: Path, machine: Machine, points: int, slots: Slots | None = None) -> None:
        self._script, self._machine, self._points = script, machine, points
        self._slots = slots or Slots(machine)

    def start(self, point: Point, claim: int) -> Handle | None:
        assert point.plan is not None
        need = need_of(point.plan, self._machine, self._points)
        place = self._slots.take(need)
        if place is None:
            return None
        try:
            job = take_folder(make_job(point.plan, self._script))
            write_files(job, local.render(job))
            with _on(place.cores):
                process = local.start(job, place.environ(need, os.environ), keep=(claim, *place.locks))
        except BaseException:
            self._slots.release(place)
            raise
        return LocalPoint(
            process, job.folder / local.OUTPUT, place, self._slots, point.plan.config.cluster.grace_seconds
        )


@contextmanager
def _on(cores: tuple[int, ...]) -> Iterator[None]:
    """What is started within runs on these cores: a process inherits them from the thread that starts it."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class QueuedPoint:
    """A job of a cluster. It outlives this process, and the next one finds it again by its ``job.json``."""

    def __init__(self, id: JobId, point: Point, carrier: QueueCarrier) -> None:
        self._id, self._point, self._carrier = id, point, carrier
        self._file_at = time.monotonic()
        self._queue_at = self._file_at + QUEUE_SECONDS
        carrier.jobs += 1

    def ended(self) -> bool:
        now = time.monotonic()
        if now < self._file_at:
            return False
        self._file_at = now + FILE_SECONDS
        if is_done(self._point):
            return self._over()
        if now < self._queue_at:
            return False
        self._queue_at = now + max(QUEUE_SECONDS, self._carrier.jobs * BETWEEN_SECONDS)
        with suppress(InputError):  # the cluster does not answer just now: a job is not over for that
            if backends.of(self._id.where).state(self._id) is JobState.ENDED:
                return self._over()
        return False

    def _over(self) -> bool:
        self._carrier.jobs -= 1
        return True

    def stop(self, number: signal.Signals) -> bool:
        """Ctrl-C stops jobs, too. Another end of this process, a closed terminal say, leaves them in the queue."""
        if number is not signal.SIGINT:
            return False
        backends.of(self._id.where).cancel(self._id)
        self._queue_at = time.monotonic() + FILE_SECONDS  # it ends soon, and somebody waits
        return True

    def last_words(self) -> str | None:
        return f"{self._id.where.value} job {self._id.id} ended without a word"


class QueueCarrier:
    """
    Attributes:
        jobs: that are waited for: the more they are, the more rarely the cluster is asked about each.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self.jobs = 0

    def start(self, point: Point, claim: int) -> Handle | None:
        assert point.plan is not None
        run_dir = Path(point.plan.run_dir)
        before = submission.last_job(run_dir)
        if before is not None and backends.of(before[1].id.where).state(before[1].id) is not JobState.ENDED:
            return QueuedPoint(before[1].id, point, self)
        return QueuedPoint(submission.submit(make_job(point.plan, self._script))[1], point, self)


def carrier_of(where: ClusterBackend, script: Path, machine: Machine, points: int) -> Carrier:
    return LocalCarrier(script, machine, points) if where is ClusterBackend.local else QueueCarrier(script)
