"""Choice of gloo's interface on several machines."""

from __future__ import annotations

import ipaddress
import socket
import sys
from pathlib import Path

import pytest

from tests.cluster.simulated_nodes import ADDRESSES, two_nodes
from toolkit.cluster.world import network_interface
from toolkit.cluster.world.environment import Launch
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.cluster.world.network_interface import find_interface_to
from toolkit.cluster.world.process_environment import set_defaults
from toolkit.plan.types import Device, World

TWO = World(ranks=2, ranks_per_node=1, device=Device.CPU)
LOOPBACK, LINK = ["127.0.0.1", "::1"], ["10.0.0.5", "fe80::1"]


def machine(monkeypatch: pytest.MonkeyPatch, way: str | None, **interfaces: list[str]) -> None:
    """A machine with these interfaces, whose route to the rendezvous starts at address ``way``."""
    monkeypatch.setattr(
        network_interface, "_source", lambda address: ipaddress.ip_address(way) if way is not None else None
    )
    found = {
        name: [ipaddress.ip_address(item) for item in addresses] for name, addresses in interfaces.items()
    }
    monkeypatch.setattr(network_interface, "_interfaces", lambda running=False: found)


@pytest.mark.parametrize(
    ("way", "interfaces", "expected"),
    [
        ("10.0.0.5", {"lo": LOOPBACK, "eth0": LINK, "eth1": ["192.168.0.5"]}, "eth0"),
        ("fd00::5", {"lo": LOOPBACK, "eth0": LINK, "ib0": ["fd00::5"]}, "ib0"),
        (
            "127.0.1.1",
            {"lo": LOOPBACK, "eth0": LINK},
            "eth0",
        ),  # the first node's own name, as in Debian's /etc/hosts
        ("127.0.1.1", {"lo": LOOPBACK, "eth0": LINK, "eth1": ["192.168.0.5"]}, None),  # ambiguous
        ("127.0.1.1", {"lo": LOOPBACK, "eth0": ["fe80::1"]}, None),  # no address of its own
        (None, {"lo": LOOPBACK, "eth0": LINK}, None),  # the name does not resolve
        ("10.0.0.9", {"lo": LOOPBACK, "eth0": LINK}, None),
    ],
)
def test_interface_routes_to_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, way: str | None, interfaces: dict[str, list[str]], expected: str | None
) -> None:
    machine(monkeypatch, way, **interfaces)
    assert find_interface_to("first") == expected


@pytest.mark.parametrize(("address", "way"), [("127.0.0.1", "127.0.0.1"), ("localhost", "::1")])
def test_nodes_on_one_machine_use_loopback(monkeypatch: pytest.MonkeyPatch, address: str, way: str) -> None:
    machine(monkeypatch, way, eth0=LINK, lo=LOOPBACK)
    assert find_interface_to(address) == "lo"


def test_user_interface_is_kept_and_single_node_uses_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "10.0.0.5", lo=LOOPBACK, eth0=LINK)
    for environ, world, expected in (
        ({}, TWO, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, TWO, "ib0"),
        ({}, World(ranks=2, ranks_per_node=2, device=Device.CPU), "lo"),
    ):
        set_defaults(environ, Launch(), world, MachineInfo(cores=1), None)
        assert environ["GLOO_SOCKET_IFNAME"] == expected


def test_unresolvable_name_gives_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert find_interface_to("first") is None


def test_interface_on_two_nodes_without_names(tmp_path: Path) -> None:
    """On the first node, the route to its own address uses loopback, but another interface owns the
    address.
    """
    code = (
        "import sys; from toolkit.cluster.world.network_interface import find_interface_to as find\n"
        "print(find(sys.argv[1]), find(sys.argv[2]))"
    )
    with two_nodes(tmp_path) as nodes:
        for node in nodes:
            assert node.run(sys.executable, "-c", code, ADDRESSES[0], "127.0.1.1").split() == ["wire", "wire"]
