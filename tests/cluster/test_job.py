"""A job is its frozen configuration and the machines it is planned for, the same on every backend.

pytest tests/cluster/test_job.py
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster import backends, submission
from toolkit.cluster.environment import Launch, Launcher
from toolkit.cluster.job import FROZEN, Job, JobId, JobState, make_job, plan_job, take_folder, write_files
from toolkit.cluster.machine import Machine
from toolkit.cluster.start import begin, configuration
from toolkit.config.cluster import ClusterBackend
from toolkit.config.compose import compose, from_yaml
from toolkit.config.keys import flatten
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, UserError
from toolkit.plan.types import Device

HERE = Machine(cores=2)
EXPERIMENT = "+exp=quickstart"
ELSEWHERE = {
    "local": (),
    "slurm": ("cluster=slurm", "cluster.gpus_per_node=0"),
    "kubernetes": (
        "cluster=kubernetes",
        "cluster.gpus_per_node=0",
        "cluster.kubernetes.image=registry.example/toolkit:1",
    ),
}


def job_of(*words: str, here: Path = Path("/home/u")) -> Job:
    return make_job(plan_job(compose([EXPERIMENT, *words]), HERE), "/repo/launch/train.py", here=here)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_the_configuration_is_the_same_but_for_cluster_and_run_dir(where: str) -> None:
    words = ("zero=stage1", "train.steps=7")
    base = flatten(compose([EXPERIMENT, *words]))
    job = job_of(*words, *ELSEWHERE[where])
    frozen = flatten(from_yaml(job.yaml))
    assert {name for name in base if base[name] != frozen.get(name)} <= {
        "run.dir",
        *(key for key in base if key.startswith("cluster.")),
    }
    assert frozen["cluster.where"] is ClusterBackend[where]


def test_every_backend_is_one() -> None:
    assert all(
        callable(getattr(backends.of(ClusterBackend.slurm), name))
        for name in ("render", "argv", "submit", "state", "cancel")
    )


def test_the_world_is_what_is_written_and_not_what_is_here() -> None:
    world = job_of(
        "cluster=slurm", "cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.gpu=h100", "parallel.tensor=2"
    ).world
    assert (world.ranks, world.ranks_per_node, world.nodes, world.device, world.gpu) == (
        32,
        8,
        4,
        Device.CUDA,
        "h100",
    )
    assert world.host_memory_bytes is None


def test_a_job_elsewhere_says_its_gpus() -> None:
    with pytest.raises(ConfigError, match=r"without cluster\.gpus_per_node"):
        job_of("cluster=slurm")


def test_a_plan_that_is_refused_is_no_job() -> None:
    with pytest.raises(UserError, match=r"parallel\.tensor"):
        job_of(
            "cluster=slurm",
            "cluster.nodes=2",
            "cluster.gpus_per_node=8",
            "engine=megatron",
            "parallel.tensor=3",
        )


def test_a_relative_directory_is_written_out_unless_containers_have_their_own() -> None:
    assert (
        job_of("cluster=slurm", "cluster.gpus_per_node=0", "run.dir=out/a").config.run.dir == "/home/u/out/a"
    )
    assert job_of(*ELSEWHERE["kubernetes"], "run.dir=out/a").config.run.dir == "out/a"
    assert job_of(*ELSEWHERE["slurm"], "run.dir=/scratch/a").folder == Path("/scratch/a/jobs/001")


def test_a_name_of_two_lines_is_refused() -> None:
    with pytest.raises(ConfigError, match="printable"):
        job_of(*ELSEWHERE["slurm"], "run.dir='a\nb'")


def test_competing_processes_never_share_a_folder(tmp_path: Path) -> None:
    job = job_of(*ELSEWHERE["slurm"], here=tmp_path)
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.append(take_folder(job).number)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 17))


# ---- handed over


class Stand:
    """A backend that only remembers."""

    def __init__(self) -> None:
        self.submitted: list[Job] = []
        self.now = JobState.QUEUED

    def render(self, job: Job) -> dict[str, str]:
        return {"config.yaml": job.yaml, "words.txt": " ".join(job.command())}

    def submit(self, job: Job) -> JobId:
        assert (
            json.dumps(sorted(path.name for path in job.folder.iterdir())) == '["config.yaml", "words.txt"]'
        )
        self.submitted.append(job)
        return JobId(ClusterBackend.slurm, str(len(self.submitted)))

    def state(self, id: JobId) -> JobState:
        return self.now


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    own = Stand()
    monkeypatch.setattr(backends, "of", lambda where: own)
    return own


def test_a_run_has_one_job_at_a_time(stand: Stand, tmp_path: Path) -> None:
    job = job_of(*ELSEWHERE["slurm"], here=tmp_path)
    first, id = submission.submit(job)
    assert (first.number, id) == (1, JobId(ClusterBackend.slurm, "1"))
    assert from_yaml(first.config_file.read_text()) == first.config
    with pytest.raises(ConfigError, match=r"job 1 \(slurm 1\) is queued"):
        submission.submit(job)
    assert len(stand.submitted) == 1
    stand.now = JobState.ENDED
    second, id = submission.submit(job)
    assert (second.number, id.id) == (2, "2")
    assert submission.last_job(Path(job.run_dir)) == (2, submission.read_record(second.folder))


def test_of_two_who_submit_a_run_at_once_one_is_refused(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(*ELSEWHERE["slurm"], here=tmp_path)
    inner = stand.submit

    def while_it_takes_the_job(one: Job) -> JobId:
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* is submitting a job"):
            submission.submit(job)
        return inner(one)

    monkeypatch.setattr(stand, "submit", while_it_takes_the_job)
    assert submission.submit(job)[0].number == 1
    assert len(stand.submitted) == 1


def test_another_runs_directory_is_refused_before_the_queue(stand: Stand, tmp_path: Path) -> None:
    job = job_of(*ELSEWHERE["slurm"], f"run.dir={tmp_path}/run")
    other = compose([EXPERIMENT, "optim.lr=1"])
    (tmp_path / "run" / "attempts" / "001").mkdir(parents=True)
    from toolkit.config.compose import to_yaml

    (tmp_path / "run" / "config.yaml").write_text(to_yaml(other))
    with pytest.raises(ConfigError, match="holds another run"):
        submission.submit(job)
    assert not (tmp_path / "run" / "jobs").exists()
    assert not stand.submitted


# ---- frozen


@pytest.fixture
def frozen(tmp_path: Path) -> Job:
    job = take_folder(job_of(f"run.dir={tmp_path}/run", "train.steps=7"))
    write_files(job, {"config.yaml": job.yaml})
    return job


def test_a_frozen_configuration_is_taken_as_it_stands(frozen: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> RunConfig:
        raise AssertionError("nothing is composed again")

    monkeypatch.setattr("toolkit.config.compose.compose", never)
    monkeypatch.setattr("toolkit.plan.pretrained.resolve", never)
    start, plan, directory = begin([f"{FROZEN}{frozen.config_file}"], Launch(), HERE)
    assert plan.config == frozen.config
    assert start.yaml == frozen.yaml
    assert directory.config_file.read_text() == frozen.yaml
    directory.release()


def test_nothing_is_composed_with_a_frozen_configuration(frozen: Job) -> None:
    with pytest.raises(ConfigError, match=r"nothing is composed with it") as raised:
        configuration([f"{FROZEN}{frozen.config_file}", "train.steps=8"], Launch())
    assert "leave out train.steps=8" in str(raised.value)


@pytest.mark.parametrize("text", [None, "a: [", "train: {stepps: 3}\n"])
def test_a_file_that_is_no_configuration_is_told(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError):
        configuration([f"{FROZEN}{path}"], Launch())


def test_a_file_that_is_not_there_names_itself(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml"):
        configuration([f"{FROZEN}{tmp_path}/absent.yaml"], Launch())


def test_plain_python_does_not_train_here_what_is_for_elsewhere(frozen: Job) -> None:
    words = [EXPERIMENT, *ELSEWHERE["slurm"]]
    with pytest.raises(ConfigError, match=r"launch/submit\.py"):
        configuration(words, Launch())
    assert (
        configuration(words, Launch(launcher=Launcher.TORCHELASTIC)).cluster.where is ClusterBackend.slurm
    )  # in a script of the user's own
    job = replace(frozen, config=compose(words))
    write_files(job, {"config.yaml": job.yaml})
    assert (
        configuration([f"{FROZEN}{frozen.config_file}"], Launch()).cluster.where is ClusterBackend.slurm
    )  # it has been handed over
