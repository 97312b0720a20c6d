"""The folder for snapshots in memory: who may use it, and when it is removed.

pytest tests/rundir/test_snapshot_folder.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.errors import InputError
from toolkit.rundir import snapshot_folder as snapshot_folder_module
from toolkit.rundir.snapshot_folder import (
    SnapshotFolder,
    open_agent_folder,
    remove_abandoned_folders,
    snapshot_root,
)


def test_folder_is_private_and_found_by_nothing_but_its_name(tmp_path: Path) -> None:
    first, second = SnapshotFolder(tmp_path / "run", tmp_path), SnapshotFolder(tmp_path / "run", tmp_path)
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    assert not first.path.exists()
    assert second.path.exists()
    second.remove()


def test_newest_step_is_of_a_complete_snapshot(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "run", tmp_path)
    assert folder.newest_step() is None
    (folder.path / "step-00000004").mkdir()
    (folder.path / "step-00000004" / "manifest.json").touch()
    (folder.path / "step-00000006").mkdir()  # without a manifest
    assert folder.newest_step() == 4
    folder.remove()


def test_next_start_removes_folders_of_killed_supervisors_only(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from toolkit.rundir.snapshot_folder import SnapshotFolder
print(SnapshotFolder(Path("run"), Path({str(tmp_path)!r})).path, flush=True)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root).stdout
    abandoned = Path(found.strip())
    assert abandoned.is_dir()
    (tmp_path / "dmt-other").mkdir()
    alive = SnapshotFolder(tmp_path / "other", tmp_path)
    unlocked = alive.path.with_name(f"{alive.path.name}-unlocked")
    unlocked.mkdir()
    assert remove_abandoned_folders(tmp_path) == [abandoned]
    assert not abandoned.exists()
    assert alive.path.exists()
    assert unlocked.exists(), "it may be in the making"
    os.utime(unlocked, (0, 0))
    assert remove_abandoned_folders(tmp_path) == [unlocked]
    assert (tmp_path / "dmt-other").exists()
    alive.remove()


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_ranks_of_one_agent_find_the_same_private_folder_and_those_of_another_do_not(tmp_path: Path) -> None:
    run, pid = tmp_path / "run", os.getpid()
    folder = open_agent_folder(run, pid, "7", tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_agent_folder(run, pid, "7", tmp_path) == folder
    others = {
        open_agent_folder(run, pid, "8", tmp_path),
        open_agent_folder(run, pid + 1, "7", tmp_path),
        open_agent_folder(tmp_path / "other", pid, "7", tmp_path),
    }
    assert len(others | {folder}) == 4


def test_folder_that_others_can_read_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = open_agent_folder(tmp_path / "run", 1, "7", tmp_path)
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="not a private folder"):
        open_agent_folder(tmp_path / "run", 1, "7", tmp_path)
    folder.rmdir()
    (tmp_path / "private").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "private")
    with pytest.raises(PermissionError, match="not a private folder"):
        open_agent_folder(tmp_path / "run", 1, "7", tmp_path)


def test_next_start_removes_folders_of_agents_that_have_ended_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    alive = open_agent_folder(tmp_path / "run", agent.pid, start_time(agent.pid), tmp_path)
    reused = open_agent_folder(tmp_path / "run", agent.pid, "0", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot_folder_module, "_pid_namespace", lambda: "1")
        unknown = open_agent_folder(tmp_path / "run", agent.pid, "0", tmp_path)
    assert remove_abandoned_folders(tmp_path) == [reused], "another process has the PID of its agent"
    agent.kill()
    agent.wait()
    assert remove_abandoned_folders(tmp_path) == [alive]
    assert unknown.exists(), "its agent may live in another container"
    os.utime(unknown, (0, 0))
    assert remove_abandoned_folders(tmp_path) == [unknown]


def test_nodes_that_share_a_named_folder_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert snapshot_root("/dev/shm") == Path("/dev/shm")
    roots = []
    for host in ("node-1", "node-2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        roots.append(snapshot_root(str(tmp_path)))
        open_agent_folder(tmp_path / "run", 1, f"of a process that is not on {host}", roots[-1])
    assert roots[0] != roots[1]
    assert len(remove_abandoned_folders(roots[1])) == 1
    assert list(roots[0].iterdir()), "the folders of the other node stay"


def test_named_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"mkdir -p {tmp_path}/disk"):
        snapshot_root(f"{tmp_path}/disk")
    (tmp_path / "disk").mkdir()
    assert snapshot_root(f"{tmp_path}/disk").is_dir()
