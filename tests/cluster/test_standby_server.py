"""Standbys under torchrun: an agent's worker hands its place to one. Agent and ranks are small scripts.

pytest tests/cluster/test_standby_server.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import wait_until
from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.standbys.standby_server import count_standbys_of_launch, phases_before_start
from toolkit.cluster.standbys.standby_socket import connect, find_peer, listen
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.node_range import NodeRange
from toolkit.config.cluster import ClusterConfig
from toolkit.config.compose import compose, to_yaml
from toolkit.plan.types import Device, World
from toolkit.restart_phases import RestartPhases

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
# The first worker starts the server as the first rank of a node does. Each writes what it sees, and waits.
WORKER = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from toolkit.cluster.standbys import standby_pool, standby_server
from toolkit.cluster.world.environment import read_launch
from toolkit.cluster.standbys.relay import hand_over_to_standby
from toolkit.cluster.standbys.standby_pool import is_standby, wait_for_rank
from toolkit.cluster.stop.stop_request import SIGNALS, find_launchers

standby_pool.LOW_PRIORITY = 0  # other tests of a busy machine must not starve them
arguments, relay, phases = sys.argv[1:], None, None
if is_standby(arguments):
    assignment = wait_for_rank(arguments, lambda plan: None)
    arguments, relay, phases = assignment.arguments, assignment.relay, assignment.restart
else:
    phases = hand_over_to_standby(arguments, os.environ)
launch, _ = read_launch(os.environ, arguments, relay=relay, phases=phases)
received = []
for number in SIGNALS:
    signal.signal(number, lambda number, frame: received.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
folder = Path(os.environ["FOLDER"])
print("output of", launch.rank, sys.stdin.read(), flush=True)
seen = {{
    "pid": os.getpid(), "arguments": arguments, "cwd": os.getcwd(), "environ": dict(os.environ),
    "cores": sorted(os.sched_getaffinity(0)), "relay": relay and relay.pid, "agent": launch.launcher_pid,
    "launchers": [process.pid for process in find_launchers(launch)],
    "phases": phases and [[name for name, _ in phases.ends], phases.ranks, phases.standbys],
}}
def written_by(rank):
    return folder / f"seen-{{os.environ['GENERATION']}}-{{rank}}.json"
written_by(launch.rank).with_suffix(".tmp").write_text(json.dumps(seen))
written_by(launch.rank).with_suffix(".tmp").rename(written_by(launch.rank))
test = Path("/proc", os.environ["TEST"])  # nothing of an aborted test is left
if launch.rank == 0 and "START" in os.environ:
    while test.exists() and not written_by(1).exists():
        time.sleep(0.05)  # the ranks of an attempt do their first step together
    handover = folder / "handover.json"
    standby_server._refill_or_start([__file__], 2, launch.launcher_pid, handover, dict(os.environ))
while test.exists() and not received and not (folder / "finish").exists():
    time.sleep(0.05)
sys.exit(70 + received[0] if received else 7)
"""
# Starts the workers that it reads from stdin, as torchrun does, and prints how they end.
AGENT = """
import json, os, subprocess, sys
for line in sys.stdin:
    order = json.loads(line)
    environ = {**os.environ, **order["environ"]}
    workers = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with open(order["input"]) as given, open(order["output"], "a") as output:
            workers.append(subprocess.Popen(
                order["argv"], env={**environ, **own}, cwd=order["cwd"], stdin=given, stdout=output,
                start_new_session=True,
            ))
    print(json.dumps([worker.pid for worker in workers]), flush=True)
    print(json.dumps([worker.wait() for worker in workers]), flush=True)
"""


