"""Sweep runners: reserving resources of a machine, and jobs in a queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.sweep_points import EIGHT, GIB, LAPTOP, TRAIN, points
from toolkit.cluster.jobs import backends
from toolkit.cluster.jobs.job import JobId, JobState, TrainingJob
from toolkit.cluster.sweep import runners
from toolkit.cluster.sweep.resources import ResourcePool, compute_resources
from toolkit.cluster.sweep.runners import LocalRunner, QueueRunner
from toolkit.config.cluster import ClusterBackend
from toolkit.errors import InputError, Problem
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

# -- resources of a machine


def test_points_use_distinct_gpus(tmp_path: Path) -> None:
    [point] = points(
        "+exp=quickstart", "cluster.gpus_per_node=3", "train.global_batch=24", machine=EIGHT, folder=tmp_path
    )
    need = compute_resources(point.plan, EIGHT, points=5)
    assert (point.plan.world.ranks, need.gpus, need.threads) == (3, 3, 8)
    slots, other = ResourcePool(EIGHT, tmp_path / "slots"), ResourcePool(EIGHT, tmp_path / "slots")
    first, second = slots.acquire(need), other.acquire(need)
    assert first is not None
    assert second is not None
    assert first.build_environ(need, {"A": "b"}) == {
        "A": "b",
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1,GPU-2",
        "OMP_NUM_THREADS": "8",
    }
    assert second.build_environ(need, {"OMP_NUM_THREADS": "2"}) == {
        "CUDA_VISIBLE_DEVICES": "GPU-3,GPU-4,GPU-5",
        "OMP_NUM_THREADS": "2",
    }
    assert slots.acquire(need) is None, "two are left"
    assert slots.acquire(replace(need, gpus=2)) is not None, "and were not reserved by the failed attempt"
    other.release(second)
    assert slots.acquire(need) is not None


def test_orphan_keeps_its_resources_reserved(tmp_path: Path) -> None:
    slots = ResourcePool(EIGHT, tmp_path)
    need = replace(
        compute_resources(points("+exp=quickstart", machine=EIGHT, folder=tmp_path)[0].plan, EIGHT, 1),
        host_bytes=0,
    )
    place = slots.acquire(need)
    assert place is not None
    assert len(place.gpus) == 8
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=place.locks)
    slots.release(place)
    assert slots.acquire(need) is None
    orphan.kill()
    orphan.communicate()
    assert slots.acquire(need) is not None


def test_failed_start_releases_resources(tmp_path: Path) -> None:
    [point] = points("+exp=quickstart", machine=EIGHT, folder=tmp_path)
    (tmp_path / "file").touch()
    plan = replace(point.plan, run_dir=str(tmp_path / "file" / "run"))
    slots = ResourcePool(EIGHT, tmp_path / "slots")
    carrier = LocalRunner(TRAIN, EIGHT, 1, slots)
    with pytest.raises(InputError, match=r"run\.dir"):
        carrier.start(replace(point, plan=plan), claim=0)
    assert slots.acquire(compute_resources(point.plan, EIGHT, 1)) is not None, "all eight are free"


def test_lock_folder_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ResourcePool(EIGHT, tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(InputError, match="belongs to user"):
        ResourcePool(EIGHT, tmp_path)


def test_cpu_points_share_cores_and_host_memory(tmp_path: Path) -> None:
    item, two = points("+exp=quickstart", "engine.name=deepspeed", "cluster.cpu_ranks=1,2", folder=tmp_path)
    assert [compute_resources(item.plan, LAPTOP, count).cores for count in (1, 2, 4, 8)] == [4, 2, 1, 1]
    assert [compute_resources(two.plan, LAPTOP, count).cores for count in (1, 2, 4)] == [4, 2, 2]
    assert (
        compute_resources(two.plan, LAPTOP, 2).threads,
        compute_resources(item.plan, LAPTOP, 2).threads,
    ) == (1, 2)
    [written] = points("+exp=quickstart", "debug.threads=3", folder=tmp_path)
    assert (
        compute_resources(written.plan, LAPTOP, 4).cores,
        compute_resources(written.plan, LAPTOP, 4).threads,
    ) == (3, 3)
    need = replace(compute_resources(item.plan, LAPTOP, 4), cores=0, host_bytes=9 * GIB)
    slots = ResourcePool(LAPTOP, tmp_path / "slots")
    assert slots.acquire(need) is not None
    assert slots.acquire(need) is None, "18 of 16 GiB"
    assert slots.acquire(replace(need, host_bytes=7 * GIB)) is not None


# -- queued points


class Queue:
    """A backend whose job states are set by the test."""

    def __init__(self) -> None:
        self.submitted: list[TrainingJob] = []
        self.cancelled: list[JobId] = []
        self.state_of = JobState.RUNNING
        self.responds = True
        self.asked = 0

    def render(self, job: TrainingJob) -> dict[str, str]:
        return {"config.yaml": job.yaml}

    def submit(self, job: TrainingJob) -> JobId:
        self.submitted.append(job)
        return JobId(ClusterBackend.slurm, str(len(self.submitted)))

    def state(self, id: JobId) -> JobState:
        self.asked += 1
        self._respond("squeue")
        return self.state_of

    def cancel(self, id: JobId) -> None:
        self._respond("scancel")
        self.cancelled.append(id)

    def _respond(self, command: str) -> None:
        if not self.responds:
            raise InputError(Problem("cluster", command, "it answers", "look"))


def test_queued_point_is_submitted_once_and_ends_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue()
    monkeypatch.setattr(backends, "get_backend", lambda where: queue)
    monkeypatch.setattr(runners, "FILE_SECONDS", 0.0)
    monkeypatch.setattr(runners, "QUEUE_SECONDS", 0.0)
    monkeypatch.setattr(runners, "MIN_POLL_GAP_SECONDS", 0.0)
    [made] = points("+exp=quickstart", "cluster=slurm", "cluster.gpus_per_node=0", folder=tmp_path)
    point = replace(made, plan=replace(made.plan, run_dir=str(tmp_path / made.name)))
    handle = QueueRunner(TRAIN).start(point, claim=0)
    again = QueueRunner(TRAIN).start(point, claim=0)
    assert handle is not None
    assert again is not None
    assert len(queue.submitted) == 1, "another process finds the job and submits nothing"
    assert not again.ended()
    queue.responds = False
    assert not again.ended(), "an unresponsive cluster does not end the job"
    assert not again.stop(signal.SIGINT), "and cannot cancel it, which must not keep other jobs from it"
    assert "scancel" in capsys.readouterr().err
    queue.responds = True
    assert not again.stop(signal.SIGHUP), "a closed terminal leaves it"
    assert not queue.cancelled
    assert again.stop(signal.SIGINT)
    assert [id.id for id in queue.cancelled] == ["1"]
    directory, asked = RunDirectory(tmp_path / made.name), queue.asked
    directory.write_status(Status(state=RunState.DONE, attempt=1, step=point.plan.config.train.steps))
    assert handle.ended()
    assert queue.asked == asked, "its status is enough"
    directory.write_status(Status(state=RunState.DONE, attempt=1, step=1))
    queue.state_of = JobState.RUNNING
    later = QueueRunner(TRAIN).start(point, claim=0)
    assert later is not None
    assert not later.ended(), "done with fewer steps than requested now"
    queue.state_of = JobState.ENDED
    assert later.ended()
