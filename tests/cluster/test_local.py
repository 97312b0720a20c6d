"""A job on this machine is a process in the background, known by its number and its start.

pytest tests/cluster/test_local.py
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster import submission
from toolkit.cluster.backends import local
from toolkit.cluster.job import Job, JobId, JobState, make_job, plan_job
from toolkit.cluster.machine import Machine
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
def job(tmp_path: Path) -> Job:
    script = tmp_path / "it's a script.py"
    script.write_text(SCRIPT)
    plan = plan_job(compose(["+exp=quickstart", f"run.dir={tmp_path / 'run'}"]), Machine(cores=2))
    return make_job(plan, script)


def until_printed(job: Job, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in (job.folder / "output.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_runs_on_by_itself_and_ends_when_it_is_cancelled(job: Job) -> None:
    job, id = submission.submit(job)
    assert os.getsid(int(id.id.partition(":")[0])) != os.getsid(0)  # the terminal's end is not its own
    until_printed(job, f"--frozen={job.config_file}")
    assert local.state(id) is JobState.RUNNING
    local.cancel(id)
    until_printed(job, "saved")
    deadline = time.monotonic() + 20
    while local.state(id) is not JobState.ENDED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    local.cancel(id)  # nothing is left to end


def test_a_later_process_of_the_same_number_is_another_job() -> None:
    assert local.state(JobId(ClusterBackend.local, f"{os.getpid()}:1")) is JobState.ENDED


def test_a_folder_that_cannot_be_made_is_told(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Not a directory"):
        submission.submit(replace(job, run_dir=str(tmp_path / "file" / "run")))
