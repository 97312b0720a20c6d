"""How a process leaves: with its code and all its words, whatever its threads still do.

    pytest tests/cluster/test_leave.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from toolkit.cluster.ends import LOST, Ending
from toolkit.rundir.directory import RunDirectory

CODE = """
import atexit, sys, threading, time
from toolkit.cluster.ends import leave
atexit.register(lambda: print("hook"))
threading.Thread(target=time.sleep, args=(60,)).start()
print("said", end=" ")
leave(75)
"""


def test_leaving_runs_hooks_says_everything_and_waits_for_no_thread() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "said hook\n", "")


def test_what_was_found_out_about_a_failure_is_in_the_status(tmp_path: Path) -> None:
    ending = Ending(lambda: None)
    ending.directory, ending.attempt = RunDirectory(tmp_path), 1
    error = RuntimeError("Connection reset by peer")
    error.add_note("the ranks make calls with different shapes")
    with ending:
        raise error
    end = ending.directory.status()
    assert end is not None
    assert end.reason == "RuntimeError: Connection reset by peer\nthe ranks make calls with different shapes"


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:52149"


@pytest.mark.parametrize(("error", "lost"), [
    (RuntimeError(GLOO), True), (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
    (dist.DistNetworkError("failed to recv, got 0 bytes: Connection reset by peer"), True),
    (ConnectionResetError("Connection reset by peer"), False),
    (RuntimeError("[/pytorch/third_party/gloo/x.cc:1] op.preamble.length"), False)])
def test_a_lost_connection_is_told_as_that_and_one_to_a_bucket_is_not(error: Exception, lost: bool, tmp_path: Path) -> None:
    ending = Ending(lambda: None)
    ending.directory, ending.attempt = RunDirectory(tmp_path), 1
    with ending:
        raise error
    end = ending.directory.status()
    assert end is not None
    assert end.reason is not None
    assert end.reason.startswith(LOST) is lost
    assert end.reason.endswith(f"{type(error).__name__}: {error}")
