"""Stop requests in real processes: signals during a blocking call, launchers that die, insisting users."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.cluster.stop.stop_request import ProcessHandle, StopRequest, find_launchers, process_start_time
from toolkit.cluster.world.environment import Launch, Launcher

# Prints "ready", then what it sees; `save`: seconds until it exits after a request.
WAITER = """
import sys, time
from toolkit.cluster.stop import stop_request
from toolkit.cluster.stop.stop_request import StopRequest, ProcessHandle
stop_request.ECHO_SECONDS, stop_request.POLL_SECONDS = 0.5, 0.1
arm, grace, save, watched = sys.argv[1] == "arm", float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
stop = StopRequest()
stop.abort = lambda reason, code: print("abort", int(code), reason, flush=True)
stop.install([ProcessHandle.read(watched)] if watched else [])
if arm:
    stop.arm(grace if grace > 0 else None)
print("ready", flush=True)
while stop() is None:
    time.sleep(0.01)
time.sleep(save)
print("saved", stop(), flush=True)
stop.close()
sys.exit(75)
"""


def waiter(arm: bool = True, *, grace: float = 0, save: float = 0, watched: int = 0) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", WAITER, "arm" if arm else "unarmed", str(grace), str(save), str(watched)]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # the tests may run under nohup
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=30)
    return process.returncode, out.strip()


@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGTERM, signal.SIGUSR1),
        *(pytest.param(n, marks=pytest.mark.full) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)),
    ],
)
def test_signal_requests_a_stop(number: signal.Signals) -> None:
    process = waiter()
    process.send_signal(number)
    assert end(process) == (75, f"saved {number.name}")


def test_signal_before_arm_ends_the_process() -> None:
    process = waiter(arm=False, save=60)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (75, "abort 75 SIGTERM before training began")


def test_second_interrupt_ends_the_process_but_an_echo_does_not() -> None:
    patient, insisting = waiter(save=1.2), waiter(save=60)
    for process in (patient, insisting):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    patient.send_signal(signal.SIGINT)  # sent by a launcher in addition to the terminal's signal
    time.sleep(0.6)
    insisting.send_signal(signal.SIGINT)
    assert end(insisting) == (1, "abort 1 SIGINT twice: ended without saving")
    code, text = end(patient)
    assert code == 75
    assert text == "saved SIGINT", "the launcher's SIGTERM has the same cause"


def test_sigint_takes_precedence_over_launcher_sigterm() -> None:
    process = waiter()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert end(process) == (75, "saved SIGINT")


def test_only_sigint_insists_after_a_request() -> None:
    """Slurm and launchers send SIGTERM again while ranks save; a user presses Ctrl-C."""
    repeated, insisting = waiter(save=1.2), waiter(save=60)
    for process in (repeated, insisting):
        process.send_signal(signal.SIGTERM)
    time.sleep(0.8)
    repeated.send_signal(signal.SIGTERM)
    insisting.send_signal(signal.SIGINT)
    assert end(insisting) == (1, "abort 1 SIGTERM, then SIGINT: ended without saving")
    assert end(repeated) == (75, "saved SIGTERM")


def test_request_deadline_replaces_grace_period() -> None:
    stop = StopRequest()
    assert stop.seconds_left() is None
    stop._grace_seconds = 60  # like arm(), without a thread that would end this process
    stop.request("the cloud takes it", 20)
    stop.request("SIGTERM")  # the first one counts
    left = stop.seconds_left()
    assert stop() == "the cloud takes it"
    assert left is not None
    assert 19 < left <= 20


def test_saving_is_limited_by_grace_period() -> None:
    process = waiter(grace=0.3, save=60)
    process.send_signal(signal.SIGTERM)
    assert end(process) == (1, "abort 1 SIGTERM, and saving took more than cluster.grace_seconds=0.3")


@pytest.mark.parametrize("collected", [True, False], ids=["collected", "zombie"])
def test_dead_launcher_requests_a_stop(collected: bool) -> None:
    launcher = subprocess.Popen(["sleep", "60"])
    process = waiter(watched=launcher.pid)
    launcher.kill()
    if collected:
        launcher.wait()
    assert end(process) == (75, f"saved the launcher (process {launcher.pid}) has ended")
    launcher.wait()


def test_terminated_worker_does_not_stop_the_run() -> None:
    code = """
