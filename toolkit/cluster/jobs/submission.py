"""Submit a job: create its folder, write its files, submit it to the backend and record its ID.

<run.dir>/jobs/001/{config.yaml, the backend's own files, job.json}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.cluster.jobs import backends
from toolkit.cluster.jobs.job import (
    RECORD_FILE,
    JobId,
    JobState,
    TrainingJob,
    convert_write_errors,
    create_job_folder,
    jobs_folder,
    list_job_numbers,
    write_files,
)
from toolkit.cluster.jobs.requeue import JobBaseline, read_baseline
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import ConfigError, Problem
from toolkit.files import write_whole
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.lock import acquire_lock

ONE_JOB = "a run has one job at a time"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """``job.json``: the submitted job and the state of the run before it."""

    id: JobId
    name: str
    submitted: str  # local time with UTC offset
    before: JobBaseline


def submit(job: TrainingJob) -> tuple[TrainingJob, JobId]:
    """Submit ``job`` and return it, possibly with a higher number.

    Raises:
        ConfigError: an earlier job of the run is active, or the backend cannot run this one; nothing is
            written.
        InputError: the backend rejects the job; its folder stays, with the rendered files.
    """
    backend, run_dir = backends.get_backend(job.config.cluster.where), Path(job.run_dir)
    backend.render(job)  # raises before a folder is created
    RunDirectory(run_dir).check(job.config)
    with _lock_submission(run_dir):
        check_no_active_job(run_dir)
        before = read_baseline(run_dir)
        job = create_job_folder(job)
        write_files(job, backend.render(job))
        id = backend.submit(job)
        record = JobRecord(id, job.name, time.strftime("%Y-%m-%dT%H:%M:%S%z"), before)
        write_whole(job.folder / RECORD_FILE, json.dumps(_to_json(record), indent=1) + "\n")
    return job, id


@contextmanager
def _lock_submission(run_dir: Path) -> Iterator[None]:
    """Lock the run's jobs, since two simultaneous submissions would both find no active job."""
    with convert_write_errors(run_dir):
        jobs_folder(run_dir).mkdir(parents=True, exist_ok=True)
        descriptor, owner = acquire_lock(jobs_folder(run_dir) / "lock")
    if descriptor is None:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        raise ConfigError(
            Problem(
                "run.dir",
                f"run.dir={run_dir}, for which {who} is submitting a job",
                ONE_JOB,
                "wait for it, or give this run its own run.name or run.dir",
            )
        )
    try:
        yield
    finally:
        os.close(descriptor)


def _to_json(record: JobRecord) -> dict[str, Any]:
    return {**asdict(record), "id": {"where": record.id.where.value, "id": record.id.id}}


def read_record(folder: Path) -> JobRecord | None:
    """Read ``job.json``; None if the job has not been submitted yet."""
    file = folder / RECORD_FILE
    if not file.exists():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    return JobRecord(
        JobId(ClusterBackend(record["id"]["where"]), record["id"]["id"]),
        record["name"],
        record["submitted"],
        JobBaseline(**record["before"]),
    )


def find_last_job(run_dir: Path) -> tuple[int, JobRecord] | None:
    """Return the number and record of the run's newest submitted job."""
    for number in reversed(list_job_numbers(run_dir)):
        record = read_record(jobs_folder(run_dir) / f"{number:03d}")
        if record is not None:
            return number, record
    return None


def check_no_active_job(run_dir: Path) -> None:
    """Raise ConfigError if a job of the run is active: two jobs would wait for each other's directory."""
    last = find_last_job(run_dir)
    if last is None:
        return
    number, record = last
    state = backends.get_backend(record.id.where).state(record.id)
    if state is not JobState.ENDED:
        known = f"{record.id.where.value} {record.id.id}"
        raise ConfigError(
            Problem(
                "run.dir",
                f"run.dir={run_dir}, whose job {number} ({known}) is {state.value}",
                ONE_JOB,
                "wait for it, cancel it, or give this run its own run.name or run.dir",
            )
        )
