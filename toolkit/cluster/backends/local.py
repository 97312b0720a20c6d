"""Jobs on this machine: a process in the background, which starts and watches its ranks (cluster/parent.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import SIGTERM

from toolkit.cluster.job import CONFIG_FILE, Job, JobId, JobState
from toolkit.cluster.stop import Process
from toolkit.config.cluster import ClusterBackend

OUTPUT = "output.txt"


def render(job: Job) -> dict[str, str]:
    return {CONFIG_FILE: job.yaml}


def argv(job: Job) -> list[str]:
    return [sys.executable, "-u", *job.command()]


def start(
    job: Job, environ: Mapping[str, str] = os.environ, keep: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """The job as a process of its own session, which this one may outlive or not; what it prints is added to ``output.txt``.

    Args:
        environ: a sweep gives each point its own CUDA_VISIBLE_DEVICES.
        keep: file descriptors that the process inherits: a sweep's locks, which last as long as it does.
    """
    with (job.folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            argv(job),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep),
        )


def submit(job: Job) -> JobId:
    return id_of(start(job))


def id_of(process: subprocess.Popen[bytes]) -> JobId:
    """Its number and its start: a later process with the same number is another job."""
    found = Process.of(process.pid)
    return JobId(ClusterBackend.local, f"{process.pid}:{found.started if found is not None else ''}")


def state(id: JobId) -> JobState:
    return JobState.RUNNING if _process(id).alive() else JobState.ENDED


def cancel(id: JobId) -> None:
    process = _process(id)
    if process.alive():
        os.kill(process.pid, SIGTERM)


def _process(id: JobId) -> Process:
    pid, _, started = id.id.partition(":")
    return Process(int(pid), started)
