"""The folder for snapshots in memory: who may use it, and when it is removed.

pytest tests/rundir/test_memory.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from toolkit.rundir.memory import MemoryFolder, remove_abandoned


def test_folder_is_private_and_found_by_nothing_but_its_name(tmp_path: Path) -> None:
    first, second = MemoryFolder(tmp_path / "run", tmp_path), MemoryFolder(tmp_path / "run", tmp_path)
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    assert not first.path.exists()
    assert second.path.exists()
    second.remove()


def test_newest_step_is_of_a_complete_snapshot(tmp_path: Path) -> None:
    memory = MemoryFolder(tmp_path / "run", tmp_path)
    assert memory.newest_step() is None
    (memory.path / "step-00000004").mkdir()
    (memory.path / "step-00000004" / "manifest.json").touch()
    (memory.path / "step-00000006").mkdir()  # without a manifest
    assert memory.newest_step() == 4
    memory.remove()


def test_next_start_removes_folders_of_killed_supervisors_only(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from toolkit.rundir.memory import MemoryFolder
print(MemoryFolder(Path("run"), Path({str(tmp_path)!r})).path, flush=True)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root).stdout
    abandoned = Path(found.strip())
    assert abandoned.is_dir()
    (tmp_path / "dmt-other").mkdir()
    alive = MemoryFolder(tmp_path / "other", tmp_path)
    unlocked = alive.path.with_name(f"{alive.path.name}-unlocked")
    unlocked.mkdir()
    assert remove_abandoned(tmp_path) == [abandoned]
    assert not abandoned.exists()
    assert alive.path.exists()
    assert unlocked.exists(), "it may be in the making"
    os.utime(unlocked, (0, 0))
    assert remove_abandoned(tmp_path) == [unlocked]
    assert (tmp_path / "dmt-other").exists()
    alive.remove()
