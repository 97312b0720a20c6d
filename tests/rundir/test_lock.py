"""One process at a time uses a folder.

pytest tests/rundir/test_lock.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rundir.runs import PLAN, config
from toolkit.errors import ConfigError
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status


def test_second_live_run_is_rejected(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.begin(config(), PLAN)
    pid = json.loads((tmp_path / "lock").read_text())["pid"]
    with pytest.raises(ConfigError, match=f"process {pid} on "):
        second.begin(config(), PLAN)
    first.release()
    assert second.begin(config(), PLAN) == 2


def test_lock_of_killed_owner_is_released(tmp_path: Path) -> None:
    code = (
        "import os, sys; from tests.rundir.runs import *; RunDirectory(sys.argv[1]).begin(config(), "
        "PLAN); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert killed.returncode == -9
    directory = RunDirectory(tmp_path)
    assert directory.status() == Status(state=RunState.STARTING, attempt=1)
    assert directory.begin(config(), PLAN) == 2


def test_ranks_that_outlive_the_owner_are_waited_for(tmp_path: Path) -> None:
    """As after the death of a supervisor whose ranks still save: its PID names no process, or another one."""
    code = (
        "import os, subprocess, sys; from tests.rundir.runs import *; d = RunDirectory(sys.argv[1]); "
        "d.begin(config(), PLAN); subprocess.Popen(['sleep', '30'], pass_fds=[d.lock_descriptor], "
        "stdout=2); print(os.getpid(), flush=True)"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path)]
    owner = subprocess.run(command, cwd=root, timeout=60, check=True, stdout=subprocess.PIPE).stdout.decode()
    with pytest.raises(ConfigError) as refused:
        RunDirectory(tmp_path).begin(config(), PLAN)
    (problem,) = refused.value.problems
    assert f"a child of process {owner.strip()}, which has ended, is running" in problem.seen
    assert problem.remedy.startswith("wait until its ranks have saved and ended")
    assert "kill" not in problem.remedy


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    owner = RunDirectory(tmp_path)
    owner.begin(config(), PLAN)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[owner.lock_descriptor]
    )
    try:
        owner.release()
        with pytest.raises(ConfigError, match="one run at a time"):
            RunDirectory(tmp_path).begin(config(), PLAN)
    finally:
        child.communicate(b"\n", timeout=30)
    assert RunDirectory(tmp_path).begin(config(), PLAN) == 2
