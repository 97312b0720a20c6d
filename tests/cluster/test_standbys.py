"""Standbys: what they do before and after they become a rank. The rank is a small script.

pytest tests/cluster/test_standbys.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.waiting import wait_until
from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.attempt.rank_processes import rank_variables
from toolkit.cluster.standbys.rank_assignment import RankAssignment
from toolkit.cluster.standbys.standby_pool import StandbyPool
from toolkit.cluster.stop.stop_request import ProcessHandle
from toolkit.config.compose import compose, to_yaml
from toolkit.plan.types import Device, World

TWO = World(ranks=2, ranks_per_node=2, device=Device.CPU)
SECONDS = 120
RANK = """
import json, os, signal, sys
sys.path.insert(0, {root!r})
from toolkit.cluster.standbys.standby_pool import wait_for_rank

def warm_up(plan):
    print("a library prints")
    assert os.environ["OMP_NUM_THREADS"] == "3", "set before anything is imported"
    os.environ["LIBRARY"] = "sets this when it is imported"
    {warm_up}
    seen["threads"] = plan.config.debug.threads
    seen["priority"] = os.getpriority(os.PRIO_PROCESS, __import__("threading").get_native_id())

seen = {{}}
arguments = wait_for_rank(sys.argv[1:], warm_up).arguments
assert sys.argv[1:] == arguments
links = map("/proc/self/fd/{{}}".format, os.listdir("/proc/self/fd"))
locks = [os.readlink(link) for link in links if os.path.exists(link)]
seen |= {{
    "pid": os.getpid(), "arguments": arguments, "environ": dict(os.environ),
    "main": os.getpriority(os.PRIO_PROCESS, 0),
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "locked": any(link.endswith("/lock") for link in locks), "session": os.getsid(0),
}}
json.dump(seen, open({out!r} + ".tmp", "w"))
os.rename({out!r} + ".tmp", {out!r})
"""


class Rig:
    """A pool whose ranks write what they see to a file."""

    def __init__(self, folder: Path, count: int = 2, *, warm_up: str = "pass") -> None:
        self.out, self.handover, script = folder / "seen.json", folder / "handover.json", folder / "rank.py"
        root = str(Path(__file__).resolve().parents[2])
        script.write_text(RANK.format(root=root, out=str(self.out), warm_up=warm_up))
        config = compose(["+exp=quickstart", f"run.dir={folder / 'run'}", "debug.threads=3"])
        AttemptSpec(to_yaml(config), TWO, 1).write(self.handover)
        self.lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        self.pool = StandbyPool([str(script)], count)
        self.pool.start(self.handover)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.kill()
        os.close(self.lock)

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: all(standby.is_ready() for standby in self.pool._standbys.values()), SECONDS, "ready"
        )

    def take(self, rank: int) -> subprocess.Popen[bytes] | None:
        environ = {**os.environ, **rank_variables(rank, TWO, "12345")}
        assignment = RankAssignment(environ=environ, arguments=["--handover=/next/handover.json"])
        return self.pool.take(rank, assignment, [self.lock])

    def seen(self) -> dict[str, Any]:
        wait_until(self.out.exists, SECONDS, "a rank")
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found


def test_standby_becomes_the_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Rig(tmp_path) as rig:
        rig.wait_until_ready()
        process = rig.take(1)
        assert process is not None
        assert process.wait(SECONDS) == 0
        assert rig.pool.discard_unready() == 1, "the other one still waits"
    seen = rig.seen()
    assert seen["pid"] == seen["session"] == process.pid
    assert seen["arguments"] == ["--handover=/next/handover.json"]
    expected = {**os.environ, **rank_variables(1, TWO, "12345"), "LIBRARY": "sets this when it is imported"}
    assert seen["environ"] == expected, "that of a new process, with what the imports have added"
    assert (seen["priority"], seen["main"]) == (19, os.getpriority(os.PRIO_PROCESS, 0))
    assert {signal.SIGINT, signal.SIGTERM} <= set(seen["blocked"]), "until the rank handles them"
    assert seen["locked"]
    assert "a library prints" not in capfd.readouterr().out


def test_standby_that_cannot_take_over_is_not_used(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        assert rig.take(0) is None, "it has not imported anything yet"
        rig.pool.start(rig.handover)
        rig.wait_until_ready()
        first, second = (rig.pool._standbys[rank].process for rank in range(2))
        first.kill()
        first.wait()
        second.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED, SECONDS, "stopped")
        assert rig.take(0) is None
        assert rig.take(1) is None, "it does not answer"
        assert rig.take(1) is None, "there is none"
        assert second.returncode == -signal.SIGKILL
    assert not rig.out.exists()


@pytest.mark.parametrize(
    ("warm_up", "supervised"),
    [
        ("__import__('time').sleep(600)", "time.sleep(1)"),
        ("pass", "rig.wait_until_ready()"),
        ("pass", "[select.select([standby._socket], [], []) for standby in standbys]"),
    ],
    ids=["importing", "ready", "ready-unread"],
)
def test_standbys_end_with_their_supervisor(tmp_path: Path, warm_up: str, supervised: str) -> None:
    code = f"""
import select, time
from pathlib import Path
from tests.cluster.test_standbys import Rig
rig = Rig(Path({str(tmp_path)!r}), warm_up={warm_up!r})
standbys = list(rig.pool._standbys.values())
{supervised}
print(*(standby.process.pid for standby in standbys), flush=True)
time.sleep(600)
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as supervisor:
        assert supervisor.stdout is not None
        standbys = [ProcessHandle.read(int(pid)) for pid in supervisor.stdout.readline().split()]
        assert len(standbys) == 2
        assert None not in standbys
        supervisor.kill()
    wait_until(lambda: not any(standby and standby.is_alive() for standby in standbys), SECONDS, "gone")


def test_failing_import_ends_the_standby(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Rig(tmp_path, count=1, warm_up="raise ImportError('no such engine')") as rig:
        assert rig.pool._standbys[0].process.wait(SECONDS) == 1
        assert rig.pool.discard_unready() == 0
    assert "ImportError: no such engine" in capfd.readouterr().err


class Blocked:
    """A process that waits for a file system, so that no signal ends it."""

    pid = 2**22 + 1

    def poll(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait for ever"
        raise subprocess.TimeoutExpired("standby", timeout)


def test_standbys_that_do_not_end_are_left_behind(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        for standby in rig.pool._standbys.values():
            standby.process.kill()
            standby.process.wait()
            standby.process = cast("Any", Blocked())
        assert rig.pool.discard_unready() == 0
