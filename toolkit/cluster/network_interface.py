"""Which network interface the ranks of several machines talk over.

gloo, left alone, looks up the machine's own name and listens at what that resolves to: on many machines that is a loopback address
(Debian's /etc/hosts says 127.0.1.1), on some nothing, and then the other machines wait for nobody. Where ranks meet has an address
that reaches every machine, so the way to it is the one to take.
"""

from __future__ import annotations

import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK_NAMES = (
    "127.0.0.1",
    "::1",
    "localhost",
)  # on every machine its own: who meets there is on one machine, whatever it calls its nodes


def find_interface_to(address: str) -> str | None:
    """The name of the interface through which this machine reaches ``address``, or that has it.

    Where only a loopback answers, ``address`` is this machine's own name, which resolves to itself here and elsewhere to something else;
    then the machine's only other interface is the answer. None where there are several, or where the system does not say.
    """
    own = _source(address)
    if own is None:
        return None
    if not own.is_loopback or address in LOOPBACK_NAMES:
        return next((name for name, addresses in _interfaces().items() if own in addresses), None)
    others = [
        name
        for name, addresses in _interfaces(running=True).items()
        if any(not one.is_loopback and not one.is_link_local for one in addresses)
    ]
    return others[0] if len(others) == 1 else None


def _source(address: str) -> Address | None:
    """This machine's address on the way there. Nothing is sent: connecting a datagram socket only looks up the route."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:  # the name does not resolve, or there is no route
        return None


def _interfaces(*, running: bool = False) -> dict[str, list[Address]]:
    """Addresses by interface. ``running``: without those that have no carrier, as the bridge of a Docker without containers."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [
            ipaddress.ip_address(one.address.partition("%")[0]) for one in addresses if one.family in families
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if not running:
        return found
    states = psutil.net_if_stats()
    return {name: addresses for name, addresses in found.items() if name in states and states[name].isup}
