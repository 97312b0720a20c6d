"""What is judged of all machines together: alike, clocks, links; and the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.cluster.doctor.clocks import Offset
from toolkit.cluster.doctor.types import Finding, MachineReport, Verdict, fail, ok, unknown, warn
from toolkit.errors import Problem, Severity
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import Device, RunPlan

# Logs and status files of several machines are read side by side; and stores refuse requests that are signed with a wrong time (S3
# beyond 15 minutes: its error RequestTimeTooSkewed).
WARN_SECONDS, FAIL_SECONDS = 0.5, 300.0
SLOWEST = 0.5  # of the fastest group along an axis


def _of(check: str, how: str, findings: Iterable[Finding]) -> list[Finding]:
    return [replace(finding, check=check, how=how) for finding in findings]


def of_plan(plan: RunPlan | None, problems: Sequence[Problem]) -> list[Finding]:
    """
    Args:
        problems: the rules that the run breaks, and warnings.
    """
    return _of("plan", "the rules and bytes of launch/plan.py", _plan(plan, problems))


def _plan(plan: RunPlan | None, problems: Sequence[Problem]) -> Iterator[Finding]:
    for problem in problems:
        tell = fail if problem.severity is Severity.ERROR else warn
        yield tell(f"{problem.seen}: {problem.rule}", problem.remedy)
    if plan is None:
        return
    have = memory_bytes(plan.world) if plan.world.device is Device.CUDA else plan.world.host_memory_bytes
    if plan.memory is None or have is None:
        yield unknown(
            f"{plan.world.ranks} ranks; {'bytes of model.target' if plan.memory is None else 'memory of the devices'} not known"
        )
        return
    need = plan.memory.device_total
    unit = "a GPU" if plan.world.device is Device.CUDA else "a machine"
    yield ok(
        f"{plan.world.ranks} rank{'s' * (plan.world.ranks > 1)}, {need / 1e9:,.1f} GB each; {unit} has {have / 1e9:,.1f} GB"
    )


def alike(machines: Sequence[MachineReport]) -> list[Finding]:
    """Versions, drivers and GPUs of all machines."""
    if len(machines) < 2:
        return []
    return _of("alike", "what the machines say of themselves, compared", _alike(machines))


def _alike(machines: Sequence[MachineReport]) -> Iterator[Finding]:
    names = dict.fromkeys(name for machine in machines for name in machine.traits)
    differing = False
    for name in names:
        having: dict[str, list[str]] = {}
        for machine in machines:
            having.setdefault(machine.traits.get(name, "unknown"), []).append(machine.host)
        if len(having) > 1:
            differing = True
            ordered = sorted(having.items(), key=lambda item: -len(item[1]))
            said = "; ".join(f"{value} on {_hosts(hosts)}" for value, hosts in ordered)
            # Ranks of different versions exchange messages that they do not understand; unlike GPUs or drivers only wait.
            tell = warn if name in ("GPUs", "driver", "Python") else fail
            yield tell(
                f"{name}: {said}",
                "use one image or environment on all machines"
                if tell is fail
                else "leave out the machines that are unlike, or expect the slowest to set the pace",
            )
    if not differing:
        yield ok(f"{len(machines)} machines have the same {', '.join(names)}")


def _hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def clocks(offsets: Mapping[str, Offset]) -> list[Finding]:
    """
    Args:
        offsets: by name, of every machine but the first, which is what they are compared with.
    """
    if not offsets:
        return []
    return _of(
        "clocks",
        "the first machine's time, asked through the store; half of the way there and back is the error",
        _clocks(offsets),
    )


def _clocks(offsets: Mapping[str, Offset]) -> Iterator[Finding]:
    wrong = False
    for host, offset in offsets.items():
        least = abs(offset.seconds) - offset.error_seconds  # what it is apart for certain
        if least > WARN_SECONDS:
            wrong = True
            tell = fail if least > FAIL_SECONDS else warn
            side = "ahead of" if offset.seconds > 0 else "behind"
            yield tell(
                f"{host} is {abs(offset.seconds):,.2f} s {side} the first machine",
                "start chronyd or systemd-timesyncd there: chronyc makestep",
            )
    if not wrong:
        host, worst = max(offsets.items(), key=lambda item: abs(item[1].seconds))
        yield ok(
            f"at most {abs(worst.seconds) * 1000:,.1f} ms apart ({host}; ± {worst.error_seconds * 1000:,.1f} ms)"
        )


HOW_LINKS = "all-reduces over groups of the ranks along each axis and of all: a few bytes for latency, MiBs for bus bandwidth"


def links(rows: Sequence[Mapping[str, Any]], seconds: float) -> list[Finding]:
    """
    Args:
        rows: of monitor/link_probe.py, one an axis.
        seconds: that the ranks took to meet.
    """
    return _of("ranks meet", HOW_LINKS, _links(rows, seconds))


def _links(rows: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[Finding]:
    yield ok(f"they met in {seconds:.1f} s")
    for row in rows:
        slow, fast = row["bandwidth_bytes_per_second"], row["best_bandwidth_bytes_per_second"]
        said = (
            f"{row['axis']} ({row['ranks']} ranks): {row['latency_p50_seconds'] * 1e6:,.0f} µs (p99 "
            f"{row['latency_p99_seconds'] * 1e6:,.0f}), bus bandwidth {slow / 1e9:.2f} GB/s"
        )
        if slow < SLOWEST * fast:
            ranks = ", ".join(map(str, row["slowest_ranks"][:8]))
            yield warn(
                f"{said} between ranks {ranks}; {fast / 1e9:.2f} GB/s in the fastest group",
                "look again while nothing else runs there; then at the links of these ranks' machines (nvidia-smi topo -m, "
                "nvidia-smi nvlink -s, ibstat), or leave them out",
            )
        else:
            yield ok(said)


def single_rank() -> list[Finding]:
    return _of("ranks meet", HOW_LINKS, [ok("one rank: nobody to meet")])


def not_tried(why: str) -> list[Finding]:
    return _of("ranks meet", HOW_LINKS, [unknown(f"not tried: {why}")])


def not_met(why: str) -> list[Finding]:
    remedy = (
        "all machines start the same command, with one MASTER_ADDR and MASTER_PORT that the others reach (firewall); the interface "
        "between them is named where there are several: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more"
    )
    return _of("ranks meet", HOW_LINKS, [Finding(Verdict.FAIL, why, remedy)])
