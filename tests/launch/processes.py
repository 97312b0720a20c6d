"""Run real commands in tests: each in its own session, watched, and cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.waiting import wait_until
from toolkit.cluster.standbys.standby_pool import STANDBY
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import Status
from toolkit.testing.dist import find_free_port

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "launch" / "train.py"
FAKE = ROOT / "tests" / "launch" / "fake_training.py"
BIN = Path(sys.executable).parent


def command(launcher: str, script: Path, *overrides: str, ranks: int | None = 2) -> list[str]:
    """Return the command line of a launcher, with a free port. ``ranks`` None: without a rank option."""
    port = ["--master_port", str(find_free_port())]
    match launcher:
        case "deepspeed":
            return [
                str(BIN / "deepspeed"),
                *port,
                *(["--num_gpus", str(ranks)] if ranks else []),
                str(script),
                *overrides,
            ]
        case "torchrun":
            return [
                str(BIN / "torchrun"),
                *port,
                *(["--nproc_per_node", str(ranks)] if ranks else []),
                str(script),
                *overrides,
            ]
        case "python":
            return [
                sys.executable,
                str(script),
                *overrides,
                *([f"cluster.cpu_ranks={ranks}"] if ranks else []),
            ]
    raise AssertionError(launcher)


class RunningCommand:
    """A running command; at the end of the ``with`` block all its processes are gone."""

    def __init__(
        self, argv: Sequence[str], mark: Path, *, cwd: Path, environ: dict[str, str] | None = None
    ) -> None:
        self.mark = str(mark)  # a path that appears in the command lines of all processes of the run
        self._output = cwd / "output.txt"
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        }
        self.began = time.time()
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**clean, "OMP_NUM_THREADS": "1", **(environ or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> RunningCommand:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (
            [*self.processes(), psutil.Process(self.process.pid)]
            if self.process.poll() is None
            else self.processes()
        ):
            process.kill()
        self.process.wait(timeout=10)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return every live process of the run, found by its command line, including orphans."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if _mentions(process, self.mark) and process.pid != os.getpid()
        ]

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self.processes():
            try:
                environ = process.environ()
            except psutil.Error:
                continue
            if "RANK" in environ and not is_standby(process) and not is_relay(process):
                found[int(environ["RANK"])] = process
        return found

    def standbys(self) -> dict[str, psutil.Process]:
        """Return the standbys that are ready, by name."""
        return self.named("standby-")

    def named(self, prefix: str) -> dict[str, psutil.Process]:
        """Return the processes whose names begin with ``prefix``, by name."""
        found = {}
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended
                found[process.name()] = process
        return {name: process for name, process in found.items() if name.startswith(prefix)}

    def wait_until(self, holds: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until ``holds()`` and return the seconds; fail with the output on a timeout or if all
        processes have ended.
        """
        return wait_until(
            holds,
            seconds,
            what,
            ended=lambda: self.process.poll() is not None and not self.processes(),
            output=lambda: self.output,
        )

    def wait_for_exit(self, seconds: float = 60) -> int:
        self.wait_until(lambda: self.process.poll() is not None, seconds, "ended")
        return self.process.returncode

    def wait_until_gone(self, seconds: float = 15) -> float:
        return self.wait_until(lambda: not self.processes(), seconds, "without orphans")


def read_status(run_dir: Path) -> Status | None:
    return RunDirectory(run_dir).status()


def send_signal(number: signal.Signals, process: int, *, group: bool = False) -> None:
    (os.killpg if group else os.kill)(process, number)


def is_standby(process: psutil.Process) -> bool:
    """Return whether a process waits to become a rank, or prepares for it."""
    try:
        waits = any(word.startswith(STANDBY) for word in process.cmdline())
        return waits and not process.name().startswith("rank-")
    except psutil.Error:
        return False


def is_relay(process: psutil.Process) -> bool:
    """Return whether a process has handed its place as a rank to a standby."""
    try:
        return process.name().startswith("relay-")
    except psutil.Error:
        return False


def _mentions(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any(
            mark in word for word in process.info["cmdline"] or ()
        )
    except psutil.Error:
        return False
