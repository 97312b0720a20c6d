"""Jobs on this machine: a background process identified by its PID and start time."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster.jobs import submission
from toolkit.cluster.jobs.backends import local
from toolkit.cluster.jobs.job import JobId, JobState, TrainingJob, create_job, plan_job
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.config.cluster import ClusterBackend
from toolkit.config.compose import compose
from toolkit.errors import InputError

SCRIPT = """\
import signal, sys, time
print("words", sys.argv[1:], flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    script = tmp_path / "it's a script.py"
    script.write_text(SCRIPT)
    plan = plan_job(compose(["+exp=quickstart", f"run.dir={tmp_path / 'run'}"]), MachineInfo(cores=2))
    return create_job(plan, script)


def until_printed(job: TrainingJob, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in (job.folder / "output.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_local_job_runs_detached_until_cancelled(job: TrainingJob) -> None:
    job, id = submission.submit(job)
    # a hangup of the terminal does not reach it
    assert os.getsid(int(id.id.partition(":")[0])) != os.getsid(0)
    until_printed(job, f"--frozen={job.config_file}")
    assert local.state(id) is JobState.RUNNING
    local.cancel(id)
    until_printed(job, "saved")
    deadline = time.monotonic() + 20
    while local.state(id) is not JobState.ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    local.cancel(id)  # already ended


def test_reused_pid_is_another_job() -> None:
    assert local.state(JobId(ClusterBackend.local, f"{os.getpid()}:1")) is JobState.ENDED


def test_unwritable_job_folder_is_reported(job: TrainingJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Not a directory"):
        submission.submit(replace(job, run_dir=str(tmp_path / "file" / "run")))
