"""A signal to any process of a run: it saves, records its state, and all processes end within 15 seconds.

pytest tests/launch/test_signals.py            one case, with a fake training
pytest tests/launch/test_signals.py -m full    every launcher, process and signal, not all combinations
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.processes import FAKE, RunningCommand, command, read_status, send_signal
from toolkit.cluster.stop.stop_request import ECHO_SECONDS
from toolkit.goodput import read_times
from toolkit.rundir.directory import LOST_END, RunDirectory
from toolkit.rundir.status import RunState, Status

INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
ENVIRON = {"FAKE_STEP_SECONDS": "0.05", "FAKE_SAVE_SECONDS": "0.5"}


@dataclass(frozen=True)
class Case:
    """``to``: the process that the user started (top), its group, or a rank."""

    launcher: str
    to: str
    number: signal.Signals
    ranks: int | None = 2
    exit_code: int | None = None  # of the user's process, if the toolkit determines it

    def __str__(self) -> str:
        return f"{self.launcher}{self.ranks or ''}-{self.to}-{self.number.name}"


QUICK = [Case("python", "top", TERM, exit_code=75)]
FULL = [
    Case("deepspeed", "top", KILL),
    Case("deepspeed", "group", INT),
    Case("torchrun", "group", INT),
    Case("torchrun", "top", TERM),
    Case("torchrun", "top", KILL),
    Case("deepspeed", "top", TERM),
    Case("python", "top", KILL),
    Case("python", "rank1", TERM, exit_code=75),
    Case("python", "top", signal.SIGUSR1, exit_code=75),
    Case("torchrun", "rank0", signal.SIGUSR2),
    Case("python", "group", INT, ranks=None, exit_code=75),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str
)
def test_signalled_run_saves_and_leaves_no_process(case: Case, tmp_path: Path) -> None:
    """DeepSpeed#5721, #4098: a signal to the launcher loses the run."""
    run_dir = tmp_path / "run"
    argv = command(
        case.launcher, FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=100000", ranks=case.ranks
    )
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=ENVIRON) as started:
        started.wait_until(lambda: running(run_dir), 60, "running")
        pid = started.ranks()[int(case.to[4:])].pid if case.to.startswith("rank") else started.process.pid
        send_signal(case.number, pid, group=case.to == "group")
        code = started.wait_for_exit(30)
        started.wait_until_gone(15)
        end = read_status(run_dir)
        assert end is not None
        assert (end.state, end.exit_code, end.checkpoint) == (RunState.STOPPED, 75, "saved"), started.output
        assert end.reason
        assert case.exit_code is None or code == case.exit_code
        heard = started.output.count("Ctrl-C to end it at once")
        assert heard <= 1, started.output
        assert (
            heard == 1 or case.launcher != "python" or case.to not in ("top", "group") or case.number is KILL
        ), "the signalled process logs it"
        assert "Traceback" not in RunDirectory(run_dir).log_file(1).read_text()


def running(run_dir: Path) -> bool:
    status = read_status(run_dir)
    return status is not None and status.state is RunState.RUNNING and (status.step or 0) >= 2


