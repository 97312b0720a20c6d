"""Who carries points out: what they take of a machine, and jobs in a queue.

pytest tests/cluster/test_carriers.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.sweeping import EIGHT, GIB, LAPTOP, TRAIN, points
from toolkit.cluster import backends
from toolkit.cluster.job import Job, JobId, JobState
from toolkit.cluster.sweep import carriers
from toolkit.cluster.sweep.carriers import LocalCarrier, QueueCarrier
from toolkit.cluster.sweep.slots import Slots, need_of
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import InputError, Problem
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

# -- room on a machine


def test_points_share_gpus_and_never_the_same_one(tmp_path: Path) -> None:
    [point] = points(
        "+exp=quickstart", "cluster.gpus_per_node=3", "train.global_batch=24", machine=EIGHT, folder=tmp_path
    )
    need = need_of(point.plan, EIGHT, points=5)
    assert (point.plan.world.ranks, need.gpus, need.threads) == (3, 3, 8)
    slots, other = Slots(EIGHT, tmp_path / "slots"), Slots(EIGHT, tmp_path / "slots")
    first, second = slots.take(need), other.take(need)
    assert first is not None
    assert second is not None
    assert first.environ(need, {"A": "b"}) == {
        "A": "b",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2",
        "OMP_NUM_THREADS": "8",
    }
    assert second.environ(need, {"OMP_NUM_THREADS": "2"}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-3,GPU-4,GPU-5",
        "OMP_NUM_THREADS": "2",
    }
    assert slots.take(need) is None, "two are left"
    assert slots.take(replace(need, gpus=2)) is not None, "and were not kept by the attempt"
    other.release(second)
    assert slots.take(need) is not None


def test_what_an_orphan_uses_stays_taken(tmp_path: Path) -> None:
    slots = Slots(EIGHT, tmp_path)
    need = replace(
        need_of(points("+exp=quickstart", machine=EIGHT, folder=tmp_path)[0].plan, EIGHT, 1), host_bytes=0
    )
    place = slots.take(need)
    assert place is not None
    assert len(place.gpus) == 8
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=place.locks)
    slots.release(place)
    assert slots.take(need) is None
    orphan.kill()
    orphan.communicate()
    assert slots.take(need) is not None


def test_a_point_that_cannot_be_started_gives_its_place_back(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", machine=EIGHT, folder=tmp_path)
    (tmp_path / "file").touch()
    plan = replace(point.plan, run_dir=str(tmp_path / "file" / "run"))
    slots = Slots(EIGHT, tmp_path / "slots")
    carrier = LocalCarrier(TRAIN, EIGHT, 1, slots)
    with pytest.raises(InputError, match=r"run\.dir"):
        carrier.start(replace(point, plan=plan), claim=0)
    assert slots.take(need_of(point.plan, EIGHT, 1)) is not None, "all eight are free"


def test_the_locks_of_another_user_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slots(EIGHT, tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(InputError, match="belongs to user"):
        Slots(EIGHT, tmp_path)


def test_cores_are_shared_and_memory_counted(tmp_path: Path) -> None:
    one, two = points("+exp=quickstart", "engine.name=deepspeed", "cluster.cpu_ranks=1,2", folder=tmp_path)
    assert [need_of(one.plan, LAPTOP, count).cores for count in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert [need_of(two.plan, LAPTOP, count).cores for count in (1, 2, 4)] == [4, 2, 2]
    assert (need_of(two.plan, LAPTOP, 2).threads, need_of(one.plan, LAPTOP, 2).threads) == (1, 2)
    [written] = points("+exp=quickstart", "debug.threads=3", folder=tmp_path)
    assert (need_of(written.plan, LAPTOP, 4).cores, need_of(written.plan, LAPTOP, 4).threads) == (3, 3)
    need = replace(need_of(one.plan, LAPTOP, 4), cores=0, host_bytes=9 * GIB)
    slots = Slots(LAPTOP, tmp_path / "slots")
    assert slots.take(need) is not None
    assert slots.take(need) is None, "18 of 16 GiB"
    assert slots.take(replace(need, host_bytes=7 * GIB)) is not None


# -- points in a queue


class Queue:
    """A backend whose jobs are as the test says."""

    def __init__(self) -> None:
        self.submitted: list[Job] = []
        self.cancelled: list[JobId] = []
        self.state_of = JobState.RUNNING
        self.asked = 0

    def render(self, job: Job) -> dict[str, str]:
        return {"config.yaml": job.yaml}

    def submit(self, job: Job) -> JobId:
        self.submitted.append(job)
        return JobId(ClusterBackend.slurm, str(len(self.submitted)))

    def state(self, id: JobId) -> JobState:
        self.asked += 1
        if self.state_of is JobState.QUEUED:
            raise InputError(Problem("cluster", "squeue", "it answers", "look"))
        return self.state_of

    def cancel(self, id: JobId) -> None:
        self.cancelled.append(id)


def test_a_job_of_a_queue_is_handed_over_once_and_is_over_by_its_own_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue()
    monkeypatch.setattr(backends, "of", lambda where: queue)
    monkeypatch.setattr(carriers, "FILE_SECONDS", 0.0)
    monkeypatch.setattr(carriers, "QUEUE_SECONDS", 0.0)
    monkeypatch.setattr(carriers, "BETWEEN_SECONDS", 0.0)
    [made] = points("+exp=quickstart", "cluster=slurm", "cluster.gpus_per_node=0", folder=tmp_path)
    point = replace(made, plan=replace(made.plan, run_dir=str(tmp_path / made.name)))
    handle = QueueCarrier(TRAIN).start(point, claim=0)
    again = QueueCarrier(TRAIN).start(point, claim=0)
    assert handle is not None
    assert again is not None
    assert len(queue.submitted) == 1, "another process finds the job, and hands nothing over"
    assert not again.ended()
    queue.state_of = JobState.QUEUED
    assert not again.ended(), "a cluster that does not answer has not ended the job"
    assert not again.stop(signal.SIGHUP), "a closed terminal leaves it"
    assert not queue.cancelled
    assert again.stop(signal.SIGINT)
    assert [id.id for id in queue.cancelled] == ["1"]
    directory, asked = RunDirectory(tmp_path / made.name), queue.asked
    directory.write_status(Status(state=RunState.DONE, attempt=1, step=point.plan.config.train.steps))
    assert handle.ended()
    assert queue.asked == asked, "its own word is enough"
    directory.write_status(Status(state=RunState.DONE, attempt=1, step=1))
    queue.state_of = JobState.RUNNING
    later = QueueCarrier(TRAIN).start(point, claim=0)
    assert later is not None
    assert not later.ended(), "done with fewer steps than are asked for now"
    queue.state_of = JobState.ENDED
    assert later.ended()
