"""How a process ends: exit code, output and status."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from toolkit.cluster.attempt.exit_handling import LOST_CONNECTION, ExitHandler
from toolkit.cluster.stop.elastic_stop import StopDecision
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.node_range import NodeRange
from toolkit.errors import CheckpointError, ExitCode, Problem
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

CODE = """
import atexit, sys, threading, time
from toolkit.cluster.attempt.exit_handling import exit_now
atexit.register(lambda: print("hook"))
threading.Thread(target=time.sleep, args=(60,)).start()
print("flushed", end=" ")
exit_now(75)
"""


def test_exit_now_runs_hooks_flushes_and_does_not_join_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "flushed hook\n", "")


def test_exception_notes_are_recorded_in_status(tmp_path: Path) -> None:
    exit_handler = ExitHandler(lambda: None)
    exit_handler.directory, exit_handler.attempt = RunDirectory(tmp_path), 1
    error = RuntimeError("Connection reset by peer")
    error.add_note("the ranks make calls with different shapes")
    with exit_handler:
        raise error
    end = exit_handler.directory.status()
    assert end is not None
    assert end.reason == "RuntimeError: Connection reset by peer\nthe ranks make calls with different shapes"


@pytest.mark.parametrize(
    ("step", "state"), [(None, RunState.REFUSED), (0, RunState.FAILED), (7, RunState.FAILED)]
)
def test_user_error_during_training_is_a_failure(step: int | None, state: RunState, tmp_path: Path) -> None:
    """For example a full disk: after steps were done, this is a failure; before, the start is refused."""
    exit_handler = ExitHandler(lambda: None)
    exit_handler.directory, exit_handler.attempt = RunDirectory(tmp_path), 1
    exit_handler.directory.write_status(Status(state=RunState.STARTING, attempt=1, step=step))
    with exit_handler:
        raise CheckpointError(Problem("checkpoint", "No space left on device", "rule", "remedy"))
    end = exit_handler.directory.status()
    assert end is not None
    assert (end.state, end.exit_code, end.step, exit_handler.code) == (state, 2, step, ExitCode.USER)


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:52149"
)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes: Connection reset by peer"), True),
        (ConnectionResetError("Connection reset by peer"), False),
        (RuntimeError("[/pytorch/third_party/gloo/x.cc:1] op.preamble.length"), False),
    ],
)
def test_lost_rank_connection_is_recognised(error: Exception, lost: bool, tmp_path: Path) -> None:
    exit_handler = ExitHandler(lambda: None)
    exit_handler.directory, exit_handler.attempt = RunDirectory(tmp_path), 1
    with exit_handler:
        raise error
    end = exit_handler.directory.status()
    assert end is not None
    assert end.reason is not None
    assert end.reason.startswith(LOST_CONNECTION) is lost
    assert end.reason.endswith(f"{type(error).__name__}: {error}")


# ---- whether torchrun's agent ends with its ranks


RESTART = StopDecision(continues=True, leaving=(), reason="1 node joined")
LEAVE = StopDecision(continues=True, leaving=(0,), reason="node 0 left")
END = StopDecision(continues=False, leaving=(), reason="SIGTERM (on node 1)")


@pytest.mark.parametrize(
    ("code", "nodes", "after_stop", "restarts", "signalled"),
    [
        (ExitCode.STOPPED, None, None, 3, True),
        (ExitCode.USER, None, None, 3, True),
        (ExitCode.USER, NodeRange(1, 2), None, 3, True),
        (ExitCode.STOPPED, NodeRange(1, 2), RESTART, 3, False),
        (ExitCode.STOPPED, NodeRange(1, 2), None, 3, False),
        (ExitCode.STOPPED, NodeRange(1, 2), END, 3, True),
        (ExitCode.STOPPED, NodeRange(1, 2), END, 0, False),
        (ExitCode.STOPPED, NodeRange(1, 2), LEAVE, 3, True),
        (ExitCode.STOPPED, NodeRange(1, 2), LEAVE, 0, True),
        (ExitCode.STOPPED, None, None, 0, False),
        (ExitCode.DONE, None, None, 3, False),
        (ExitCode.FAILURE, None, None, 3, False),
    ],
)
def test_torchrun_agent_is_stopped_only_if_a_restart_is_wrong(
    code: ExitCode,
    nodes: NodeRange | None,
    after_stop: StopDecision | None,
    restarts: int,
    signalled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    exit_handler = ExitHandler(lambda: None)
    exit_handler.launch = Launch(launcher=Launcher.TORCHELASTIC, restarts_left=restarts, node_range=nodes)
    exit_handler.after_stop = after_stop
    with exit_handler:
        exit_handler.code = code
    assert sent == ([(os.getppid(), signal.SIGTERM)] if signalled else [])


def test_process_that_adopted_a_rank_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the death of its agent, a rank is a child of the first process of its container."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    exit_handler = ExitHandler(lambda: "the launcher (process 7) has ended")
    exit_handler.launch = Launch(launcher=Launcher.TORCHELASTIC, restarts_left=3)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with exit_handler:
        exit_handler.code = ExitCode.STOPPED
    assert sent == []


def test_status_gives_the_reason_that_the_nodes_agreed_on(tmp_path: Path) -> None:
    directory = live(tmp_path)
    exit_handler = ExitHandler(lambda: "SIGTERM")
    exit_handler.launch = Launch(launcher=Launcher.TORCHELASTIC, node_range=NodeRange(1, 2))
    exit_handler.directory, exit_handler.attempt, exit_handler.after_stop = directory, 1, RESTART
    with exit_handler:
        exit_handler.code = ExitCode.STOPPED
    end = directory.status()
    assert end is not None
    assert (end.state, end.reason) == (RunState.STOPPED, "1 node joined")


# ---- who records the end


def live(tmp_path: Path) -> RunDirectory:
    """The directory of a run in progress whose lock is free."""
    directory = RunDirectory(tmp_path)
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=7))
    return directory


def fail(rank: int, directory: RunDirectory) -> None:
    exit_handler = ExitHandler(lambda: None)
    exit_handler.launch = Launch(launcher=Launcher.DEEPSPEED, rank=rank, ranks=4)
    exit_handler.directory, exit_handler.attempt = directory, 1
    with exit_handler:
        raise RuntimeError("the other side is gone")
    directory.release()


def test_other_rank_records_end_if_rank_0_died(tmp_path: Path) -> None:
    directory = live(tmp_path)
    fail(2, RunDirectory(tmp_path))
    fail(3, RunDirectory(tmp_path))
    end = directory.status()
    assert end is not None
    assert (end.state, end.exit_code, end.step) == (RunState.FAILED, 1, 7)
    assert (
        end.reason
        == "RuntimeError: the other side is gone\nrecorded by rank 2, because rank 0 ended without recording "
        "a reason"
    )


def test_other_rank_records_nothing_while_rank_0_lives(tmp_path: Path) -> None:
    directory = live(tmp_path)
    assert directory.try_lock()
    fail(2, RunDirectory(tmp_path))
    assert directory.status() == Status(state=RunState.RUNNING, attempt=1, step=7)
    directory.release()


# ---- ends that must be recorded


def running(directory: RunDirectory) -> ExitHandler:
    exit_handler = ExitHandler(lambda: None)
    exit_handler.directory, exit_handler.attempt = directory, 1
    return exit_handler


def test_sys_exit_during_a_run_is_a_failure_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With any code: a launcher would take 0 for the end of a completed run."""
    directory = live(tmp_path)
    exit_handler = running(directory)
    with exit_handler:
        sys.exit(0)
    end = directory.status()
    assert end is not None
    assert (end.state, exit_handler.code) == (RunState.FAILED, ExitCode.FAILURE)
    assert end.reason == "SystemExit: sys.exit(0) was called during the run"
    assert "sys.exit(0)" in capsys.readouterr().err, "the traceback shows where"


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("error", [RuntimeError("broken"), CheckpointError(Problem("key", "x", "y", "z"))])
def test_failure_is_recorded_although_the_terminal_has_closed(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = live(tmp_path)
    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    with running(directory):
        raise error
    end = directory.status()
    assert end is not None
    assert end.state is RunState.FAILED


def test_failure_is_printed_and_recorded_although_its_log_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = live(tmp_path)
    directory.log_file(1).parent.mkdir(parents=True)
    directory.log_file(1).symlink_to("/dev/full")
    with running(directory):
        raise RuntimeError("broken")
    end = directory.status()
    assert end is not None
    assert end.reason == "RuntimeError: broken"
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_abort_is_recorded_although_the_terminal_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = live(tmp_path)
    exit_handler = running(directory)

    def fail(descriptor: int, text: bytes) -> int:
        raise OSError(errno.EIO, "the terminal has closed")

    with monkeypatch.context() as closed:
        closed.setattr(os, "write", fail)
        exit_handler.abort("SIGHUP, and saving took too long", ExitCode.FAILURE)
    end = directory.status()
    assert end is not None
    assert end.reason == "SIGHUP, and saving took too long"


# ---- what follows a failure


@pytest.mark.parametrize(
    ("launch", "requeued", "text"),
    [
        (Launch(launcher=Launcher.SUPERVISOR), False, ""),
        (Launch(), False, "run the same command to resume\n"),
        (
            Launch(launcher=Launcher.TORCHELASTIC, restart=1, restarts_left=2),
            False,
            "torchrun restarts the ranks, up to 2 more times\n",
        ),
        (
            Launch(launcher=Launcher.TORCHELASTIC, restart=3),
            False,
            "torchrun does not restart the ranks again (--max-restarts=3); run the same command to resume\n",
        ),
        (
            Launch(launcher=Launcher.TORCHELASTIC, restart=3),
            True,
            "torchrun does not restart the ranks again (--max-restarts=3)\n",
        ),
        (
            Launch(launcher=Launcher.TORCHELASTIC),
            False,
            "torchrun does not restart the ranks (--max-restarts=N would); run the same command to resume\n",
        ),
        (Launch(), True, ""),
    ],
)
def test_rank_0_prints_what_follows_a_failure(
    launch: Launch, requeued: bool, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_handler = running(live(tmp_path))
    exit_handler.launch, exit_handler.requeued = launch, requeued
    with exit_handler:
        exit_handler.code = ExitCode.FAILURE
    assert capsys.readouterr().err == text
