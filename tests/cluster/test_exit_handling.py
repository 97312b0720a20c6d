"""How a process leaves: with its code and all its words, whatever its threads still do.

pytest tests/cluster/test_exit_handling.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from toolkit.cluster.environment import Launch, Launcher
from toolkit.cluster.exit_handling import LOST_CONNECTION, ExitHandler
from toolkit.errors import CheckpointError, ExitCode, Problem
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

CODE = """
import atexit, sys, threading, time
from toolkit.cluster.exit_handling import exit_now
atexit.register(lambda: print("hook"))
threading.Thread(target=time.sleep, args=(60,)).start()
print("said", end=" ")
exit_now(75)
"""


def test_leaving_runs_hooks_says_everything_and_waits_for_no_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "said hook\n", "")


def test_what_was_found_out_about_a_failure_is_in_the_status(tmp_path: Path) -> None:
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
def test_a_mistake_that_is_met_while_training_is_a_failure(
    step: int | None, state: RunState, tmp_path: Path
) -> None:
    """As of a full disk: steps are done. Before training began, the start is refused."""
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
def test_a_lost_connection_is_told_as_that_and_one_to_a_bucket_is_not(
    error: Exception, lost: bool, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("code", "elastic", "restarts", "signalled"),
    [
        (ExitCode.STOPPED, False, 3, True),
        (ExitCode.USER, False, 3, True),
        (ExitCode.USER, True, 3, True),
        (ExitCode.STOPPED, True, 3, False),  # the agent restarts its ranks because a node has joined
        (ExitCode.STOPPED, False, 0, False),
        (ExitCode.DONE, False, 3, False),
        (ExitCode.FAILURE, False, 3, False),
    ],
)
def test_torchrun_is_ended_only_where_it_would_restart_what_must_not_be(
    code: ExitCode, elastic: bool, restarts: int, signalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    exit_handler = ExitHandler(lambda: None)
    exit_handler.launch = Launch(launcher=Launcher.TORCHELASTIC, restarts_left=restarts, elastic=elastic)
    with exit_handler:
        exit_handler.code = code
    assert sent == ([(os.getppid(), signal.SIGTERM)] if signalled else [])


# ---- who records the end


def live(tmp_path: Path) -> RunDirectory:
    """The directory of a run under way, without a process that has it."""
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


def test_another_rank_records_the_end_if_rank_0_is_gone(tmp_path: Path) -> None:
    directory = live(tmp_path)
    fail(2, RunDirectory(tmp_path))
    fail(3, RunDirectory(tmp_path))
    end = directory.status()
    assert end is not None
    assert (end.state, end.exit_code, end.step) == (RunState.FAILED, 1, 7)
    assert (
        end.reason
        == "RuntimeError: the other side is gone\nrecorded by rank 2, because rank 0 ended without recording why"
    )


def test_another_rank_records_nothing_while_rank_0_lives(tmp_path: Path) -> None:
    directory = live(tmp_path)
    assert directory.try_lock()
    fail(2, RunDirectory(tmp_path))
    assert directory.status() == Status(state=RunState.RUNNING, attempt=1, step=7)
    directory.release()