import multiprocessing, time
from toolkit.cluster.stop import stop_request
from toolkit.cluster.stop.stop_request import StopRequest
stop_request.POLL_SECONDS = 0.1
stop = StopRequest(); stop.install(); stop.arm(None)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
worker.start(); time.sleep(0.2); worker.terminate(); worker.join(10)
time.sleep(0.3)
print(worker.exitcode, stop())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["-15", "None"]


def test_process_start_time() -> None:
    code = (
        "import time; time.sleep(0.8); from toolkit.cluster.stop.stop_request import process_start_time\n"
        "print(process_start_time())"
    )
    before = time.time()
    started = float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    )
    assert before - 0.1 < started < before + 0.7
    assert process_start_time() < time.time()


def test_process_id_includes_start_time() -> None:
    own = ProcessHandle.read(os.getpid())
    assert own is not None
    assert own.is_alive()
    assert not ProcessHandle(own.pid, "1").is_alive()  # a later process with the same PID
    assert ProcessHandle.read(2**22 + 1) is None


def chain(outer: str, inner: str) -> list[int]:
    """Return which of two ancestor processes with these command lines a rank watches."""
    rank = (
        "from toolkit.cluster.stop.stop_request import *; import os; "
        "print(os.getppid(), *[p.pid for p in find_launchers(Launch(launcher=Launcher.DEEPSPEED, ranks=2))])"
    )
    start = (
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[2:]]).returncode)"
    )
    argv = [sys.executable, "-c", start, outer, start, inner, rank]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return [int(word) for word in done.stdout.split()]


def test_both_deepspeed_launchers_are_watched() -> None:
    parent, *watched = chain("/venv/bin/deepspeed", "deepspeed.launcher.launch")
    assert len(watched) == 2
    assert watched[0] == parent


def test_shell_above_launcher_is_not_watched() -> None:
    parent, *watched = chain("bash", "torchrun")
    assert watched == [parent]
    assert find_launchers(Launch(launcher=Launcher.NONE)) == []


def test_process_of_which_nothing_can_be_read_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessHandle.read(os.getpid())
    assert own is not None

    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", fail)
    assert own.is_alive()


def run_script(code: str) -> tuple[int, str]:
    """Run code that uses stop requests in a process of its own; return its exit code and output."""
    head = """
import os, resource, signal, sys, time
from toolkit.cluster.stop import stop_request
from toolkit.cluster.stop.stop_request import ProcessHandle, ProgramStopRequest, StopRequest
stop_request.POLL_SECONDS, stop_request.RECORD_SECONDS = 0.1, 0.3
"""
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.strip()


def test_signals_are_noticed_with_many_open_files() -> None:
    """The pipe has a large descriptor, and no file of /proc can be opened any more."""
    code = """
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
opened = [os.dup(0) for _ in range(1100)]
stop = StopRequest()
stop.arm(None)
stop.install([ProcessHandle.read(os.getppid())])
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
time.sleep(0.4)
os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 10
while stop() is None and time.monotonic() < deadline:
    time.sleep(0.01)
print(stop())
"""
    assert run_script(code) == (0, "SIGTERM")


def test_signal_without_a_name_is_ignored() -> None:
    code = """
stop = StopRequest()
stop.arm(None)
stop.install()
signal.signal(35, lambda *_: None)
os.kill(os.getpid(), 35)
time.sleep(0.4)
os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 10
while stop() is None and time.monotonic() < deadline:
    time.sleep(0.01)
print(stop())
"""
    assert run_script(code) == (0, "SIGTERM")


def test_process_ends_although_its_end_cannot_be_recorded() -> None:
    code = """
stop = StopRequest()
stop.abort = lambda reason, code: time.sleep(60)
stop.install()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""
    assert run_script(code) == (75, "")


def test_program_is_interrupted_although_the_end_of_its_run_cannot_be_recorded() -> None:
    code = """
def fail(reason, code):
    raise OSError("the disk is full")

stop = ProgramStopRequest([])
stop.abort = fail
stop.arm(0.1)
stop.request("a notice")
try:
    time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run_script(code) == (0, "interrupted")
