"""How a process leaves: with its code and all its words, whatever its threads still do.

    pytest tests/cluster/test_leave.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from toolkit.cluster.ends import Ending
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
