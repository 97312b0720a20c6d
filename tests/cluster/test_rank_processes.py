"""Rank processes of one machine: environment, signals, waiting and killing. The ranks are small scripts."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.waiting import wait_until
from toolkit.cluster.attempt import rank_processes
from toolkit.cluster.attempt.rank_processes import RankProcesses, combine_exit_codes
from toolkit.cluster.stop.stop_request import ProcessHandle, StopRequest
from toolkit.cluster.world.rendezvous import bind_loopback
from toolkit.errors import ExitCode
from toolkit.plan.types import Device, World

TWO = World(ranks=2, ranks_per_node=2, device=Device.CPU)


@pytest.mark.parametrize(
    ("codes", "answer"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([2, 2], 2),
        ([2, -15], 1),
        ([0, 1], 1),
        ([75, -9], 1),
        ([75, 2], 2),
        ([0, 247], 1),
    ],
)
def test_combine_exit_codes(codes: list[int], answer: int) -> None:
    assert combine_exit_codes(codes) == answer


def script(tmp_path: Path, text: str) -> list[str]:
    """A rank script that first writes its PID and environment."""
    file = tmp_path / "rank.py"
    file.write_text(f"""
import json, os, signal, sys, time
rank = os.environ["RANK"]
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])  # as StopRequest.install() does
with open(r"{tmp_path}/" + rank + ".tmp", "w") as out:
    json.dump({{"pid": os.getpid(), **os.environ}}, out)
os.rename(r"{tmp_path}/" + rank + ".tmp", r"{tmp_path}/" + rank + ".json")
{text}
""")
    return [str(file)]


def ranks_there(tmp_path: Path) -> list[dict[str, Any]]:
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


def test_each_rank_gets_its_environment(tmp_path: Path) -> None:
    ranks = RankProcesses(script(tmp_path, ""), TWO)
    assert ranks.wait(StopRequest(), 5) == ExitCode.DONE
    seen = ranks_there(tmp_path)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [[item[name] for name in names] for item in seen] == [
        ["0", "0", "2", "2", "127.0.0.1"],
        ["1", "1", "2", "2", "127.0.0.1"],
    ]
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert ranks.first_failure() is None


def test_other_ranks_are_stopped_then_killed_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "PEER_SECONDS", 0.3)
    monkeypatch.setattr(rank_processes, "PEER_KILL_SECONDS", 0.3)
    deaf = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"while rank == '1' and not os.path.exists(r'{tmp_path}/0.json'): time.sleep(0.01)\n"
        "if rank == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    ranks = RankProcesses(script(tmp_path, deaf), TWO)
    began = time.monotonic()
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    assert time.monotonic() - began < 10
    assert ranks.first_failure() == "rank 1 was killed by signal 9 (SIGKILL)"
    assert all(ProcessHandle.read(item["pid"]) is None for item in ranks_there(tmp_path))


def test_divergence_of_all_ranks_is_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks diverge, the first a little later: it receives no signal meanwhile."""
    monkeypatch.setattr(rank_processes, "PEER_SECONDS", 0.1)
    ranks = RankProcesses(script(tmp_path, "if rank == '0': time.sleep(0.4)\nsys.exit(65)"), TWO)
    assert ranks.wait(StopRequest(), 60) == ExitCode.DIVERGED
    assert ranks.first_failure() is None


def test_failed_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "PEER_SECONDS", 0.1)
    ranks = RankProcesses(script(tmp_path, "if rank == '1': sys.exit(3)\ntime.sleep(60)"), TWO)
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    assert ranks.first_failure() == "rank 1 failed first (code 3): see the attempt's log"


def test_illegal_instruction_names_the_setting_that_avoids_amx(tmp_path: Path) -> None:
    ranks = RankProcesses(script(tmp_path, "os.kill(os.getpid(), signal.SIGILL)"), TWO)
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in str(ranks.first_failure())