class Agent:
    """An agent of two workers, and their processes by generation."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script, self._generation = folder, folder / "worker.py", 0
        self.script.write_text(WORKER)
        (folder / "input.txt").write_text("given")
        config = compose(["+exp=quickstart", f"run.dir={folder / 'run'}", "debug.threads=3"])
        world = World(ranks=2, ranks_per_node=2, device=Device.CPU)
        AttemptSpec(to_yaml(config), world, 1).write(folder / "handover.json")
        environ = {"FOLDER": str(folder), "TEST": str(os.getpid()), "TORCHELASTIC_RUN_ID": "none"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            env={**os.environ, **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.workers: list[int] = []

    def start_workers(self, *arguments: str, cwd: Path | None = None, **environ: str) -> None:
        self._generation += 1
        order = {
            "argv": [sys.executable, str(self.script), *arguments],
            "environ": {"GENERATION": str(self._generation), **environ},
            "cwd": str(cwd or self.folder),
            "input": str(self.folder / "input.txt"),
            "output": str(self.folder / f"output-{self._generation}.txt"),
        }
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        self.workers = self._read()

    def _read(self) -> list[int]:
        assert self.process.stdout is not None
        found: list[int] = json.loads(self.process.stdout.readline())
        return found

    def seen(self, rank: int) -> dict[str, Any]:
        file = self.folder / f"seen-{self._generation}-{rank}.json"
        wait_until(file.exists, SECONDS, f"rank {rank}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def end_workers(self, number: signal.Signals = signal.SIGKILL) -> list[int]:
        for worker in self.workers:
            os.kill(worker, number)
        return self._read()

    def wait_for_workers(self) -> list[int]:
        return self._read()

    def start_with_standbys(self) -> None:
        """Start a first generation that starts standbys, and a second one in their place."""
        self.start_workers(START="")
        [self.seen(rank) for rank in range(2)]
        self.wait_for_standbys()
        self.end_workers()
        self.start_workers("word", cwd=self.folder.parent, START="", MARK="second", MASTER_PORT="54321")

    def wait_for_standbys(self) -> list[psutil.Process]:
        wait_until(lambda: len(self.named("standby-")) == 2, SECONDS, "two standbys")
        return self.named("standby-")

    def processes(self) -> list[psutil.Process]:
        """All living processes of the agent, also those that are not its children."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.folder) in " ".join(process.cmdline()) and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def named(self, prefix: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            try:
                if process.name().startswith(prefix):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_gone(self) -> None:
        wait_until(lambda: not self.processes(), SECONDS, "without orphans")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.process.kill()
    made.process.communicate()
    (tmp_path / "finish").touch()
    try:
        made.wait_until_gone()
    finally:
        for process in made.processes():
            process.kill()


def test_standbys_take_the_places_of_the_workers(agent: Agent) -> None:
    agent.start_with_standbys()
    for rank in range(2):
        seen = agent.seen(rank)
        assert seen["relay"] == agent.workers[rank] != seen["pid"]
        assert seen["agent"] == agent.process.pid
        assert seen["launchers"] == [agent.process.pid, agent.workers[rank]]
        assert seen["arguments"] == ["word"]
        assert seen["cwd"] == str(agent.folder.parent)
        names = ("RANK", "WORLD_SIZE", "MARK", "MASTER_PORT", "GENERATION")
        assert [seen["environ"][name] for name in names] == [str(rank), "2", "second", "54321", "2"]
        threads = seen["environ"].get("OMP_NUM_THREADS")
        assert threads == os.environ.get("OMP_NUM_THREADS"), "set for the imports only"
        assert seen["cores"] == sorted(os.sched_getaffinity(0))
        assert seen["phases"] == [["stop", "prepare"], 2, 2]
    assert sorted((agent.folder / "output-2.txt").read_text().splitlines()) == [
        "output of 0 given",
        "output of 1 given",
    ]
    agent.wait_for_standbys()  # for the next restart
    connection = connect(agent.process.pid, SECONDS)
    assert connection is not None
    with connection:
        assert connection.recv(16) == b"", "this process is no child of the agent"
    assert agent.end_workers(signal.SIGTERM) == [70 + signal.SIGTERM] * 2, "passed on, as is the exit code"
    agent.start_workers()
    assert agent.seen(0)["relay"] == agent.workers[0]
    (agent.folder / "finish").touch()
    assert agent.wait_for_workers() == [7, 7]


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "killed", [pytest.param("rank", marks=FULL), "relay", pytest.param("server", marks=FULL), "agent"]
)
def test_death_of_a_process_ends_those_that_depend_on_it(agent: Agent, killed: str) -> None:
    agent.start_with_standbys()
    seen = [agent.seen(rank) for rank in range(2)]
    agent.wait_for_standbys()
    (server,) = agent.named("standby_server")  # a process that it starts has its name at first
    match killed:
        case "rank":
            os.kill(seen[1]["pid"], signal.SIGSEGV)
        case "relay":
            os.kill(agent.workers[1], signal.SIGKILL)
        case "server":
            server.kill()
        case "agent":
            agent.process.kill()
    if killed == "agent":  # the ranks end by themselves, after they have saved
        wait_until(lambda: not agent.named("standby-"), SECONDS, "without standbys")
        assert all(psutil.pid_exists(rank["pid"]) for rank in seen)
        (agent.folder / "finish").touch()
        agent.wait_until_gone()
        return
    if killed == "server":
        assert agent.wait_for_workers() == [-signal.SIGKILL] * 2
        agent.wait_until_gone()
        agent.start_workers()
        assert agent.seen(0)["relay"] is None
        return
    wait_until(lambda: not psutil.pid_exists(seen[1]["pid"]), SECONDS, "without the rank")
    assert psutil.pid_exists(seen[0]["pid"]), "its agent decides about the others"
    os.kill(agent.workers[0], signal.SIGTERM)
    first = -signal.SIGSEGV if killed == "rank" else -signal.SIGKILL
    assert agent.wait_for_workers() == [70 + signal.SIGTERM, first]


