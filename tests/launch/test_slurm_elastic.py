"""Elastic jobs in a real Slurm on loopback: a job loses nodes, takes its spare node, and goes on.

apt-get install slurmctld slurmd slurm-client munge; pytest tests/launch/test_slurm_elastic.py -m full -rs
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.processes import ROOT, read_status
from tests.launch.slurm import EVERY, Slurm, loopback_slurm, missing
from tests.launch.test_elastic import KEYS, SAVE_EVERY, train_unbroken
from tests.launch.tiny_runs import read_losses
from tests.waiting import wait_until
from toolkit.checkpoint_folder import committed_checkpoints
from toolkit.cluster.jobs import submission
from toolkit.goodput import AttemptTimes, read_times
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.excluded_hosts import SLURM_JOB, ExcludedHost, exclude_hosts
from toolkit.rundir.snapshot_folder import snapshot_root
from toolkit.rundir.status import RunState

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]

STEPS = 60
SECONDS = 600.0  # a bound on waiting, on a machine that is ten times slower than it should be


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    why = missing()
    if why is not None:
        pytest.skip(f"no job ran in a real Slurm: {why}")
    with loopback_slurm(tmp_path / "slurm") as own:
        paths = {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        for name, value in {**own.environ, **paths}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        yield own


@dataclass(frozen=True)
class ElasticJob:
    slurm: Slurm
    run_dir: Path
    id: str

    @property
    def output(self) -> Path:
        return self.run_dir / "jobs" / "001" / "output.txt"

    def wait_for_step(self, attempt: int, step: int) -> None:
        def reached() -> bool:
            status = read_status(self.run_dir)
            return (
                status is not None
                and (status.attempt, status.state) == (attempt, RunState.RUNNING)
                and (status.step or 0) >= step
            )

        what = f"at step {step} of attempt {attempt}"
        wait_until(reached, SECONDS, what, ended=lambda: self.has_failed, output=self.output)

    @property
    def has_failed(self) -> bool:
        return self.slurm.job_state(self.id) in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def wait_until_done(self) -> None:
        def ended() -> bool:
            return self.slurm.job_state(self.id) == "COMPLETED"

        wait_until(ended, SECONDS, "completed", ended=lambda: self.has_failed, output=self.output)

    @property
    def ranks(self) -> list[int]:
        """The number of ranks of each attempt."""
        plans = sorted((self.run_dir / "attempts").glob("*/plan.json"))
        return [json.loads(plan.read_text())["world"]["ranks"] for plan in plans]

    def times(self, attempt: int) -> AttemptTimes:
        times = read_times(RunDirectory(self.run_dir).attempt_folder(attempt))
        assert times is not None
        return times

    @property
    def stops(self) -> list[str]:
        """The reasons of the attempts that were stopped."""
        folders = sorted((self.run_dir / "attempts").iterdir())
        return [
            times.reason or ""
            for folder in folders
            if (times := read_times(folder)) and times.state == "stopped"
        ]

    @property
    def losses(self) -> dict[int, float]:
        return dict(read_losses(self.run_dir / "metrics.jsonl"))


def submit(slurm: Slurm, tmp_path: Path, data: Path, *words: str) -> ElasticJob:
    run_dir = tmp_path / "run"
    argv = [
        *(sys.executable, str(ROOT / "launch/submit.py"), *KEYS, f"data.path={data}", f"run.dir={run_dir}"),
        *("cluster=slurm", "cluster.gpus_per_node=0", "cluster.slurm.partition=all", "zero=stage2"),
        "+hooks.pace.target=tests.launch.paced_steps.PacedSteps",
        *words,
    ]
    subprocess.run(argv, check=True, timeout=SECONDS)
    found = submission.find_last_job(run_dir)
    assert found is not None
    return ElasticJob(slurm, run_dir, found[1].id.id)


def check_losses(job: ElasticJob, folder: Path, data: Path) -> None:
    unbroken = train_unbroken(folder, data)
    assert list(job.losses) == list(range(1, STEPS + 1)), "every step once, in order"
    assert job.losses == pytest.approx(unbroken, abs=1e-5)
    assert abs(unbroken[STEPS] - unbroken[STEPS - 1]) > 1e-5, "control: one step late is noticed"


def test_elastic_job_takes_its_spare_node_and_then_goes_on_with_fewer(
    slurm: Slurm, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks continue from the snapshot of step 14 in memory, and not from that of step 10 on disk. On the
    node that is left, the new rank is a standby.
    """
    every, gate = 7, tmp_path / "gate"
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("GATE_STEP", str(2 * every + 1))  # the ranks wait here until the node is lost
    monkeypatch.setenv("GATE", str(gate))
    job = submit(
        *(slurm, tmp_path, data, "cluster.nodes=2", "cluster.min_nodes=1", "cluster.spare_nodes=1"),
        *("cluster.standbys=1", f"checkpoint.memory_every={every}"),
        *(
            f"checkpoint.memory_folder={tmp_path}/disk",
            "+hooks.gate.target=tests.launch.gated_steps.GatedSteps",
        ),
    )

    def has_snapshots() -> bool:
        folders = snapshot_root(f"{tmp_path}/disk").glob("dmt-*-agent-*")
        return [max(committed_checkpoints(folder), default=0) for folder in folders] == [2 * every] * 2

    def has_standbys() -> bool:
        return all("standby-0" in slurm.process_names(node) for node in members)

    wait_until(has_snapshots, SECONDS, "saved in memory", ended=lambda: job.has_failed, output=job.output)
    members = {node for node in EVERY if slurm.has_rank(node)}
    assert len(members) == 2, "the third stands by"
    wait_until(has_standbys, SECONDS, "ready to restart", ended=lambda: job.has_failed, output=job.output)
    lost, other = sorted({"node2", "node3"}, key=lambda node: node not in members)  # node1 has the script
    slurm.lose_node(lost)
    gate.touch()
    job.wait_for_step(2, 3 * SAVE_EVERY + 1)
    assert job.ranks == [2, 2], "the spare node has taken the place"
    assert job.times(2).first == 2 * every
    relays = {node for node in EVERY if "relay-0" in slurm.process_names(node)}
    assert relays == members - {lost}, "the rank of the spare node is a new process"
    slurm.lose_node(other)
    job.wait_for_step(3, 3 * SAVE_EVERY + 1)
    assert job.ranks == [2, 2, 1]
    job.wait_until_done()
    check_losses(job, tmp_path / "unbroken", data)