@pytest.mark.full
@pytest.mark.timeout(400)
def test_second_interrupt_ends_the_ranks_and_is_recorded(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command("python", FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=100000")
    environ = {**ENVIRON, "FAKE_SAVE_SECONDS": "600"}
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=environ) as started:
        started.wait_until(lambda: running(run_dir), 200, "running")
        send_signal(INT, started.process.pid)
        time.sleep(2 * ECHO_SECONDS)
        send_signal(INT, started.process.pid)
        assert started.wait_for_exit(100) == 1
        started.wait_until_gone(30)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.reason) == (RunState.FAILED, "SIGINT twice: ended without saving")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_killed_rank_is_named_and_others_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(
        "python", FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=100000", "cluster.restarts=0"
    )
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=ENVIRON) as started:
        started.wait_until(lambda: running(run_dir), 60, "running")
        send_signal(KILL, started.ranks()[1].pid)
        assert started.wait_for_exit(30) == 1
        started.wait_until_gone(5)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.exit_code, end.reason) == (
        RunState.FAILED,
        1,
        "rank 1 was killed by signal 9 (SIGKILL)",
    )


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_surviving_rank_records_killed_rank_0(launcher: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(launcher, FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=100000")
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=ENVIRON) as started:
        started.wait_until(lambda: running(run_dir), 60, "running")
        send_signal(KILL, started.ranks()[0].pid)
        assert started.wait_for_exit(40) != 0
        started.wait_until_gone(15)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.exit_code) == (RunState.FAILED, 1), started.output
    assert end.reason is not None
    assert "recorded by rank 1, because rank 0 ended without recording a reason" in end.reason


@pytest.mark.full
@pytest.mark.timeout(120)
def test_next_start_records_failure_of_killed_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command("torchrun", FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=100000")
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=ENVIRON) as started:
        started.wait_until(lambda: running(run_dir), 60, "running")
        for process in started.ranks().values():
            send_signal(signal.SIGSTOP, process.pid)  # so that neither notices the end of the other
        for process in started.ranks().values():
            send_signal(KILL, process.pid)
        assert started.wait_for_exit(40) != 0
    died = read_status(run_dir)
    assert died is not None
    assert died.state is RunState.RUNNING, "control: no process was left that could have recorded it"
    with RunningCommand([*argv[:-1], "train.steps=2"], run_dir, cwd=tmp_path) as started:
        assert started.wait_for_exit() == 0
    times = read_times(RunDirectory(run_dir).attempt_folder(1))
    assert times is not None
    assert (times.state, times.reason, times.ended) == ("failed", LOST_END, times.seen)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_failure_in_a_single_process_prints_one_traceback(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command("python", FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=2", ranks=None)
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ={"FAKE_FAILS": "0"}) as started:
        assert started.wait_for_exit() == 1
        assert started.output.count("Traceback") == 1
        assert "the fake training fails" in started.output
    directory = RunDirectory(run_dir)
    reason = "RuntimeError: the fake training fails"
    assert directory.status() == Status(state=RunState.FAILED, attempt=1, exit_code=1, step=0, reason=reason)
    assert "the fake training fails" in directory.log_file(1).read_text()
    with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
        assert started.wait_for_exit() == 0
    assert directory.status() == Status(
        state=RunState.DONE, attempt=2, exit_code=0, step=2, checkpoint="saved"
    )


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_error_is_printed_once_and_next_start_is_new_attempt(launcher: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(launcher, FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=2", ranks=2)
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ={"FAKE_FAILS": "all"}) as started:
        assert started.wait_for_exit() == 1
        started.wait_until_gone(10)
    shown = started.output.partition("torch/distributed/elastic")[0]  # torchrun then prints its own
    assert shown.count("Traceback") == 1, started.output
    assert 'raise RuntimeError("the fake training fails")' in shown
    assert "toolkit/" not in shown.partition("Traceback")[2].partition("the full traceback")[0]
    log = RunDirectory(run_dir).log_file(1).read_text()
    assert log.count("Traceback") == 2, "one full traceback per rank"
    assert "toolkit/cluster/launch_process.py" in log
    if launcher == "python":
        with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
            assert started.wait_for_exit() == 0, started.output
        assert RunDirectory(run_dir).status() == Status(
            state=RunState.DONE, attempt=2, exit_code=0, step=2, checkpoint="saved"
        )


@pytest.mark.full
@pytest.mark.timeout(120)
def test_torchrun_output_ends_with_the_mistake(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command("torchrun", FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.micro_batch=5", ranks=2)
    with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
        assert started.wait_for_exit() == 1
        started.wait_until_gone(10)
    last = started.output[-1500:]
    assert "train.micro_batch=5" in last, started.output
    assert "remedy:" in last