@pytest.mark.full
def test_worker_goes_on_by_itself_if_its_standby_cannot(agent: Agent) -> None:
    agent.start_workers(START="")
    [agent.seen(rank) for rank in range(2)]
    first, second = sorted(agent.wait_for_standbys(), key=lambda process: process.name())
    first.kill()
    second.suspend()
    agent.end_workers()
    agent.start_workers()
    seen = [agent.seen(rank) for rank in range(2)]
    assert [rank["relay"] for rank in seen] == [None, None]
    assert [rank["pid"] for rank in seen] == agent.workers
    assert seen[0]["phases"] == [["stop", "prepare"], 2, 1], "one was killed, and one does not answer"


def test_each_agent_has_one_server() -> None:
    listener = listen(os.getpid())
    assert listener is not None
    with listener:
        assert listen(os.getpid()) is None
        connection = connect(os.getpid(), 1)
        assert connection is not None
        with connection:
            peer = find_peer(connection)
            assert (peer.pid, peer.user) == (os.getpid(), os.geteuid())
            assert peer.is_same_user
            assert not replace(peer, user=peer.user + 1).is_same_user
    assert connect(os.getpid(), 1) is None


def test_server_of_another_user_gets_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen(os.getpid())
    assert listener is not None
    with listener:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert connect(os.getpid(), 1) is None


@pytest.mark.parametrize(
    ("launch", "count"),
    [
        (Launch(launcher=Launcher.TORCHELASTIC, restarts_left=1), 2),
        (Launch(launcher=Launcher.TORCHELASTIC, restarts_left=0), 0),
        (Launch(launcher=Launcher.TORCHELASTIC, node_range=NodeRange(1, 2)), 2),
        (Launch(launcher=Launcher.TORCHELASTIC, restarts_left=1, rank=9, local_rank=1), 0),
        (Launch(launcher=Launcher.DEEPSPEED, restarts_left=1), 0),
    ],
    ids=["restarts", "no restarts", "elastic", "another rank", "deepspeed"],
)
def test_first_rank_of_a_node_starts_standbys_if_torchrun_restarts(launch: Launch, count: int) -> None:
    world = World(ranks=16, ranks_per_node=8, device=Device.CPU)
    assert count_standbys_of_launch(ClusterConfig(standbys=2), world, launch) == count
    assert count_standbys_of_launch(ClusterConfig(), world, launch) == 0


def test_phases_before_the_start_of_a_worker() -> None:
    assert phases_before_start([], 9.0, ranks=2, standbys=2) is None, "nothing has ended"
    found = phases_before_start([5.0, 4.5, 7.0], 9.0, ranks=3, standbys=2)
    assert found == RestartPhases(4.5, (("stop", 7.0), ("prepare", 9.0)), ranks=3, standbys=2)
