"""launch/doctor.py as a command: output, exit codes, and connecting ranks under every launcher.

pytest tests/launch/test_doctor_commands.py
pytest tests/launch/test_doctor_commands.py -m full
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import FAKE, ROOT, RunningCommand, command, read_status, send_signal
from toolkit.rundir.status import RunState

DOCTOR = ROOT / "launch" / "doctor.py"
# In one process, so that its imported packages can be listed.
HEAVY = """
import sys
from launch.doctor import main
code = main(sys.argv[1:])
heavy = ("torch", "deepspeed", "transformers", "wandb")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def doctor(
    *words: str, cwd: Path, environ: dict[str, str] | None = None, program: tuple[str, ...] = (str(DOCTOR),)
) -> subprocess.CompletedProcess[str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    }
    return subprocess.run(
        [sys.executable, *program, *words],
        cwd=cwd,
        env={**own, "PYTHONPATH": str(ROOT), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def found(report: dict[str, object], check: str) -> list[dict[str, str]]:
    machines = report["machines"]
    together = report["together"]
    assert isinstance(machines, list)
    assert isinstance(together, list)
    return [
        item
        for item in [*(finding for machine in machines for finding in machine["findings"]), *together]
        if item["check"] == check
    ]


def test_doctor_of_one_machine_does_not_import_torch(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = doctor("--json", "+exp=quickstart", "run.dir=run", cwd=tmp_path, program=("-c", HEAVY))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.strip() == "[]"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 6, (
        "about 1.5 s of a core, however busy the machine is"
    )
    report = json.loads(done.stdout)
    assert report["format_version"] == 1
    assert [machine["node"] for machine in report["machines"]] == [0]
    assert found(report, "rendezvous")[0]["evidence"] == "one rank: no peers"
    assert {item["verdict"] for item in found(report, "plan")} == {"ok"}
    assert all(item["how"] for item in found(report, "disk"))
    assert not (tmp_path / "run").exists(), "only the measured file is written"


def test_failed_check_is_reported_with_its_remedy(tmp_path: Path) -> None:
    done = doctor("+exp=quickstart", "run.dir=run", cwd=tmp_path, environ={"GLOO_SOCKET_IFNAME": "nothere0"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert "GLOO_SOCKET_IFNAME=nothere0: no such interface" in done.stdout
    assert "unset GLOO_SOCKET_IFNAME" in done.stdout
    assert "machine 0: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 fail, ")
    assert done.stdout.splitlines()[-1].endswith("this run would fail")


@pytest.mark.full
def test_unplannable_run_is_reported_with_other_checks(tmp_path: Path) -> None:
    done = doctor(
        "--json", "+exp=quickstart", "cluster.cpu_ranks=2", "parallel.tensor=3", "run.dir=run", cwd=tmp_path
    )
    assert done.returncode == 2, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert any("divisible" in item["evidence"] for item in found(report, "plan") if item["verdict"] == "fail")
    assert found(report, "rendezvous")[0]["verdict"] == "unknown"
    assert found(report, "disk")[0]["verdict"] == "ok"


def test_doctor_reports_configuration_mistakes(tmp_path: Path) -> None:
    done = doctor("+exp=quickstart", "train.stepps=3", "cluster.nodes=4", cwd=tmp_path)
    assert (done.returncode, "train.steps" in done.stderr) == (2, True), done.stderr


# ---- ranks

RANKS = pytest.mark.parametrize("launcher", ["python", "torchrun", "deepspeed"])


@pytest.mark.full
@RANKS
def test_two_ranks_connect(launcher: str, tmp_path: Path) -> None:
    argv = command(
        launcher, DOCTOR, "--json", "+exp=quickstart", "parallel.tensor=2", f"run.dir={tmp_path / 'run'}"
    )
    with RunningCommand(argv, tmp_path / "run", cwd=tmp_path, environ={"PYTHONPATH": str(ROOT)}) as started:
        assert started.wait_for_exit(120) == 0, started.output
        started.wait_until_gone(5)
        output = started.output
    report, _ = json.JSONDecoder().raw_decode(output[output.index('{\n "format_version"') :])
    links = [item["evidence"] for item in found(report, "rendezvous")]
    assert links[0].startswith("all ranks connected in ")
    assert links[1].startswith("tensor (2 ranks): ")
    assert "bus bandwidth" in links[1]
    assert len(report["machines"]) == 1
    assert found(report, "master address")[0]["verdict"] == "ok"


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun"])
def test_two_ranks_on_an_unfit_machine(launcher: str, tmp_path: Path) -> None:
    argv = command(launcher, DOCTOR, "+exp=quickstart", f"run.dir={tmp_path / 'run'}")
    # Child processes inherit a soft limit, which does not prevent the ranks from connecting.
    argv = ["bash", "-c", 'ulimit -Sn 200; exec "$@"', "bash", *argv]
    with RunningCommand(argv, tmp_path / "run", cwd=tmp_path, environ={"PYTHONPATH": str(ROOT)}) as started:
        code = started.wait_for_exit(120)
        output = started.output
    assert code == (1 if launcher == "torchrun" else 2), output  # torchrun merges all codes into one
    assert "200 open files per process" in output
    assert "ulimit -n 65536" in output
    assert output.count("machine 0: ") == 1, "only rank 0 reports"


@pytest.mark.full
def test_occupied_port_is_reported_with_other_checks(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(1)
        argv = command("deepspeed", DOCTOR, "+exp=quickstart", f"run.dir={tmp_path / 'run'}")
        argv[argv.index("--master_port") + 1] = str(held.getsockname()[1])
        with RunningCommand(
            argv, tmp_path / "run", cwd=tmp_path, environ={"PYTHONPATH": str(ROOT)}
        ) as started:
            assert started.wait_for_exit(90) == 2, started.output
            assert "Address already in use" in started.output
            assert "deepspeed --master_port" in " ".join(started.output.split())
            assert "shared memory" in started.output


@pytest.mark.full
def test_interrupted_doctor_leaves_nothing(tmp_path: Path) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    argv = command("python", DOCTOR, "+exp=quickstart", f"run.dir={tmp_path / 'run'}")
    with RunningCommand(
        argv, temporary, cwd=tmp_path, environ={"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    ) as started:
        started.wait_until(lambda: len(started.ranks()) == 2, 30, "with two ranks")
        send_signal(signal.SIGINT, started.process.pid)
        assert started.wait_for_exit(15) == 75, started.output
        started.wait_until_gone(10)
    assert not list(temporary.iterdir())
    assert not (tmp_path / "run").exists()


# ---- before a run


@pytest.mark.full
@RANKS
def test_preflight_runs_before_training(launcher: str, tmp_path: Path) -> None:
    words = ("+exp=quickstart", "cluster.preflight=true", "train.steps=3", f"run.dir={tmp_path / 'run'}")
    with RunningCommand(command(launcher, FAKE, *words), tmp_path / "run", cwd=tmp_path) as started:
        assert started.wait_for_exit(120) == 0, started.output
        assert started.output.count("machine 0: ") == 1
        assert "shared memory" in started.output
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state is RunState.DONE


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_preflight_refuses_an_unfit_machine(launcher: str, tmp_path: Path) -> None:
    words = ("+exp=quickstart", "cluster.preflight=true", "train.steps=3", f"run.dir={tmp_path / 'run'}")
    argv = ["bash", "-c", 'ulimit -Sn 200; exec "$@"', "bash", *command(launcher, FAKE, *words)]
    with RunningCommand(argv, tmp_path / "run", cwd=tmp_path) as started:
        started.wait_for_exit(120)
        started.wait_until_gone(30)
        output = started.output
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status.state, status.exit_code, status.step) == (RunState.REFUSED, 2, None), output
    assert "limits: 200 open files per process" in output
    assert output.count("remedy: ulimit -n 65536") == (2 if launcher == "torchrun" else 1), (
        "only rank 0 reports and nothing starts again; torchrun's own report repeats the error"
    )
