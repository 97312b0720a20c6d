"""Slurm jobs: sbatch's arguments, and the script, compared with golden files, checked by shellcheck, and run
by bash with fakes of Slurm's commands.

    pytest tests/cluster/test_slurm_script.py
    python -m tests.cluster.test_slurm_script        rewrite the golden files
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.waiting import wait_until
from toolkit.cluster.jobs.backends import slurm
from toolkit.cluster.jobs.job import JobId, JobState, TrainingJob
from toolkit.config.cluster import ClusterBackend, ClusterConfig, SlurmConfig
from toolkit.config.schema import RunConfig, RunSection
from toolkit.errors import ConfigError, InputError
from toolkit.plan.types import Device, World

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "slurm"
PYTHON = "/opt/venv/bin/python"
HOSTILE = '/data/it\'s "a" $(touch pwned) `touch pwned`; touch pwned & 50%'


def job(
    nodes: int = 1,
    gpus: int = 8,
    run_dir: str = "/data/runs/gpt-0123abcd",
    slurm: SlurmConfig | None = None,
    grace: int = 60,
    script: str = "/repo/launch/train.py",
    min_nodes: int | None = None,
    spare_nodes: int = 0,
) -> TrainingJob:
    cluster = ClusterConfig(
        where=ClusterBackend.slurm,
        nodes=nodes,
        min_nodes=min_nodes,
        spare_nodes=spare_nodes,
        gpus_per_node=gpus,
        grace_seconds=grace,
        slurm=slurm or SlurmConfig(),
    )
    config = RunConfig(run=RunSection(name="gpt", dir=run_dir), cluster=cluster)
    world = World(
        ranks=nodes * (gpus or 1), ranks_per_node=gpus or 1, device=Device.CUDA if gpus else Device.CPU
    )
    return TrainingJob(
        name=Path(run_dir).name, run_dir=run_dir, number=1, config=config, world=world, script=script
    )


CASES = {
    "one_node.sh": job(),
    "four_nodes.sh": job(
        nodes=4,
        slurm=SlurmConfig(cpus_per_task=64, setup=["module load cuda/12.8", 'export NCCL_DEBUG="WARN"']),
    ),
    "elastic.sh": job(nodes=4, min_nodes=2, spare_nodes=1),
}


@pytest.mark.parametrize("name", CASES)
def test_script_matches_golden_file(name: str) -> None:
    assert slurm.render_script(CASES[name], PYTHON) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_passes(name: str) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    text = slurm.render_script(CASES[name], PYTHON)
    done = subprocess.run(
        [shellcheck, "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    wrong = text.replace(
        '--signal=TERM "$SLURM_JOB_ID"', "--signal=TERM $SLURM_JOB_ID"
    )  # control: an unquoted variable is reported
    assert (
        subprocess.run(
            [shellcheck, "-"], input=wrong, capture_output=True, text=True, timeout=60, check=False
        ).returncode
        != 0
    )


def test_sbatch_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    asked = SlurmConfig(
        account="lab",
        partition="h100",
        qos="long",
        time="1-12:00:00",
        priority=7,
        constraint="ib&nvme",
        exclude="node[3,7-9]",
        reservation="course",
        cpus_per_task=64,
        memory="0",
        options={"mail-type": "END", "exclusive": ""},
    )
    assert slurm.argv(job(nodes=4, slurm=asked)) == [
        "sbatch",
        "--parsable",
        "--job-name=gpt-0123abcd",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gres=gpu:8",
        "--cpus-per-task=64",
        "--mem=0",
        "--time=1-12:00:00",
        "--account=lab",
        "--partition=h100",
        "--qos=long",
        "--priority=7",
        "--constraint=ib&nvme",
        "--exclude=node[3,7-9]",
        "--reservation=course",
        "--signal=B:TERM@90",
        "--requeue",
        "--open-mode=append",
        "--output=/data/runs/gpt-0123abcd/jobs/001/output.txt",
        "--chdir=/",
        "--mail-type=END",
        "--exclusive",
        "/data/runs/gpt-0123abcd/jobs/001/job.sh",
    ]


def test_unset_keys_give_no_options() -> None:
    words = slurm.sbatch_options(job(gpus=0, slurm=SlurmConfig(requeue=False)))
    assert [word.partition("=")[0] for word in words] == [
        "--job-name",
        "--nodes",
        "--ntasks-per-node",
        "--signal",
        "--no-requeue",
        "--open-mode",
        "--output",
        "--chdir",
    ]


def test_user_gpu_option_replaces_gres() -> None:
    words = slurm.sbatch_options(job(slurm=SlurmConfig(options={"gpus-per-node": "h100:8"})))
    assert "--gpus-per-node=h100:8" in words
    assert not any(word.startswith("--gres") for word in words)


def test_hosts_that_the_run_has_excluded_are_added() -> None:
    named = replace(job(slurm=SlurmConfig(exclude="node[3,7-9]")), excluded_hosts=("node1", "node2"))
    assert "--exclude=node[3,7-9],node1,node2" in slurm.sbatch_options(named)
    assert "--exclude=node1" in slurm.sbatch_options(replace(job(), excluded_hosts=("node1",)))


def test_elastic_job_takes_spare_nodes_and_outlives_a_lost_one() -> None:
    words = slurm.sbatch_options(CASES["elastic.sh"])
    assert {"--nodes=5", "--no-kill"} < set(words)
    assert "--no-kill" not in slurm.sbatch_options(CASES["four_nodes.sh"])


@pytest.mark.parametrize("node", ["0", "1"])
def test_agents_of_an_elastic_job_are_clients_of_the_scripts_rendezvous(
    node: str, stand_ins: dict[str, str], tmp_path: Path
) -> None:
    elastic = job(nodes=2, min_nodes=1, spare_nodes=1, run_dir=str(tmp_path / "it's a run"))
    elastic.folder.mkdir(parents=True)
    process = started(elastic, {**stand_ins, "NODE": node}, tmp_path)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 75, output
    (server,) = (call[1:] for call in calls(stand_ins) if call[0] == "server")
    agent, after = (call[1:] for call in calls(stand_ins) if call[0] in ("task", "after"))
    assert server == ["-m", "toolkit.cluster.jobs.rendezvous_server", "22345", "--id=12345"]
    assert "torch.distributed.run" in agent
    assert {"--nnodes=1:2", "--rdzv-endpoint=10.0.0.1:22345", "--max-restarts=5"} < set(agent)
    assert agent[-2:] == ["is_host=0,keep_alive_interval=2,last_call_timeout=10", f"10.0.0.{int(node) + 1}"]
    assert after == ["-m", "toolkit.cluster.jobs.requeue_after_node_loss", "10.0.0.1:22345"]
    (srun,) = (call for call in calls(stand_ins) if call[0] == "srun")
    assert {"--nodes=3", "--no-kill", "--wait=0"} < set(srun)
    assert (elastic.folder / "output.txt").exists()


def test_agents_are_stopped_if_the_rendezvous_server_fails(stand_ins: dict[str, str], tmp_path: Path) -> None:
    stop = f'echo "$@" >> {tmp_path}/stopped; until kill "$(cat {tmp_path}/step)"; do sleep 0.1; done'
    (tmp_path / "bin" / "scancel").write_text(f"#!/bin/bash\n{stop}\n")
    elastic = job(nodes=2, min_nodes=1, run_dir=str(tmp_path / "run"))
    elastic.folder.mkdir(parents=True)
    process = started(elastic, {**stand_ins, "SERVER": "1", "STEPS": "600"}, tmp_path)
    assert process.wait(timeout=50) == 75
    assert process.stdout is not None
    process.stdout.close()
    assert (tmp_path / "stopped").read_text() == "--signal=TERM 12345\n"


def test_percent_sign_in_folder_is_escaped() -> None:
    assert "--output=/data/50%%/jobs/001/output.txt" in slurm.sbatch_options(job(run_dir="/data/50%"))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("1:00:00", 3600),
        ("2-1", 176400),
        ("2-1:30", 178200),
        ("2-01:30:05", 178205),
        ("soon", None),
        ("1:2:3:4", None),
        ("-5", None),
        ("", None),
    ],
)
def test_parse_time_limit(time: str, seconds: int | None) -> None:
    assert slurm.parse_time_limit(time) == seconds


@pytest.mark.parametrize(
    ("asked", "grace", "key"),
    [
        (SlurmConfig(time="soon"), 60, "cluster.slurm.time"),
        (SlurmConfig(time="1"), 60, "cluster.slurm.time"),
        (SlurmConfig(), 65536, "cluster.grace_seconds"),
        (SlurmConfig(account="a\n#SBATCH --uid=0"), 60, "cluster.slurm.account"),
        (SlurmConfig(options={"comment": "a\nb"}), 60, "cluster.slurm.options.comment"),
        (SlurmConfig(options={"--wrap": "id"}), 60, "cluster.slurm.options"),
        (SlurmConfig(options={"nodes": "3"}), 60, "cluster.slurm.options"),
    ],
)
def test_invalid_slurm_keys_are_rejected(asked: SlurmConfig, grace: int, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        slurm.render(job(slurm=asked, grace=grace))
    assert [problem.key for problem in raised.value.problems] == [key]


def test_sufficient_time_limit_is_accepted() -> None:
    assert set(slurm.render(job(slurm=SlurmConfig(time="2"), grace=60))) == {"config.yaml", "job.sh"}


def test_submission_environment_drops_outer_job_variables() -> None:
    around = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SLURM_CPU_BIND": "x",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "PET_NNODES": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "SBATCH_PARTITION": "mine",
        "WANDB_MODE": "offline",
    }
    assert slurm.submission_environment(around) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_PARTITION": "mine",
        "WANDB_MODE": "offline",
    }


# ---- running the script


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands record their arguments; ``srun`` runs its task once, as node
    ``NODE``.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    own = {
        "srun": 'note srun "$@"; while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=$NODE '
        'SLURMD_NODENAME=n$((NODE + 1)) "$@"',
        "scancel": 'note scancel "$@"; [ ! -e "$NOTES/step" ] || kill -TERM "$(cat "$NOTES/step")"',
        "scontrol": 'case "$*" in *hostnames*) printf "n1\\nn2\\n";;\n'
        '*) printf "NodeName=n%s Arch=x86_64 NodeAddr=10.0.0.%s Version=22\\n" 1 1 2 2;; esac',
        "python": 'case "$*" in *"cluster.jobs.requeue "*) note requeue "$@"; exit 75;;\n'
        '*rendezvous_server*) note server "$@"; exit "${SERVER:-0}";;\n'
        '*requeue_after_node_loss*) note after "$@"; exit;; esac\n'
        'note task "$@" "${PET_RDZV_CONF:-}" "${PET_LOCAL_ADDR:-}"; echo $$ > "$NOTES/step"\n'
        'trap "exit 75" TERM; for _ in $(seq "${STEPS:-0}"); do sleep 0.1; done; exit 3',
    }
    note = 'note() { printf "%s\\0" "$@" >> "$NOTES/calls"; printf "\\n" >> "$NOTES/calls"; }\n'
    for name, body in own.items():
        (folder / name).write_text(f"#!/bin/bash\n{note}{body}\n")
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "NOTES": str(tmp_path),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "NODE": "0",
    }


def calls(environ: dict[str, str]) -> list[list[str]]:
    lines = (Path(environ["NOTES"]) / "calls").read_text().split("\0\n")
    return [line.split("\0") for line in lines if line]


def started(job: TrainingJob, environ: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    python = str(Path(environ["NOTES"]) / "bin" / "python")
    path = cwd / "job.sh"
    path.write_text(slurm.render_script(job, python))
    # A shell cannot trap signals that were ignored when it started, as they may be if the tests run in the
    # background.
    return subprocess.Popen(
        ["bash", str(path)],
        env=environ,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_user_texts_are_quoted(stand_ins: dict[str, str], tmp_path: Path) -> None:
    item = job(run_dir=HOSTILE, script="/my repo's/train.py")
    process = started(item, stand_ins, tmp_path)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 75, output
    by_name = {call[0]: call[1:] for call in calls(stand_ins)}
    assert by_name["task"] == [
        "-u",
        "/my repo's/train.py",
        f"--frozen={HOSTILE}/jobs/001/config.yaml",
        "",
        "",
    ]
    assert by_name["requeue"] == [
        "-m",
        "toolkit.cluster.jobs.requeue",
        f"{HOSTILE}/jobs/001",
        "--asked=none",
        "--code=3",
    ]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("node", "own"), [("0", ["is_host=1", "10.0.0.1"]), ("1", ["is_host=0", "10.0.0.2"])]
)
def test_script_passes_rendezvous_and_node_addresses(
    node: str, own: list[str], stand_ins: dict[str, str], tmp_path: Path
) -> None:
    process = started(job(nodes=2, run_dir=HOSTILE), {**stand_ins, "NODE": node}, tmp_path)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 75, output
    task = next(call for call in calls(stand_ins) if call[0] == "task")
    assert task[1:] == [
        "-u",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=8",
        "--rdzv-backend=c10d",
        "--rdzv-id=12345",
        "--rdzv-endpoint=10.0.0.1:22345",
        "--max-restarts=3",
        "/repo/launch/train.py",
        f"--frozen={HOSTILE}/jobs/001/config.yaml",
        *own,
    ]


def test_script_falls_back_to_node_names(stand_ins: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "scontrol").write_text(
        '#!/bin/bash\ncase "$*" in *hostnames*) echo n1;; *) exit 1;; esac\n'
    )
    started(job(nodes=2), stand_ins, tmp_path).communicate(timeout=20)
    task = next(call for call in calls(stand_ins) if call[0] == "task")
    assert "--rdzv-endpoint=n1:22345" in task
    assert task[-1] == ""  # torchrun then uses its host's own name


@pytest.mark.parametrize(("number", "asked"), [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
def test_script_forwards_signal_and_waits(
    number: signal.Signals, asked: str, stand_ins: dict[str, str], tmp_path: Path
) -> None:
    process = started(job(), {**stand_ins, "STEPS": "200"}, tmp_path)
    deadline = time.monotonic() + 15
    while not (tmp_path / "step").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 75, output
    assert ["scancel", "--signal=TERM", "12345"] in calls(stand_ins)
    assert calls(stand_ins)[-1][0] == "requeue"
    assert calls(stand_ins)[-1][-2:] == [f"--asked={asked}", "--code=75"]


def test_signal_is_forwarded_again_if_the_controller_does_not_answer(
    stand_ins: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    scancel = (folder / "scancel").read_text()
    fails = '[ "$(grep -c ^scancel "$NOTES/calls")" -ge 3 ] || exit 1'
    (folder / "scancel").write_text(scancel.replace('"$@"; ', f'"$@"; {fails}; '))
    (folder / "sleep").write_text("#!/bin/bash\nexec /bin/sleep 0.05\n")
    (folder / "sleep").chmod(0o755)
    process = started(job(), {**stand_ins, "STEPS": "400"}, tmp_path)
    wait_until((tmp_path / "step").exists)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=40)[0] == ""
    assert [call[0] for call in calls(stand_ins)] == ["srun", "task", *["scancel"] * 3, "requeue"]
    assert calls(stand_ins)[-1][-1] == "--code=75"


def test_signal_during_setup_starts_no_task(stand_ins: dict[str, str], tmp_path: Path) -> None:
    setup = SlurmConfig(setup=["kill -TERM $$", "sleep 0.1"])
    process = started(job(slurm=setup), stand_ins, tmp_path)
    process.communicate(timeout=20)
    assert [call[0] for call in calls(stand_ins)] == ["scancel", "requeue"]


# ---- Slurm's responses


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("echo PENDING", JobState.QUEUED),
        ("echo RUNNING", JobState.RUNNING),
        ("echo COMPLETING", JobState.RUNNING),
        ("echo FAILED", JobState.ENDED),
        ("true", JobState.ENDED),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", JobState.ENDED),
    ],
)
def test_job_state_from_squeue(
    answer: str, state: JobState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _command(tmp_path, "squeue", answer, monkeypatch)
    assert slurm.state(JobId(ClusterBackend.slurm, "7")) is state


def test_unresponsive_slurm_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _command(tmp_path, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1", monkeypatch)
    with pytest.raises(InputError, match="Unable to contact"):
        slurm.state(JobId(ClusterBackend.slurm, "7"))


def test_missing_slurm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="sbatch is not installed here"):
        slurm.submit(job())


def test_job_number_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _command(tmp_path, "sbatch", f'printf "%s\\n" "$@" > "{tmp_path}/argv"; echo "4711;cluster"', monkeypatch)
    assert slurm.submit(job()) == JobId(ClusterBackend.slurm, "4711")
    assert (tmp_path / "argv").read_text().splitlines() == slurm.argv(job())[1:]


def _command(folder: Path, name: str, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_job_files_contain_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-mine")
    item = replace(job(), number=2)
    assert "secret-of-mine" not in json.dumps([slurm.render(item), slurm.argv(item)])


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        (GOLDEN / name).write_text(slurm.render_script(case, PYTHON))
    sys.exit(0)
