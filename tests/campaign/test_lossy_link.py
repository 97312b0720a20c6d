"""The cable of the fault campaign that delays and loses frames, between two simulated machines.

pytest tests/campaign/test_lossy_link.py        needs Linux, root and /dev/net/tun
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.lossy_link import LossyLink, replace_with_lossy_link
from benchmarks.faults.processes import why_no_lossy_link_between_nodes
from tests.cluster.simulated_nodes import TwoNodes, two_nodes

pytestmark = pytest.mark.skipif(
    why_no_lossy_link_between_nodes() is not None, reason=str(why_no_lossy_link_between_nodes())
)
WARM_UP, ECHOES = 20, 25
# Sends datagrams one by one, and prints the shortest round trip in seconds and how many came back.
CLIENT = f"""
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.settimeout(float(sys.argv[2]))
trips = []
for number in range({ECHOES}):
    began = time.monotonic()
    peer.sendto(bytes([number]), (sys.argv[1], 7000))
    try:
        while peer.recv(10) != bytes([number]):
            pass
        trips.append(time.monotonic() - began)
    except TimeoutError:
        pass
print(min(trips, default=0.0), len(trips))
"""
SERVER = """
import socket
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
peer.bind(("", 7000))
while True:
    data, sender = peer.recvfrom(10)
    peer.sendto(data, sender)
"""


@pytest.fixture(scope="module")
def linked_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TwoNodes, LossyLink]]:
    folder = tmp_path_factory.mktemp("linked-nodes")
    with (
        two_nodes(folder) as nodes,
        replace_with_lossy_link(nodes, seed=1) as link,
        nodes[1].start([sys.executable, "-c", SERVER], folder / "server.txt"),
    ):
        for _ in range(WARM_UP):  # the server starts, and addresses are resolved
            if echo(nodes, 0.3)[1] == ECHOES:
                break
        yield nodes, link


def echo(nodes: TwoNodes, timeout: float) -> tuple[float, int]:
    """Return the shortest round trip in seconds, and how many of ``ECHOES`` came back."""
    output = nodes[0].run(sys.executable, "-c", CLIENT, nodes[1].address, str(timeout), seconds=120)
    shortest, count = output.split()
    return float(shortest), int(count)


def test_link_delivers_every_frame(linked_nodes: tuple[TwoNodes, LossyLink]) -> None:
    nodes, _ = linked_nodes
    shortest, count = echo(nodes, 5)
    assert count == ECHOES
    assert shortest < 0.1


def test_delay_counts_in_each_direction(
    linked_nodes: tuple[TwoNodes, LossyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, link = linked_nodes
    monkeypatch.setattr(link, "delay_seconds", 0.06)
    shortest, count = echo(nodes, 5)
    assert count == ECHOES
    assert shortest >= 0.12


def test_lossy_link_loses_some_frames(
    linked_nodes: tuple[TwoNodes, LossyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, link = linked_nodes
    monkeypatch.setattr(link, "lost", 0.3)
    assert 2 <= echo(nodes, 0.1)[1] <= 22, "half of the round trips are expected"


@pytest.mark.parametrize("sender", [0, 1])
def test_half_open_link_delivers_in_one_direction(
    sender: int, linked_nodes: tuple[TwoNodes, LossyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, link = linked_nodes
    sent = [received(nodes, number) for number in range(2)]
    with monkeypatch.context() as context:
        context.setattr(link, "blocked", frozenset({sender}))
        assert echo(nodes, 0.05)[1] == 0
    after = [received(nodes, number) for number in range(2)]
    assert after[1 - sender] == sent[1 - sender]
    assert sender == 0 or after[1] >= sent[1] + ECHOES, "the requests still arrive"


def received(nodes: TwoNodes, number: int) -> int:
    """The packets that a machine has received over the link."""
    statistics = Path(f"/proc/{nodes[number].pid}/net/dev").read_text()
    (line,) = (line for line in statistics.splitlines() if "wire:" in line)
    return int(line.split(":")[1].split()[1])
