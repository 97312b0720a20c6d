"""Rendezvous of fabricated launches, as threads of one process with a real store."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, PrefixStore

from toolkit.cluster.world import rendezvous
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.cluster.world.rendezvous import PeerExited, Rendezvous
from toolkit.errors import ExitCode, InputError
from toolkit.testing.dist import find_free_port


@pytest.fixture(autouse=True)
def no_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is imported already, so the other ranks need not wait for rank 0."""
    monkeypatch.setattr(rendezvous, "HEAD_START_SECONDS", 0.0)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Ranks:
    """``count`` ranks that use one port."""

    def __init__(
        self, count: int, port: int | None = None, overrides: tuple[str, ...] = ("a=1",), **keys: object
    ) -> None:
        self.port = port or find_free_port()
        launches = [
            Launch(
                **{
                    "launcher": Launcher.DEEPSPEED,
                    "rank": rank,
                    "local_rank": rank,
                    "ranks": count,
                    "ranks_per_node": count,
                    "port": self.port,
                    **keys,
                }
            )  # type: ignore[arg-type]
            for rank in range(count)
        ]
        self.meetings = [Rendezvous(launch, overrides, seconds=10) for launch in launches]

    def others(self, threads: ThreadPoolExecutor, do: Callable[[Rendezvous], object]) -> list[Future[object]]:
        return [threads.submit(do, meeting) for meeting in self.meetings[1:]]


def test_published_message_reaches_all_ranks(threads: ThreadPoolExecutor) -> None:
    """hydra#2070: otherwise every rank composes the configuration and creates a folder."""
    ranks = Ranks(4)
    heard = ranks.others(threads, lambda meeting: meeting.receive("start"))
    time.sleep(0.1)  # the others connect first
    ranks.meetings[0].publish("start", {"yaml": "a: ü", "attempt": 3})
    assert [future.result(10) for future in heard] == [[{"yaml": "a: ü", "attempt": 3}]] * 3