def test_elastic_job_that_loses_its_first_node_is_requeued(slurm: Slurm, tmp_path: Path, data: Path) -> None:
    """Slurm keeps the job without its script; another node requeues it."""
    job = submit(slurm, tmp_path, data, "cluster.nodes=2", "cluster.min_nodes=1")
    job.wait_for_step(1, SAVE_EVERY + 1)
    slurm.lose_node("node1")
    job.wait_for_step(2, SAVE_EVERY + 1)
    assert "lost the node of its script and was requeued" in job.output.read_text()
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job.id)
    job.wait_until_done()
    assert job.ranks == [2, 2]
    check_losses(job, tmp_path / "unbroken", data)


def test_elastic_job_that_is_requeued_avoids_excluded_hosts(
    slurm: Slurm, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the batch script is signalled, as before a time limit."""
    job = submit(slurm, tmp_path, data, "cluster.nodes=2", "cluster.min_nodes=1")
    job.wait_for_step(1, 3)
    assert slurm.has_rank("node2"), "control"
    monkeypatch.setenv(SLURM_JOB, job.id)
    exclude_hosts(job.run_dir, [ExcludedHost(host="node2", step=2, reason="wrong values")])
    slurm.run("scancel", "--batch", "--signal=TERM", job.id)
    job.wait_for_step(2, 4)
    assert [reason.partition(" ")[0] for reason in job.stops] == ["SIGTERM"], job.output.read_text()
    assert "ExcNodeList=node2" in slurm.run("scontrol", "show", "job", job.id)
    assert slurm.has_rank("node3")
    assert not slurm.has_rank("node2")
    job.wait_until_done()
    check_losses(job, tmp_path / "unbroken", data)
