"""Run jobs on this machine: a background process that supervises its ranks (cluster/supervisor.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from signal import SIGTERM

from toolkit.cluster.jobs.job import CONFIG_FILE, JobId, JobState, TrainingJob
from toolkit.cluster.stop.stop_request import ProcessHandle
from toolkit.commands import inherited_form
from toolkit.config.cluster import ClusterBackend

OUTPUT = "output.txt"


def render(job: TrainingJob) -> dict[str, str]:
    return {CONFIG_FILE: job.yaml}


def argv(job: TrainingJob) -> list[str]:
    return [sys.executable, "-u", *job.command()]


def start_process(
    job: TrainingJob, environ: Mapping[str, str] = os.environ, keep: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the job as a process in a new session, which may outlive this one; its output is appended to
    ``output.txt``.

    Args:
        environ: a sweep sets CUDA_VISIBLE_DEVICES for each point.
        keep: file descriptors that the process inherits, such as a sweep's locks.
    """
    with (job.folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            argv(job),
            env={**environ, **inherited_form()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep),
        )


def submit(job: TrainingJob) -> JobId:
    return job_id(start_process(job))


def job_id(process: subprocess.Popen[bytes]) -> JobId:
    """Return the PID and start time, so that a reused PID is not mistaken for the job."""
    started_process = ProcessHandle.read(process.pid)
    return JobId(
        ClusterBackend.local,
        f"{process.pid}:{started_process.started if started_process is not None else ''}",
    )


def state(id: JobId) -> JobState:
    return JobState.RUNNING if _process(id).is_alive() else JobState.ENDED


def cancel(id: JobId) -> None:
    process = _process(id)
    if process.is_alive():
        os.kill(process.pid, SIGTERM)


def _process(id: JobId) -> ProcessHandle:
    pid, _, started = id.id.partition(":")
    return ProcessHandle(int(pid), started)
