"""Handing a job over: its folder is taken, its files are written, the backend gets it, and what it is called there is recorded.

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

from toolkit.cluster import backends
from toolkit.cluster.job import (
    RECORD_FILE,
    Job,
    JobId,
    JobState,
    jobs_folder,
    numbers,
    take_folder,
    writable,
    write_files,
)
from toolkit.cluster.requeue import Before, at_submission
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import ConfigError, Problem
from toolkit.files import write_whole
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.lock import lock_file

ONE_JOB = "a run has one job at a time"


@dataclass(frozen=True, slots=True)
class Record:
    """``job.json``: what was handed over, and what there was of the run before."""

    id: JobId
    name: str
    submitted: str  # local time with its offset
    before: Before


def submit(job: Job) -> tuple[Job, JobId]:
    """Hand ``job`` over; it may get a higher number than it had.

    Raises:
        ConfigError: an earlier job of the run waits or runs still, or the backend cannot carry it out; then nothing is written.
        InputError: the backend does not take it; its folder stays, with what was to be submitted.
    """
    backend, run_dir = backends.of(job.config.cluster.where), Path(job.run_dir)
    backend.render(job)  # refused before a folder is taken
    RunDirectory(run_dir).check(job.config)
    with _one_at_a_time(run_dir):
        check_alone(run_dir)
        before = at_submission(run_dir)
        job = take_folder(job)
        write_files(job, backend.render(job))
        id = backend.submit(job)
        record = Record(id, job.name, time.strftime("%Y-%m-%dT%H:%M:%S%z"), before)
        write_whole(job.folder / RECORD_FILE, json.dumps(_to_json(record), indent=1) + "\n")
    return job, id


@contextmanager
def _one_at_a_time(run_dir: Path) -> Iterator[None]:
    """Of two who submit a run at the same moment, both would find that no job of it waits."""
    with writable(run_dir):
        jobs_folder(run_dir).mkdir(parents=True, exist_ok=True)
        descriptor, owner = lock_file(jobs_folder(run_dir) / "lock")
    if descriptor is None:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        raise ConfigError(
            Problem(
                "run.dir",
                f"run.dir={run_dir}, of which {who} is submitting a job",
                ONE_JOB,
                "wait for it, or give this run its own run.name or run.dir",
            )
        )
    try:
        yield
    finally:
        os.close(descriptor)


def _to_json(record: Record) -> dict[str, Any]:
    return {**asdict(record), "id": {"where": record.id.where.value, "id": record.id.id}}


def read_record(folder: Path) -> Record | None:
    """None where the job has not been handed over, or is being so just now."""
    file = folder / RECORD_FILE
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return Record(
        JobId(ClusterBackend(found["id"]["where"]), found["id"]["id"]),
        found["name"],
        found["submitted"],
        Before(**found["before"]),
    )


def last_job(run_dir: Path) -> tuple[int, Record] | None:
    """Of the jobs of a run that were handed over, the newest: its number and record."""
    for number in reversed(numbers(run_dir)):
        record = read_record(jobs_folder(run_dir) / f"{number:03d}")
        if record is not None:
            return number, record
    return None


def check_alone(run_dir: Path) -> None:
    """Two jobs of one run would wait for each other's directory. Raises ConfigError."""
    last = last_job(run_dir)
    if last is None:
        return
    number, record = last
    state = backends.of(record.id.where).state(record.id)
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
