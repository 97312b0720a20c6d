"""Choose the network interface over which the ranks of several machines communicate.

By default gloo resolves the machine's host name and listens on the resulting address. On many machines this
is a loopback address (Debian's /etc/hosts maps the name to 127.0.1.1), and on some the name does not resolve
at all; other machines then cannot connect. The rendezvous address is reachable from every machine, so the
interface that routes to it is the right one.
"""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")  # Loopback names: ranks that meet here are on one machine.


def find_interface_to(address: str) -> str | None:
    """Return the name of the interface through which this machine reaches ``address``, or that owns it.

    If ``address`` resolves to loopback, it is this machine's own host name; then the machine's only other
    running interface is returned. Returns None if there are several such interfaces or no route.
    """
    own = _source(address)
    if own is None:
        return None
    if not own.is_loopback or address in LOOPBACK_NAMES:
        return next((name for name, addresses in _interfaces().items() if own in addresses), None)
    others = [
        name
        for name, addresses in _interfaces(running=True).items()
        if any(
            not address_entry.is_loopback and not address_entry.is_link_local for address_entry in addresses
        )
    ]
    return others[0] if len(others) == 1 else None


def _source(address: str) -> Address | None:
    """Return this machine's source address on the route to ``address``.

    Connecting a datagram socket only looks up the route; it sends nothing.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:  # the name does not resolve, or there is no route
        return None


def _interfaces(*, running: bool = False) -> dict[str, list[Address]]:
    """Return addresses by interface. With ``running``, skip interfaces without a carrier, such as an idle
    Docker bridge.
    """
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    addresses_by_name = {
        name: [
            ipaddress.ip_address(address_entry.address.partition("%")[0])
            for address_entry in addresses
            if address_entry.family in families
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if not running:
        return addresses_by_name
    states = psutil.net_if_stats()
    return {
        name: addresses
        for name, addresses in addresses_by_name.items()
        if name in states and states[name].isup
    }
