"""A real Slurm on loopback: jobs of ``launch/submit.py`` train on two nodes, are stopped, preempted,
cancelled, and resume.

    apt-get install slurmctld slurmd slurm-client munge; pytest tests/launch/test_slurm.py -m full -rs
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.processes import FAKE, ROOT, TRAIN, command, read_status
from tests.launch.slurm import Slurm, loopback_slurm, missing
from tests.waiting import wait_until
from toolkit.cluster.jobs import submission
from toolkit.cluster.jobs.backends import slurm as backend
from toolkit.cluster.jobs.job import JobId, JobState, TrainingJob, create_job, plan_job
from toolkit.config.compose import compose
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NODES = ("cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=0", "cluster.grace_seconds=30")
SMALL = (
    "+exp=quickstart",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "zero=stage2",
    "checkpoint.every=never",
    "eval.every=0",
    "monitor=files",
    "monitor.every=1",
)
STEPS = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    why = missing()
    if why is not None:
        pytest.skip(f"no job ran in a real Slurm: {why}")
    with loopback_slurm(tmp_path_factory.mktemp("slurm")) as own:
        yield own


@pytest.fixture(autouse=True)
def around(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(slurm, monkeypatch)
    monkeypatch.chdir(tmp_path)


def log_in(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a login shell."""
    for name, value in {
        **slurm.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FAKE_STEP_SECONDS": "0.05",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, JobId]:
    """A job that reaches its time limit while the other tests run, on a node that they do not use."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        log_in(slurm, monkeypatch)
        words = ("train.steps=100000", 'cluster.slurm.time="2"', "cluster.slurm.partition=aside")
        return submission.submit(
            fake_job(tmp_path_factory.mktemp("limited") / "run", *words, grace_seconds=5)
        )


def steps_of(directory: RunDirectory, attempt: int) -> int:
    """Number of metrics rows since ``attempt`` began; 0 before it."""
    status = directory.status()
    if (
        status is None
        or status.attempt != attempt
        or not status.state.live
        or not directory.metrics_file.exists()
    ):
        return 0
    return directory.metrics_file.read_text().count("\n")


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_preempted_slurm_job_matches_uninterrupted_run(slurm: Slurm, tmp_path: Path) -> None:
    run_dir, data = tmp_path / "it's a run", f"data.path={tmp_path / 'data'}"
    words = [*SMALL, data, f"train.steps={STEPS}"]
    subprocess.run(
        command("python", TRAIN, *words, f"run.dir={tmp_path / 'unbroken'}"),
        cwd=tmp_path,
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )

    submit = [sys.executable, str(ROOT / "launch" / "submit.py"), *words, *NODES, f'run.dir="{run_dir}"']
    shown = subprocess.run(
        [*submit, "dry_run=true"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert not run_dir.exists()
    subprocess.run(submit, check=True, timeout=60)
    found = submission.find_last_job(run_dir)
    assert found is not None
    number, record = found
    folder, id = run_dir / "jobs" / f"{number:03d}", record.id
    for name in ("config.yaml", "job.sh"):
        assert (folder / name).read_text().strip() in shown  # exactly the printed command
    output, directory = folder / "output.txt", RunDirectory(run_dir)

    # As before a time limit: only the batch script is signalled.
    wait_until(lambda: steps_of(directory, 1) > 5, 120, "training", output=output)
    slurm.run("scancel", "--batch", "--signal=TERM", id.id)
    wait_until(lambda: slurm.job_state(id.id) == "PENDING", 60, "requeued", output=output)
    stopped = directory.status()
    assert stopped is not None
    assert (stopped.state, stopped.exit_code) == (RunState.STOPPED, 75), output.read_text()
    assert stopped.step is not None
    assert 0 < stopped.step < STEPS
    assert backend.state(id) is JobState.QUEUED

    # Preempted by Slurm for an urgent job: its tasks are signalled, with the partition's grace time.
    wait_until(lambda: steps_of(directory, 2) > stopped.step + 3, 120, "going on", output=output)
    everything = ("--partition=urgent", "--nodes=2", "--exclusive")
    urgent = slurm.run("sbatch", "--parsable", *everything, "--output=/dev/null", "--wrap=sleep 1").strip()
    wait_until(
        lambda: slurm.job_state(urgent) == "COMPLETED", 120, "the urgent job carried out", output=output
    )

    wait_until(lambda: (read_status(run_dir) or stopped).state is RunState.DONE, 200, "done", output=output)
    wait_until(lambda: slurm.job_state(id.id) == "COMPLETED", 30, "shown as completed", output=output)
    end = read_status(run_dir)
    assert end is not None
    assert (end.attempt, end.step, end.exit_code) == (3, STEPS, 0)
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "unbroken"), abs=1e-6)
    assert losses(run_dir)[stopped.step] != pytest.approx(
        losses(run_dir)[stopped.step - 1], abs=1e-6
    )  # control: a shift by one step is detected


def fake_job(run_dir: Path, *words: str, grace_seconds: int = 30) -> TrainingJob:
    """On one node, with a fake training."""
    where = ("cluster=slurm", "cluster.gpus_per_node=0", f"cluster.grace_seconds={grace_seconds}")
    return create_job(plan_job(compose(["+exp=quickstart", *where, f"run.dir={run_dir}", *words])), FAKE)


def fake_steps(directory: RunDirectory) -> int:
    status = directory.status()
    return 0 if status is None else status.step or 0


@pytest.mark.parametrize("by", ["cancel", "scancel"])
def test_cancelled_slurm_job_is_not_requeued(
    by: str, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SAVE_SECONDS", "1")
    job, id = submission.submit(fake_job(tmp_path / "run", "train.steps=100000"))
    output, directory = job.folder / "output.txt", RunDirectory(job.run_dir)
    wait_until(lambda: fake_steps(directory) > 2, 60, "running", output=output)
    if by == "cancel":
        backend.cancel(id)
    else:
        slurm.run("scancel", id.id)
    wait_until(lambda: backend.state(id) is JobState.ENDED, 60, "ended", output=output)
    assert slurm.job_state(id.id) == {"cancel": "FAILED", "scancel": "CANCELLED"}[by]
    end = directory.status()
    assert end is not None
    assert (end.state, end.attempt, end.checkpoint) == (RunState.STOPPED, 1, "saved"), output.read_text()


def test_pending_slurm_job_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    job, id = submission.submit(fake_job(tmp_path / "run", "cluster.slurm.options={hold: ''}"))
    assert backend.state(id) is JobState.QUEUED
    backend.cancel(id)
    assert backend.state(id) is JobState.ENDED
    assert not (Path(job.run_dir) / "attempts").exists()


def test_slurm_job_with_mistake_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    """Another process holds the lock of the run directory when the job starts."""
    job = fake_job(tmp_path / "run", "train.steps=2")
    held = RunDirectory(job.run_dir)
    held.begin(job.config, {})
    job, id = submission.submit(job)
    wait_until(lambda: backend.state(id) is JobState.ENDED, 60, "ended", output=job.folder / "output.txt")
    assert slurm.job_state(id.id) == "FAILED"
    assert "in which process" in (job.folder / "output.txt").read_text()
    ends = [json.loads(line) for line in (job.folder / "ends.jsonl").read_text().splitlines()]
    assert [(end["next"], end["code"]) for end in ends] == [("end", 2)]
    held.release()


def test_sbatch_error_is_reported(slurm: Slurm, tmp_path: Path) -> None:
    submit = [
        sys.executable,
        str(ROOT / "launch" / "submit.py"),
        "+exp=quickstart",
        *NODES,
        f"run.dir={tmp_path / 'run'}",
        "cluster.slurm.partition=nowhere",
    ]
    done = subprocess.run(submit, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "invalid partition" in done.stderr
    assert "Traceback" not in done.stderr


def test_slurm_job_saves_and_requeues_before_time_limit(
    slurm: Slurm, limited: tuple[TrainingJob, JobId]
) -> None:
    """sbatch(1), --signal: the signal may come up to a minute early."""
    job, id = limited
    output, ends = job.folder / "output.txt", job.folder / "ends.jsonl"
    wait_until(lambda: ends.exists() and ends.read_text().endswith("\n"), 150, "is signalled", output=output)
    end = json.loads(ends.read_text().splitlines()[0])
    assert (end["asked"], end["attempt"], end["state"], end["reason"], end["next"]) == (
        "TERM",
        1,
        "stopped",
        "SIGTERM",
        "again",
    )
    wait_until(
        lambda: "Restarts=0" not in slurm.run("scontrol", "--oneliner", "show", "job", id.id),
        30,
        "requeued",
        output=output,
    )
    times = json.loads((RunDirectory(job.run_dir).attempt_folder(1) / "times.json").read_text())
    assert times["ended"] - times["began"] < 120
    backend.cancel(id)
