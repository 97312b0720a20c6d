"""Check how ranks of several machines reach each other: host names, interfaces, RDMA ports, MASTER_ADDR."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.cluster.doctor.types import (
    CheckFinding,
    CheckVerdict,
    DoctorCheck,
    RunRequirements,
    fail,
    ok,
    warn,
)
from toolkit.plan.types import Device

# ---- the machine's name


@dataclass(frozen=True, slots=True)
class HostName:
    host: str
    addresses: tuple[str, ...]


def measure_name(requirements: RunRequirements) -> HostName:
    return HostName(host := socket.gethostname(), resolve(host))


def resolve(host: str) -> tuple[str, ...]:
    """Resolve a host name; empty if it does not resolve."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def assess_name(name: HostName, requirements: RunRequirements) -> Iterator[CheckFinding]:
    several = requirements.nodes > 1
    if not name.addresses and several:
        # Only a warning, since gloo and NCCL get an explicit interface (world/process_environment.py);
        # torchrun passes this name on.
        yield warn(
            f"{name.host} does not resolve",
            f"add {name.host} to DNS or /etc/hosts, or start with torchrun --local-addr=ADDRESS",
        )
    elif not name.addresses:
        yield ok(f"{name.host} does not resolve, which a single machine does not need")
    elif several and all(map(_is_loopback, name.addresses)):
        yield warn(
            f"{name.host} is {', '.join(name.addresses)}: libraries that resolve the host name get an "
            "address that other machines cannot reach",
            "set the interface: GLOO_SOCKET_IFNAME=eth0; or remove the name from the 127.* line of "
            "/etc/hosts",
        )
    else:
        yield ok(f"{name.host} is {', '.join(name.addresses[:3])}")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


# ---- interfaces


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterfaces:
    """Network interfaces and RDMA ports of a machine.

    Attributes:
        up: whether each interface is up, by name.
        rdma: state of each RDMA port, by ``device:port``.
        chosen: environment variables that select among them.
    """

    up: Mapping[str, bool]
    rdma: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)


VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


