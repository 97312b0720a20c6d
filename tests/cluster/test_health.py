"""The health check of the image."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.cluster.jobs import health
from toolkit.config.compose import to_yaml
from toolkit.config.monitor import MonitorConfig
from toolkit.config.schema import RunConfig
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.lock import acquire_lock
from toolkit.rundir.status import RunState, Status


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "elsewhere" / "run")
    directory.attempt_folder(1).mkdir(parents=True)
    (directory.path / "config.yaml").write_text(to_yaml(RunConfig(monitor=MonitorConfig(hang_seconds=600))))
    return directory


@pytest.mark.parametrize(
    ("state", "age", "ill"),
    [
        (RunState.RUNNING, 0.0, False),
        (RunState.RUNNING, 599.0, False),  # a step may take this long
        (RunState.RUNNING, 661.0, True),
        (RunState.STARTING, 3600.0, False),  # data are being prepared
        (RunState.DONE, 3600.0, False),
        (RunState.STOPPED, 0.0, False),
        (RunState.FAILED, 0.0, True),
        (RunState.REFUSED, 0.0, True),
    ],
)
def test_health_is_read_from_the_status(
    state: RunState, age: float, ill: bool, directory: RunDirectory
) -> None:
    directory.write_status(Status(state=state, attempt=1))
    assert (health.find_failure(directory.path, time.time() + age) is not None) is ill


def test_run_is_found_through_its_lock(directory: RunDirectory) -> None:
    own = Path(f"/proc/{os.getpid()}")
    assert directory.path not in set(health.find_run_folders(own.parent))
    descriptor, _ = acquire_lock(directory.path / "lock")
    assert descriptor is not None
    try:
        assert directory.path in set(health.find_run_folders(own.parent))
    finally:
        os.close(descriptor)


def test_vanished_process_is_skipped(directory: RunDirectory, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    for number in ("7", "8", "9"):
        (proc / number).mkdir(parents=True)
    (proc / "7" / "fd").touch()  # its descriptors can no longer be listed
    (proc / "9" / "fd").mkdir()
    (proc / "9" / "fd" / "3").symlink_to(directory.path / "lock")
    assert list(health.find_run_folders(proc)) == [directory.path]


def test_health_check_is_fast_and_imports_no_torch() -> None:
    program = (
        "import sys, toolkit.cluster.jobs.health as health, pathlib\nhealth.main(pathlib.Path('/nowhere'))\n"
        "print(sorted({'torch', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines() == ["no run here", "[]"], done.stderr
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    )  # CPU seconds, independent of the load


def test_hanging_file_system_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe without a writer blocks its reader."""
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / "status.json")
    program = (
        f"import toolkit.cluster.jobs.health as health, pathlib\nhealth.TIMEOUT_SECONDS = 1\n"
        f"health.find_run_folders = lambda _: [pathlib.Path({str(folder)!r})]\n"
        "raise SystemExit(health.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "could not be read within 1 s" in done.stdout
