"""Jobs: a frozen configuration and planned machines, equal on every backend."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cluster.attempt.attempt_spec import load_config, start_attempt
from toolkit.cluster.jobs import backends, submission
from toolkit.cluster.jobs.job import (
    FROZEN,
    JobId,
    JobState,
    TrainingJob,
    create_job,
    create_job_folder,
    plan_job,
    write_files,
)
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.config.cluster import ClusterBackend
from toolkit.config.compose import compose, from_yaml
from toolkit.config.keys import flatten
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, UserError
from toolkit.plan.types import Device

HERE = MachineInfo(cores=2)
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


def job_of(*words: str, here: Path = Path("/home/u")) -> TrainingJob:
    return create_job(plan_job(compose([EXPERIMENT, *words]), HERE), "/repo/launch/train.py", here=here)


@pytest.mark.parametrize("where", ELSEWHERE)
def test_backends_differ_only_in_cluster_and_run_dir(where: str) -> None:
    words = ("zero=stage1", "train.steps=7")
    base = flatten(compose([EXPERIMENT, *words]))
    job = job_of(*words, *ELSEWHERE[where])
    frozen = flatten(from_yaml(job.yaml))
    assert {name for name in base if base[name] != frozen.get(name)} <= {
        "run.dir",
        *(key for key in base if key.startswith("cluster.")),
    }
    assert frozen["cluster.where"] is ClusterBackend[where]


def test_every_backend_implements_the_protocol() -> None:
    assert all(
        callable(getattr(backends.get_backend(ClusterBackend.slurm), name))
        for name in ("render", "argv", "submit", "state", "cancel")
    )


def test_job_world_comes_from_cluster_keys() -> None:
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


def test_remote_job_needs_gpus_per_node() -> None:
    with pytest.raises(ConfigError, match=r"without cluster\.gpus_per_node"):
        job_of("cluster=slurm")


def test_refused_plan_gives_no_job() -> None:
    with pytest.raises(UserError, match=r"parallel\.tensor"):
        job_of(
            "cluster=slurm",
            "cluster.nodes=2",
            "cluster.gpus_per_node=8",
            "engine=megatron",
            "parallel.tensor=3",
        )


def test_run_dir_is_absolute_except_in_containers() -> None:
    assert (
        job_of("cluster=slurm", "cluster.gpus_per_node=0", "run.dir=out/a").config.run.dir == "/home/u/out/a"
    )
    assert job_of(*ELSEWHERE["kubernetes"], "run.dir=out/a").config.run.dir == "out/a"
    assert job_of(*ELSEWHERE["slurm"], "run.dir=/scratch/a").folder == Path("/scratch/a/jobs/001")


def test_multiline_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match="printable"):
        job_of(*ELSEWHERE["slurm"], "run.dir='a\nb'")


def test_concurrent_processes_get_distinct_job_folders(tmp_path: Path) -> None:
    job = job_of(*ELSEWHERE["slurm"], here=tmp_path)
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda: taken.append(create_job_folder(job).number)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 17))


# ---- submission


class Stand:
    """A backend that only records submissions."""

    def __init__(self) -> None:
        self.submitted: list[TrainingJob] = []
        self.now = JobState.QUEUED

    def render(self, job: TrainingJob) -> dict[str, str]:
        return {"config.yaml": job.yaml, "words.txt": " ".join(job.command())}

    def submit(self, job: TrainingJob) -> JobId:
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
    monkeypatch.setattr(backends, "get_backend", lambda where: own)
    return own


def test_second_active_job_is_rejected(stand: Stand, tmp_path: Path) -> None:
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
    assert submission.find_last_job(Path(job.run_dir)) == (2, submission.read_record(second.folder))


def test_concurrent_submission_is_rejected(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(*ELSEWHERE["slurm"], here=tmp_path)
    inner = stand.submit

    def while_it_takes_the_job(item: TrainingJob) -> JobId:
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* is submitting a job"):
            submission.submit(job)
        return inner(item)

    monkeypatch.setattr(stand, "submit", while_it_takes_the_job)
    assert submission.submit(job)[0].number == 1
    assert len(stand.submitted) == 1


def test_directory_of_another_run_is_rejected_before_submission(stand: Stand, tmp_path: Path) -> None:
    job = job_of(*ELSEWHERE["slurm"], f"run.dir={tmp_path}/run")
    other = compose([EXPERIMENT, "optim.lr=1"])
    (tmp_path / "run" / "attempts" / "001").mkdir(parents=True)
    from toolkit.config.compose import to_yaml

    (tmp_path / "run" / "config.yaml").write_text(to_yaml(other))
    with pytest.raises(ConfigError, match="contains another run"):
        submission.submit(job)
    assert not (tmp_path / "run" / "jobs").exists()
    assert not stand.submitted


# ---- frozen


@pytest.fixture
def frozen(tmp_path: Path) -> TrainingJob:
    job = create_job_folder(job_of(f"run.dir={tmp_path}/run", "train.steps=7"))
    write_files(job, {"config.yaml": job.yaml})
    return job


def test_frozen_configuration_is_used_unchanged(frozen: TrainingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> RunConfig:
        raise AssertionError("no further arguments")

    monkeypatch.setattr("toolkit.config.compose.compose", never)
    monkeypatch.setattr("toolkit.plan.pretrained.resolve", never)
    start, plan, directory = start_attempt([f"{FROZEN}{frozen.config_file}"], Launch(), HERE)
    assert plan.config == frozen.config
    assert start.yaml == frozen.yaml
    assert directory.config_file.read_text() == frozen.yaml
    directory.release()


def test_frozen_configuration_takes_no_overrides(frozen: TrainingJob) -> None:
    with pytest.raises(ConfigError, match=r"no further arguments") as raised:
        load_config([f"{FROZEN}{frozen.config_file}", "train.steps=8"], Launch())
    assert "remove train.steps=8" in str(raised.value)


@pytest.mark.parametrize("text", [None, "a: [", "train: {stepps: 3}\n"])
def test_invalid_frozen_file_is_rejected(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError):
        load_config([f"{FROZEN}{path}"], Launch())


def test_missing_frozen_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml"):
        load_config([f"{FROZEN}{tmp_path}/absent.yaml"], Launch())


def test_plain_python_rejects_remote_cluster(frozen: TrainingJob) -> None:
    words = [EXPERIMENT, *ELSEWHERE["slurm"]]
    with pytest.raises(ConfigError, match=r"launch\.submit"):
        load_config(words, Launch())
    assert (
        load_config(words, Launch(launcher=Launcher.TORCHELASTIC)).cluster.where is ClusterBackend.slurm
    )  # a user's own script
    job = replace(frozen, config=compose(words))
    write_files(job, {"config.yaml": job.yaml})
    assert (
        load_config([f"{FROZEN}{frozen.config_file}"], Launch()).cluster.where is ClusterBackend.slurm
    )  # it has been submitted