def measure_interfaces(requirements: RunRequirements) -> NetworkInterfaces:
    import psutil

    # From this process's network namespace: in a container /sys/class/net may show the host's.
    up = {name: interface.isup for name, interface in psutil.net_if_stats().items()}
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    rdma = {
        f"{port.parts[-4]}:{port.parts[-2]}": port.read_text(encoding="utf-8").partition(":")[2].strip()
        for port in ports
    }
    return NetworkInterfaces(
        up=up, rdma=rdma, chosen={name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    )


def assess_interfaces(interfaces: NetworkInterfaces, requirements: RunRequirements) -> Iterator[CheckFinding]:
    problems = list(_check_selection(interfaces, requirements))
    down = [port for port, state in interfaces.rdma.items() if state != "ACTIVE"]
    if requirements.device is Device.CUDA and requirements.nodes > 1 and down:
        problems.append(
            warn(
                f"RDMA port {', '.join(down)}: "
                f"{', '.join(dict.fromkeys(interfaces.rdma[port] for port in down))}",
                "check the cable and the subnet manager (ibstat); or exclude the device: NCCL_IB_HCA=^DEVICE",
            )
        )
    yield from problems
    if not problems:
        selection = "; ".join(f"{name}={value}" for name, value in interfaces.chosen.items()) or (
            "none is selected by name"
        )
        rdma = f"; RDMA: {', '.join(interfaces.rdma)}" if interfaces.rdma else ""
        yield ok(f"{', '.join(name for name, up in interfaces.up.items() if up)}{rdma}; {selection}")


def _check_selection(interfaces: NetworkInterfaces, requirements: RunRequirements) -> Iterator[CheckFinding]:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = interfaces.chosen.get(variable)
        if text is None or (variable.startswith("NCCL") and requirements.device is Device.CPU):
            continue
        named = select_interfaces(text, interfaces.up, exact=variable.startswith("GLOO"))
        there = ", ".join(interfaces.up)
        if not named:
            yield fail(
                f"{variable}={text}: no such interface; there are {there}",
                f"set it to one of them, or: unset {variable}",
            )
        elif not any(interfaces.up[name] for name in named):
            yield fail(
                f"{variable}={text}: the interface is down",
                f"bring it up, select another one of {there}, or: unset {variable}",
            )
        elif requirements.nodes > 1 and set(named) == {"lo"}:
            yield fail(
                f"{variable}={text} with {requirements.nodes} machines: the loopback interface does not "
                "reach other machines",
                f"set it to the interface of the machines' network, or: unset {variable}",
            )
    text = interfaces.chosen.get("NCCL_IB_HCA")
    if text is not None and requirements.device is Device.CUDA and not text.startswith("^"):
        devices = {port.partition(":")[0] for port in interfaces.rdma}
        if not any(select_interfaces(text, dict.fromkeys(devices, True), exact=False)):
            yield fail(
                f"NCCL_IB_HCA={text}: no such RDMA device; there are {', '.join(sorted(devices)) or 'none'}",
                "set it to one of them, or: unset NCCL_IB_HCA",
            )


def select_interfaces(text: str, there: Mapping[str, bool], *, exact: bool) -> list[str]:
    """Return the interfaces that a variable selects.

    gloo takes comma-separated names. NCCL takes prefixes, exclusions after ``^``, or exact names after ``=``
    (NCCL user guide, NCCL_SOCKET_IFNAME).
    """
    without = not exact and text.startswith("^")
    whole = exact or text.lstrip("^").startswith("=")
    entries = [entry.partition(":")[0] for entry in text.lstrip("^=").split(",") if entry]
    return [
        name
        for name in there
        if without != any(name == entry if whole else name.startswith(entry) for entry in entries)
    ]


# ---- MASTER_ADDR


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterAddress:
    """The address of the rendezvous.

    Attributes:
        addresses: what MASTER_ADDR resolves to.
        taken: why the port cannot be opened; None: it can, or another machine serves it.
    """

    addresses: tuple[str, ...]
    taken: str | None = None


def measure_master_address(requirements: RunRequirements) -> MasterAddress:
    host = requirements.address or "127.0.0.1"
    addresses = resolve(host)
    return MasterAddress(
        addresses=addresses,
        taken=_probe_port(requirements.serves_port) if requirements.serves_port is not None else None,
    )


def _probe_port(port: int) -> str | None:
    """Bind ``port`` on all addresses, like the store's server, and return the error if it fails. 0: any free
    port.
    """
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None


def assess_master_address(master: MasterAddress, requirements: RunRequirements) -> Iterator[CheckFinding]:
    host = requirements.address or "127.0.0.1"
    if requirements.ranks == 1:
        yield ok("not needed for one rank")
    elif not master.addresses:
        yield fail(
            f"MASTER_ADDR={host} does not resolve",
            "use its IP address, or add the name to DNS or /etc/hosts of all machines",
        )
    elif requirements.nodes > 1 and all(map(_is_loopback, master.addresses)):
        yield fail(
            f"MASTER_ADDR={host} is {', '.join(master.addresses)} with {requirements.nodes} machines: only "
            "one of them can reach it",
            "set the first machine's address: torchrun --master_addr (or --rdzv-endpoint), deepspeed "
            "--master_addr",
        )
    elif master.taken is not None:
        yield fail(
            f"port {requirements.serves_port}: {master.taken}",
            "another run may use it: set torchrun --master_port N or deepspeed --master_port N; torchrun "
            "--standalone picks a free one",
        )
    else:
        free = (
            "a free port was found"
            if requirements.serves_port == 0
            else f"port {requirements.serves_port} is free"
        )
        served = "" if requirements.serves_port is None else f", {free}"
        yield ok(f"{host} is {', '.join(master.addresses[:3])}{served}")


MASTER_ADDRESS_CHECK = DoctorCheck(
    name="master address",
    how="MASTER_ADDR is resolved; if this process serves the port, it is opened",
    measure=measure_master_address,
    assess=assess_master_address,
    hang_remedy="a name server does not respond: set MASTER_ADDR to an IP address",
)
CHECKS = (
    MASTER_ADDRESS_CHECK,
    DoctorCheck(
        name="host name",
        how="this machine's name is resolved",
        measure=measure_name,
        assess=assess_name,
        hang_verdict=CheckVerdict.WARN,
        hang_remedy="a name server does not respond: check /etc/resolv.conf, or add the name to /etc/hosts",
    ),
    DoctorCheck(
        name="interfaces",
        how="interface flags, /sys/class/infiniband and the environment",
        measure=measure_interfaces,
        assess=assess_interfaces,
    ),
)