def listening(port: int) -> set[str]:
    """Return the addresses at which this machine listens on ``port``, from /proc/net."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


@pytest.mark.parametrize("address", ["127.0.0.1", "a-name-that-resolves-nowhere.invalid"])
def test_single_node_store_listens_on_loopback_only(threads: ThreadPoolExecutor, address: str) -> None:
    ranks = Ranks(2, address=address)
    heard = ranks.others(threads, lambda meeting: meeting.receive("start"))
    ranks.meetings[0].publish("start", {"n": 1})
    assert heard[0].result(10) == [{"n": 1}]
    assert listening(ranks.port) == {"0100007F"}


def test_multi_node_store_listens_on_every_interface() -> None:
    ranks = Ranks(2, ranks_per_node=1)
    ranks.meetings[0].publish("start", {"n": 1})
    assert listening(ranks.port) & {"00000000", "0" * 32}


def test_receive_waits_for_all_messages(threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(2)
    ranks.meetings[0].publish("data/0", {"n": 0})
    heard = ranks.others(threads, lambda meeting: meeting.receive("data/0", "data/1"))[0]
    time.sleep(0.2)
    assert not heard.done()
    ranks.meetings[0].publish("data/1", {"n": 1})
    assert heard.result(10) == [{"n": 0}, {"n": 1}]


def test_abort_reaches_all_peers_before_rank_0_exits(threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(3)
    first = threads.submit(ranks.meetings[0].abort_peers, ExitCode.USER)
    early = threads.submit(ranks.meetings[1].receive, "start")
    with pytest.raises(PeerExited) as left:
        early.result(10)
    assert left.value.code == ExitCode.USER
    time.sleep(0.2)
    assert not first.done()  # one rank is still importing torch
    with pytest.raises(PeerExited):
        ranks.meetings[2].receive("start")
    first.result(10)
    assert ranks.meetings[2].wait_for_abort(0)


@pytest.mark.parametrize("gone", ["set", "add"])
def test_lost_store_counts_as_abort(gone: str) -> None:
    class Leaving:
        def set(self, name: str, text: str) -> None:
            self._call("set")

        def add(self, name: str, count: int) -> int:
            self._call("add")
            return 0

        def _call(self, name: str) -> None:
            if name == gone:
                raise DistNetworkError("Connection reset by peer")

    meeting = Ranks(2).meetings[1]
    meeting._kv_store = Leaving()  # type: ignore[assignment]
    meeting.abort_peers(ExitCode.USER)


def test_wait_for_abort_times_out(threads: ThreadPoolExecutor) -> None:
    ranks = Ranks(2)
    ranks.meetings[0].publish("start", {})
    assert not ranks.meetings[1].wait_for_abort(0.1)


def test_without_a_store_a_failed_rank_soon_reports_its_error_itself() -> None:
    began = time.monotonic()
    for rank in (1, 2):  # rank 0 was killed before it served the store
        assert not Ranks(3).meetings[rank].wait_for_abort(0.3)
        with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the store"):
            Ranks(3).meetings[rank].is_first("report", 0.3)
    assert time.monotonic() - began < 5


def test_receive_times_out() -> None:
    ranks = Ranks(2)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.3 s for the store at 127"):
        Rendezvous(ranks.meetings[1]._launch, [], seconds=0.3).receive("start")
    ranks.meetings[0].publish("other", {})
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.3 s for start"):
        ranks.meetings[1].receive("start", seconds=0.3)
    assert time.monotonic() - began < 5


def test_torchrun_restart_starts_a_new_generation(threads: ThreadPoolExecutor) -> None:
    """The agent's store outlives the ranks and keeps earlier messages; the first attempt's server acts as the
    agent.
    """
    first = Ranks(2)
    first.meetings[0].publish("start", {"attempt": 0})
    for attempt in (1, 2):
        ranks = Ranks(2, port=first.port, agent_store=True)
        heard = ranks.others(threads, lambda meeting: meeting.receive("start"))[0]
        time.sleep(0.2)
        assert not heard.done()
        ranks.meetings[0].publish("start", {"attempt": attempt})
        assert heard.result(10) == [{"attempt": attempt}]


def test_generation_ignores_agent_restart_counts(threads: ThreadPoolExecutor) -> None:
    """Each torchrun agent counts failures of its own node's ranks: after a rank was killed, two nodes have
    counts 1 and 0.
    """
    agent = Ranks(2)
    agent.meetings[0].publish("start", {"attempt": 0})
    three = {
        "launcher": Launcher.TORCHELASTIC,
        "ranks": 3,
        "ranks_per_node": 1,
        "port": agent.port,
        "agent_store": True,
    }
    launches = [
        Launch(**three, rank=rank, restart=restart)  # type: ignore[arg-type]
        for rank, restart in enumerate((0, 2, 1))
    ]
    meetings = [Rendezvous(launch, ("a=1",), seconds=10) for launch in launches]
    heard = [threads.submit(meeting.receive, "start") for meeting in meetings[1:]]
    meetings[0].publish("start", {"attempt": 1})
    assert [future.result(10) for future in heard] == [[{"attempt": 1}]] * 2


def test_dead_rank_does_not_block_a_generation(threads: ThreadPoolExecutor) -> None:
    """It was killed while waiting for rank 0 or between two messages; ranks of the next start take its
    place.
    """
    agent = Ranks(2)
    agent.meetings[0].publish("start", {"attempt": 0})
    gone = Rendezvous(Ranks(2, port=agent.port, agent_store=True).meetings[1]._launch, ("a=1",), seconds=0.5)
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.5 s for rank 0"):
        gone.receive("start")
    PrefixStore(gone._prefix, gone._open()).add("asked", 1)
    ranks = Ranks(2, port=agent.port, agent_store=True)
    heard = ranks.others(threads, lambda meeting: meeting.receive("start"))[0]
    ranks.meetings[0].publish("start", {"attempt": 1})
    assert heard.result(10) == [{"attempt": 1}]


def test_generation_times_out_without_all_ranks() -> None:
    agent = Ranks(2)
    agent.meetings[0].publish("start", {"attempt": 0})
    alone = Rendezvous(Ranks(2, port=agent.port, agent_store=True).meetings[0]._launch, ("a=1",), seconds=0.3)
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.3 s for all 2 ranks to join"):
        alone.publish("start", {})


def test_unresolvable_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(place: object, timeout: float) -> socket.socket:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "create_connection", unknown)
    launch = Launch(
        launcher=Launcher.TORCHELASTIC,
        rank=1,
        ranks=2,
        ranks_per_node=1,
        address="node0",
        port=1,
        agent_store=True,
    )
    with pytest.raises(TimeoutError, match=r"the store at node0:1, .* --local-addr=ADDRESS"):
        Rendezvous(launch, (), seconds=0.3).receive("start")


def test_other_launch_on_same_port_is_separate() -> None:
    item = Ranks(2)
    item.meetings[0].publish("start", {})
    stranger = Ranks(2, port=item.port, overrides=("a=2",))
    with pytest.raises(TimeoutError):
        stranger.meetings[1].receive("start", seconds=0.3)


def test_occupied_port_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        meeting = Ranks(2, port=taken.getsockname()[1]).meetings[0]
        with pytest.raises(InputError, match="--master_port"):
            meeting.publish("start", {})
        meeting.abort_peers(ExitCode.USER)  # there are no peers, which is not a second error
