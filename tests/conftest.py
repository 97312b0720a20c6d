"""Fixtures of every test."""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from toolkit.cluster.attempt.rank_processes import ONEDNN_ISA, WITHOUT_AMX
from toolkit.logs import ROOT
from toolkit.plan.devices import HIDE_GPUS

if TYPE_CHECKING:
    from tests.data.local_stores import Store


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that expect CPU ranks, and from the processes that they start. Do not use AMX if
    this machine cannot execute it.
    """
    if config.option.markexpr != "gpu":
        os.environ.update(HIDE_GPUS)
    # xdist's workers inherit the variable
    if ONEDNN_ISA not in os.environ and "PYTEST_XDIST_WORKER" not in os.environ and _amx_is_broken():
        os.environ[ONEDNN_ISA] = WITHOUT_AMX


def _amx_is_broken() -> bool:
    """Return whether the CPU announces AMX, but its instructions raise SIGILL: some virtual machines."""
    flags = Path("/proc/cpuinfo")  # of Linux
    if not flags.exists() or "amx_tile" not in flags.read_text(encoding="utf-8"):
        return False
    multiply = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    return subprocess.run([sys.executable, "-c", multiply], check=False).returncode == -signal.SIGILL


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the temporary folders of started processes at the end: torchrun leaves one for each start, and a
    process that is killed leaves all of its own.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is
    cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    with (
        pytest.MonkeyPatch.context() as context,
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder,
    ):
        context.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache))
        context.setenv("TMPDIR", folder)
        context.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty object store on 127.0.0.1, for whose ``s3`` URL the environment has credentials."""
    from tests.data.local_stores import served, set_environment

    root = tmp_path / "bucket"
    root.mkdir()
    with served(root) as running:
        set_environment(monkeypatch, running, tmp_path)
        yield running


@pytest.fixture
def launchers_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep other tests that type commands of the documentation from using the launchers' default port."""
    folder = tmp_path_factory.getbasetemp()
    with (folder.parent / "launchers-port.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Undo ``configure_logging``, which a command under test may have called."""
    logger = logging.getLogger(ROOT)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    logger.setLevel(logging.INFO)  # so that caplog sees what a run prints
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