@pytest.mark.parametrize(
    ("first", "then", "code"),
    [
        ("sys.exit(2)", 1, 2),
        ("sys.exit(1)", 2, 2),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, 1),
        pytest.param("os.abort()", 2, 2, marks=pytest.mark.full),
        pytest.param("sys.exit(1)", 1, 1, marks=pytest.mark.full),
    ],
)
def test_mistake_of_one_rank_wins_unless_another_was_killed(
    first: str, then: int, code: int, tmp_path: Path
) -> None:
    """The other ranks then fail in a collective, and may end before the rank with the mistake."""
    ranks = RankProcesses(
        script(tmp_path, f"if rank == '0': {first}\ntime.sleep(0.3); sys.exit({then})"), TWO
    )
    assert ranks.wait(StopRequest(), 60) == code


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_supervisor_signal_is_forwarded_once(tmp_path: Path, number: signal.Signals) -> None:
    """In a separate process whose process group gets the signal, as from a terminal."""
    saving = """
def heard(number, frame):
    heard.times = getattr(heard, "times", 0) + 1
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, heard)
open(rf"{tmp_path}/" + rank + ".listens", "w").close()
while not hasattr(heard, "times"): time.sleep(0.01)
time.sleep(0.5)
sys.exit(75 if heard.times == 1 else 1)
""".replace("{tmp_path}", str(tmp_path))
    code = """
import sys
from toolkit.cluster.attempt.rank_processes import RankProcesses
from toolkit.cluster.stop.stop_request import StopRequest
from toolkit.plan.types import Device, World
stop = StopRequest(); stop.install(); stop.arm(None)
sys.exit(RankProcesses(sys.argv[1:], World(ranks=2, ranks_per_node=2, device=Device.CPU)).wait(stop, 5))
"""
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-c", code, *script(tmp_path, saving)], os.environ, setpgroup=0
    )
    watchdog = threading.Timer(30, os.killpg, (pid, signal.SIGKILL))
    watchdog.start()
    while len(list(tmp_path.glob("*.listens"))) < 2:
        time.sleep(0.02)
    os.killpg(pid, number)
    _, status = os.waitpid(pid, 0)
    watchdog.cancel()
    assert os.waitstatus_to_exitcode(status) == ExitCode.STOPPED


def test_ranks_that_ignore_a_stop_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "KILL_SECONDS", 0.2)
    ranks = RankProcesses(script(tmp_path, "if rank == '0': sys.exit(75)\ntime.sleep(60)"), TWO)
    assert ranks.wait(StopRequest(), grace_seconds=0.2) == ExitCode.FAILURE
    assert ranks.stop_overdue
    assert ranks.first_failure() == (
        "rank 1 did not end in time after the stop and was killed (cluster.grace_seconds)"
    )


def test_killed_rank_is_not_an_overdue_stop(tmp_path: Path) -> None:
    ranks = RankProcesses(script(tmp_path, "if rank == '0': os.kill(os.getpid(), 9)\ntime.sleep(60)"), TWO)
    assert ranks.wait(StopRequest(), grace_seconds=0.2) == ExitCode.FAILURE
    assert not ranks.stop_overdue


@pytest.mark.parametrize(
    ("other", "begun", "code"),
    [
        ("time.sleep(60)", False, 75),
        pytest.param("sys.exit(1)", False, 75, marks=pytest.mark.full),
        ("sys.exit(1)", True, 1),
    ],
    ids=["waits", "fails", "control"],
)
def test_stop_before_training_kills_waiting_ranks(other: str, begun: bool, code: int, tmp_path: Path) -> None:
    """One rank had nothing to save and left at once; the other was still connecting to it."""
    text = f"""
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
open(rf"{tmp_path}/" + rank + ".listens", "w").close()
while not stopped: time.sleep(0.01)
if rank == "0": sys.exit(75)
time.sleep(0.2)
{other}
"""
    ranks = RankProcesses(script(tmp_path, text), TWO)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("*.listens"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    stop = StopRequest()
    stop.request("SIGTERM")
    began = time.monotonic()
    assert ranks.wait(stop, 60, lambda: begun) == code
    assert time.monotonic() - began < 15
    assert (ranks.first_failure() is None) == (code == 75)


def test_early_signal_is_delivered_after_install(tmp_path: Path) -> None:
    """Ctrl-C during the ranks' imports would otherwise kill them with a traceback each."""
    file = tmp_path / "rank.py"
    file.write_text("""
import signal, sys, time
time.sleep(0.5)
from toolkit.cluster.stop.stop_request import StopRequest
stop = StopRequest(); stop.arm(None); stop.install()
while stop() is None: time.sleep(0.01)
stop.close()
sys.exit(75 if stop() == "SIGINT" else 1)
""")
    ranks = RankProcesses([str(file)], TWO)
    ranks.send(signal.SIGINT)
    assert ranks.wait(StopRequest(), 20) == ExitCode.STOPPED
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}, (
        "this process listens"
    )


