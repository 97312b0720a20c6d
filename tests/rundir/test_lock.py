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


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    owner = RunDirectory(tmp_path)
    owner.begin(config(), PLAN)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[owner.lock_descriptor]
    )
    try:
        owner.release()
        with pytest.raises(ConfigError, match="one run at a time") as refused:
            RunDirectory(tmp_path).begin(config(), PLAN)
        remedy = refused.value.problems[0].remedy
        assert "if it has ended, wait until its ranks have saved" in remedy
    finally:
        child.communicate(b"\n", timeout=30)
    assert RunDirectory(tmp_path).begin(config(), PLAN) == 2
