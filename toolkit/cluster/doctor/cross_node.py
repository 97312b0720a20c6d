"""Judge all machines together: the plan, uniformity, clocks and links. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.cluster.doctor.clocks import ClockOffset
from toolkit.cluster.doctor.types import CheckFinding, CheckVerdict, MachineReport, fail, ok, unknown, warn
from toolkit.commands import command_line
from toolkit.errors import Problem, Severity
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import Device, RunPlan

# Logs and status files of several machines are compared by time, and object stores reject requests signed
# with a wrong time (S3 beyond 15 minutes: RequestTimeTooSkewed).
WARN_SECONDS, FAIL_SECONDS = 0.5, 300.0
SLOW_GROUP_FRACTION = 0.5  # relative to the fastest group along an axis


def _label(check: str, how: str, findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    return [replace(finding, check=check, how=how) for finding in findings]


def check_plan(plan: RunPlan | None, problems: Sequence[Problem]) -> list[CheckFinding]:
    """Judge the plan.

    Args:
        problems: broken rules, and warnings.
    """
    return _label(
        "plan", f"rules and memory estimate of {command_line('plan')}", _assess_plan(plan, problems)
    )


def _assess_plan(plan: RunPlan | None, problems: Sequence[Problem]) -> Iterator[CheckFinding]:
    for problem in problems:
        make = fail if problem.severity is Severity.ERROR else warn
        yield make(f"{problem.seen}: {problem.rule}", problem.remedy)
    if plan is None:
        return
    have = memory_bytes(plan.world) if plan.world.device is Device.CUDA else plan.world.host_memory_bytes
    if plan.memory is None or have is None:
        yield unknown(
            f"{plan.world.ranks} ranks; "
            f"{'memory of model.target' if plan.memory is None else 'memory of the devices'} unknown"
        )
        return
    needed = plan.memory.device_total
    unit = "a GPU" if plan.world.device is Device.CUDA else "a machine"
    ranks = f"{plan.world.ranks} rank{'s' * (plan.world.ranks > 1)}"
    yield ok(f"{ranks}, {needed / 1e9:,.1f} GB each; {unit} has {have / 1e9:,.1f} GB")


def check_uniformity(machines: Sequence[MachineReport]) -> list[CheckFinding]:
    """Compare versions, drivers and GPUs of all machines."""
    if len(machines) < 2:
        return []
    return _label("uniformity", "properties of all machines, compared", _assess_uniformity(machines))


def _assess_uniformity(machines: Sequence[MachineReport]) -> Iterator[CheckFinding]:
    names = dict.fromkeys(name for machine in machines for name in machine.traits)
    differing = False
    for name in names:
        hosts_by_value: dict[str, list[str]] = {}
        for machine in machines:
            hosts_by_value.setdefault(machine.traits.get(name, "unknown"), []).append(machine.host)
        if len(hosts_by_value) > 1:
            differing = True
            ordered = sorted(hosts_by_value.items(), key=lambda item: -len(item[1]))
            text = "; ".join(f"{value} on {_format_hosts(hosts)}" for value, hosts in ordered)
            # Ranks with different package versions may exchange incompatible messages; different GPUs or
            # drivers only cost time.
            make = warn if name in ("GPUs", "driver", "Python") else fail
            yield make(
                f"{name}: {text}",
                "use one image or environment on all machines"
                if make is fail
                else "leave out the differing machines, or expect the slowest to set the pace",
            )
    if not differing:
        yield ok(f"{len(machines)} machines have the same {', '.join(names)}")


def _format_hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def check_clocks(offsets: Mapping[str, ClockOffset]) -> list[CheckFinding]:
    """Judge the clocks.

    Args:
        offsets: by machine name; relative to the first machine, which is not included.
    """
    if not offsets:
        return []
    return _label(
        "clocks",
        "the first machine's time, read through the store; half the round-trip time is the error",
        _assess_clocks(offsets),
    )


def _assess_clocks(offsets: Mapping[str, ClockOffset]) -> Iterator[CheckFinding]:
    wrong = False
    for host, offset in offsets.items():
        least = abs(offset.seconds) - offset.error_seconds  # lower bound of the offset
        if least > WARN_SECONDS:
            wrong = True
            make = fail if least > FAIL_SECONDS else warn
            side = "ahead of" if offset.seconds > 0 else "behind"
            yield make(
                f"{host} is {abs(offset.seconds):,.2f} s {side} the first machine",
                "start chronyd or systemd-timesyncd there: chronyc makestep",
            )
    if not wrong:
        host, worst = max(offsets.items(), key=lambda item: abs(item[1].seconds))
        yield ok(
            f"offsets of at most {abs(worst.seconds) * 1000:,.1f} ms ({host}; ± "
            f"{worst.error_seconds * 1000:,.1f} ms)"
        )


LINKS_METHOD = (
    "all-reduces over the groups along each axis and over all ranks: a few bytes for latency, "
    "MiBs for bus bandwidth"
)


def check_links(rows: Sequence[Mapping[str, Any]], seconds: float) -> list[CheckFinding]:
    """Judge the links.

    Args:
        rows: one per axis, from toolkit/observe/comm_benchmark.py.
        seconds: how long the ranks took to connect.
    """
    return _label("rendezvous", LINKS_METHOD, _assess_links(rows, seconds))


def _assess_links(rows: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[CheckFinding]:
    yield ok(f"all ranks connected in {seconds:.1f} s")
    for row in rows:
        slow, fast = row["bandwidth_bytes_per_second"], row["best_bandwidth_bytes_per_second"]
        text = (
            f"{row['axis']} ({row['ranks']} ranks): {row['latency_p50_seconds'] * 1e6:,.0f} µs (p99 "
            f"{row['latency_p99_seconds'] * 1e6:,.0f}), bus bandwidth {slow / 1e9:.2f} GB/s"
        )
        if slow < SLOW_GROUP_FRACTION * fast:
            ranks = ", ".join(map(str, row["slowest_ranks"][:8]))
            yield warn(
                f"{text} between ranks {ranks}; {fast / 1e9:.2f} GB/s in the fastest group",
                "repeat while nothing else runs there; then check the links of these ranks' machines "
                "(nvidia-smi topo -m, nvidia-smi nvlink -s, ibstat), or leave them out",
            )
        else:
            yield ok(text)


def report_single_rank() -> list[CheckFinding]:
    return _label("rendezvous", LINKS_METHOD, [ok("one rank: no peers")])


def report_skipped(why: str) -> list[CheckFinding]:
    return _label("rendezvous", LINKS_METHOD, [unknown(f"not tried: {why}")])


def report_failed_rendezvous(why: str) -> list[CheckFinding]:
    remedy = (
        "start the same command on all machines, with one MASTER_ADDR and MASTER_PORT that the others can "
        "reach (firewall); if there are several interfaces, name the one between them: "
        "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows more"
    )
    return _label("rendezvous", LINKS_METHOD, [CheckFinding(CheckVerdict.FAIL, why, remedy)])