def test_death_by_a_signal_ends_the_other_ranks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "PEER_SECONDS", 100.0)  # after an error
    deaf = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if rank == '1': time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    ranks = RankProcesses(script(tmp_path, deaf), TWO)
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    times = ranks.failure_times
    assert times is not None
    assert time.time() - times.noticed < 30
    assert ranks.first_failure() == "rank 1 was killed by signal 9 (SIGKILL)"


def test_end_of_a_rank_is_noticed_without_polling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "POLL_SECONDS", 30.0)
    began = time.monotonic()
    assert RankProcesses(script(tmp_path, "sys.exit(0)"), TWO).wait(StopRequest(), 60) == ExitCode.DONE
    assert time.monotonic() - began < 20


def test_started_ranks_are_killed_if_another_cannot_start() -> None:
    sleeping = rank_processes.start_process(["-c", "import time; time.sleep(600)"], os.environ)

    def take(rank: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if rank == 1:
            raise OSError(errno.EAGAIN, "too many processes")
        return sleeping

    with pytest.raises(OSError, match="too many processes"):
        RankProcesses(["-c", "pass"], TWO, take_standby=take)
    assert sleeping.returncode == -signal.SIGKILL


def test_port_of_the_rendezvous_is_reserved_for_rank_0(tmp_path: Path) -> None:
    """Rank 0 binds it seconds later, after its imports. Meanwhile no other program gets it."""
    ranks = RankProcesses(script(tmp_path, "time.sleep(600)"), TWO)
    try:
        wait_until((tmp_path / "0.json").exists, 60)
        port = int(json.loads((tmp_path / "0.json").read_text())["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with bind_loopback(port) as of_rank_0:
            of_rank_0.listen()
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
    finally:
        ranks.kill()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # despite the connection's TIME_WAIT
        other.bind(("127.0.0.1", port))
        other.listen()


def test_two_threads_may_kill_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the ranks, and one ends the process because the user insists."""
    ranks = RankProcesses(["-c", "import time; time.sleep(600)"], TWO)
    close = os.close

    def close_slowly(descriptor: int) -> None:
        time.sleep(0.1)
        close(descriptor)

    monkeypatch.setattr(os, "close", close_slowly)
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(ranks.kill) for _ in range(2)]:
            done.result(60)


class Blocked:
    """A process that waits for a device, so that no signal ends it."""

    pid, returncode = 2**22 + 1, None

    def poll(self) -> None:
        pass

    def send_signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait for ever"
        raise subprocess.TimeoutExpired("rank", timeout)


def test_rank_that_does_not_end_after_sigkill_is_named(tmp_path: Path) -> None:
    ranks = RankProcesses(
        script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"),
        TWO,
        take_standby=lambda rank, environ: cast("Any", Blocked()) if rank == 1 else None,
    )
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    assert ranks.first_failure() == ranks.stuck
    assert ranks.stuck == (
        f"rank 1 (PID {Blocked.pid}) does not end after SIGKILL: its device or file system does not respond; "
        "restart the machine"
    )


def test_rank_that_hangs_after_another_is_done_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_processes, "END_SECONDS", 0.4)
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    ranks = RankProcesses(script(tmp_path, "if rank == '1': time.sleep(600)"), TWO)
    assert ranks.wait(StopRequest(), grace_seconds=0.2) == ExitCode.DONE
    assert ranks.end_overdue
    assert ranks.first_failure() is None
    assert "rank 1 did not end within 0.4 s of another rank" in caplog.text


def test_death_by_a_real_time_signal_is_described(tmp_path: Path) -> None:
    ranks = RankProcesses(script(tmp_path, "os.kill(os.getpid(), 35)"), TWO)
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    assert "was killed by signal 35 (Real-time signal 1)" in str(ranks.first_failure())


def test_death_is_not_attributed_to_an_old_oom_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = itertools.chain([0], itertools.repeat(1))  # a kill of another program, soon after the start
    monkeypatch.setattr(rank_processes, "count_oom_kills", lambda: {"/proc/vmstat": next(counts)})
    monkeypatch.setattr(rank_processes, "OOM_COUNT_SECONDS", 0.0)
    text = "if rank == '1': time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    ranks = RankProcesses(script(tmp_path, text), TWO)
    assert ranks.wait(StopRequest(), 60) == ExitCode.FAILURE
    assert ranks.first_failure() == "rank 1 was killed by signal 9 (SIGKILL)"
