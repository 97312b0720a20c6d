"""Run the checks: one process per machine runs them, rank 0 gathers the reports, and clocks are compared."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial

from toolkit.cluster.doctor import clocks, compilers, cross_node, disk, gpus, host, network, software
from toolkit.cluster.doctor.timeout import TimedCall, TimedResult
from toolkit.cluster.doctor.types import (
    CheckFinding,
    CheckVerdict,
    DoctorCheck,
    DoctorReport,
    MachineReport,
    RunRequirements,
    compute_requirements,
    warn,
)
from toolkit.cluster.world.environment import Launch
from toolkit.cluster.world.rendezvous import Rendezvous
from toolkit.errors import InputError, Problem
from toolkit.plan.types import RunPlan

CHECKS: tuple[DoctorCheck, ...] = (
    *software.CHECKS,
    *compilers.CHECKS,
    *gpus.CHECKS,
    *host.CHECKS,
    disk.CHECK,
    *network.CHECKS,
)
# time for a machine's report; its checks run concurrently, each with its own timeout
CHECKS_SECONDS = 90.0
MIN_RECEIVE_SECONDS = 0.1  # for a message that has already arrived


def run_checks(
    requirements: RunRequirements, node: int = 0, checks: Sequence[DoctorCheck] = CHECKS
) -> MachineReport:
    """Run all checks of this machine concurrently, so that this takes as long as the slowest one."""
    calls = [(check, TimedCall(partial(check.measure, requirements), check.seconds)) for check in checks]
    findings: list[CheckFinding] = []
    traits: dict[str, str] = {}
    for check, call in calls:
        result = call.result()
        findings += assess_result(check, result, requirements)
        if result.problem is None:
            traits |= check.traits(result.value)
    return MachineReport(node=node, host=socket.gethostname(), findings=tuple(findings), traits=traits)


def assess_result(
    check: DoctorCheck, result: TimedResult, requirements: RunRequirements
) -> list[CheckFinding]:
    if result.timed_out:
        findings = [
            CheckFinding(check.hang_verdict, f"no answer within {check.seconds:g} s", check.hang_remedy)
        ]
    elif result.problem is not None:
        findings = [
            warn(f"the check failed: {result.problem}", "check by hand; other checks are not affected")
        ]
    else:
        findings = list(check.assess(result.value, requirements))
    return [
        CheckFinding(item.verdict, item.evidence, item.remedy, check.name, check.how) for item in findings
    ]


class MachinesTimedOut(TimeoutError):
    """Some machines have not reported in time. ``reports``: those of the others."""

    def __init__(self, nodes: Sequence[int], received: Sequence[MachineReport], seconds: float) -> None:
        which = ", ".join(map(str, nodes))
        super().__init__(
            f"machine {which} of {len(nodes) + len(received)} (from 0) has not reported within {seconds:g} s"
        )
        self.reports = list(received)


def gather_reports(
    own: MachineReport | None, launch: Launch, rendezvous: Rendezvous, seconds: float = CHECKS_SECONDS
) -> list[MachineReport]:
    """Return the reports of all machines on rank 0, and an empty list elsewhere.

    Args:
        own: this machine's report, on its first rank.
        seconds: how long to wait for the others.

    Raises:
        MachinesTimedOut: a machine does not report in time.
    """
    if own is not None:
        rendezvous.publish(f"doctor/machine/{launch.node}", own.to_json())
    if launch.rank != 0:
        return []
    deadline = time.monotonic() + seconds
    received, silent = [], []
    for node in range(launch.nodes):
        try:
            received += rendezvous.receive(
                f"doctor/machine/{node}", seconds=max(MIN_RECEIVE_SECONDS, deadline - time.monotonic())
            )
        except TimeoutError:
            silent.append(node)
    reports = [MachineReport.from_json(item) for item in received]
    if silent:
        raise MachinesTimedOut(silent, reports, seconds)
    return reports


def compare_clocks(
    machines: Sequence[MachineReport], launch: Launch, rendezvous: Rendezvous
) -> list[CheckFinding]:
    """Compare clocks between the first ranks of all machines; return the findings on rank 0."""
    if launch.nodes == 1 or launch.local_rank != 0:
        return []
    if launch.rank != 0:
        offset = clocks.measure_offset(rendezvous.kv_store, launch.node)
        rendezvous.publish(
            f"doctor/clock/{launch.node}", {"seconds": offset.seconds, "error_seconds": offset.error_seconds}
        )
        return []
    for node in range(1, launch.nodes):
        clocks.serve_time(rendezvous.kv_store, node)
    offsets = rendezvous.receive(*(f"doctor/clock/{node}" for node in range(1, launch.nodes)))
    return cross_node.check_clocks(
        {
            f"{machine.host} (machine {machine.node})": clocks.ClockOffset(**item)
            for machine, item in zip(machines[1:], offsets, strict=True)
        }
    )


def run_preflight(plan: RunPlan, launch: Launch, rendezvous: Rendezvous) -> DoctorReport | None:
    """Check every machine of a run before its process group exists (``cluster.preflight``).

    Every rank calls this; only rank 0 gets the report. It does not cover rendezvous and links, since the run
    itself reports those right afterwards.

    Raises:
        InputError: on rank 0, with everything that fails.
        PeerExited: on the other ranks, if something fails.
    """
    requirements = compute_requirements(
        plan.config, plan.world, plan, address=launch.address if launch.ranks > 1 else None
    )
    own = run_checks(requirements, launch.node) if launch.local_rank == 0 else None
    if launch.ranks == 1:
        assert own is not None
        machines, clock_findings = [own], []
    else:
        machines = gather_reports(own, launch, rendezvous)
        clock_findings = compare_clocks(machines, launch, rendezvous)
    if launch.rank != 0:
        rendezvous.receive("doctor/end", seconds=CHECKS_SECONDS + launch.nodes)
        return None
    report = DoctorReport(
        machines=tuple(machines),
        cross_machine=(
            *cross_node.check_plan(plan, ()),
            *cross_node.check_uniformity(machines),
            *clock_findings,
        ),
    )
    problems = find_failures(report)
    if problems:
        raise InputError(*problems)
    if launch.ranks > 1:
        rendezvous.publish("doctor/end", {})
    return report


def find_failures(report: DoctorReport) -> list[Problem]:
    """Convert failed checks to problems."""
    rule = "every machine must pass the checks (cluster.preflight)"
    findings = [(machine.host, finding) for machine in report.machines for finding in machine.findings]
    findings += [("the run", finding) for finding in report.cross_machine]
    return [
        Problem("cluster.preflight", f"{where}, {finding.check}: {finding.evidence}", rule, finding.remedy)
        for where, finding in findings
        if finding.verdict is CheckVerdict.FAIL
    ]
