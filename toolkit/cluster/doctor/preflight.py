"""Who looks when: one process of each machine looks at it, rank 0 hears all of them, and clocks are compared through the store."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial

from toolkit.cluster.doctor import clocks, cross_node, disk, gpus, host, network, software
from toolkit.cluster.doctor.timeout import TimedCall, TimedResult
from toolkit.cluster.doctor.types import DoctorCheck, CheckFinding, MachineReport, RunRequirements, DoctorReport, CheckVerdict, compute_requirements, warn
from toolkit.cluster.environment import Launch
from toolkit.cluster.rendezvous import Rendezvous
from toolkit.errors import InputError, Problem
from toolkit.plan.types import RunPlan

CHECKS: tuple[DoctorCheck, ...] = (*software.CHECKS, *gpus.CHECKS, *host.CHECKS, disk.CHECK, *network.CHECKS)
CHECKS_SECONDS = 90.0  # in which a machine tells what was found there: its checks run side by side, each with its own bound
MIN_RECEIVE_SECONDS = 0.1  # for one message that is there already


def run_checks(need: RunRequirements, node: int = 0, checks: Sequence[DoctorCheck] = CHECKS) -> MachineReport:
    """This machine, all of it at the same time: in no more than the seconds of the slowest check."""
    asked = [(check, TimedCall(partial(check.measure, need), check.seconds)) for check in checks]
    findings: list[CheckFinding] = []
    traits: dict[str, str] = {}
    for check, question in asked:
        answer = question.answer()
        findings += judge_result(check, answer, need)
        if answer.problem is None:
            traits |= check.traits(answer.value)
    return MachineReport(node=node, host=socket.gethostname(), findings=tuple(findings), traits=traits)


def judge_result(check: DoctorCheck, answer: TimedResult, need: RunRequirements) -> list[CheckFinding]:
    if answer.hangs:
        found = [CheckFinding(check.hang_verdict, f"no answer within {check.seconds:g} s", check.hang_remedy)]
    elif answer.problem is not None:
        found = [
            warn(
                f"it could not be looked at: {answer.problem}",
                "look by hand; other checks are not touched by it",
            )
        ]
    else:
        found = list(check.judge(answer.value, need))
    return [CheckFinding(one.verdict, one.evidence, one.remedy, check.name, check.how) for one in found]


class MachinesTimedOut(TimeoutError):
    """Machines that have not said anything in time. ``heard``: what the others have."""

    def __init__(self, nodes: Sequence[int], heard: Sequence[MachineReport], seconds: float) -> None:
        which = ", ".join(map(str, nodes))
        super().__init__(
            f"machine {which} of {len(nodes) + len(heard)} (from 0) has said nothing within {seconds:g} s"
        )
        self.reports = list(heard)


def gather_reports(
    own: MachineReport | None, launch: Launch, meeting: Rendezvous, seconds: float = CHECKS_SECONDS
) -> list[MachineReport]:
    """On rank 0 what was found on every machine; elsewhere nothing.

    Args:
        own: of the first rank of each machine.
        seconds: that are waited for the others, from now on.

    Raises:
        Silent: a machine does not say anything in time.
    """
    if own is not None:
        meeting.publish(f"doctor/machine/{launch.node}", own.to_json())
    if launch.rank != 0:
        return []
    deadline = time.monotonic() + seconds
    heard, silent = [], []
    for node in range(launch.nodes):
        try:
            heard += meeting.receive(
                f"doctor/machine/{node}", seconds=max(MIN_RECEIVE_SECONDS, deadline - time.monotonic())
            )
        except TimeoutError:
            silent.append(node)
    reports = [MachineReport.from_json(one) for one in heard]
    if silent:
        raise MachinesTimedOut(silent, reports, seconds)
    return reports


def compare_clocks(machines: Sequence[MachineReport], launch: Launch, meeting: Rendezvous) -> list[CheckFinding]:
    """By the first rank of each machine; the findings are on rank 0."""
    if launch.nodes == 1 or launch.local_rank != 0:
        return []
    if launch.rank != 0:
        offset = clocks.measure_offset(meeting.kv_store, launch.node)
        meeting.publish(
            f"doctor/clock/{launch.node}", {"seconds": offset.seconds, "error_seconds": offset.error_seconds}
        )
        return []
    for node in range(1, launch.nodes):
        clocks.serve_time(meeting.kv_store, node)
    told = meeting.receive(*(f"doctor/clock/{node}" for node in range(1, launch.nodes)))
    return cross_node.check_clocks(
        {
            f"{machine.host} (machine {machine.node})": clocks.ClockOffset(**one)
            for machine, one in zip(machines[1:], told, strict=True)
        }
    )


def run_preflight(plan: RunPlan, launch: Launch, meeting: Rendezvous) -> DoctorReport | None:
    """``cluster.preflight``: every machine of a run, before its process group. Each rank calls it; rank 0 has the report.

    That ranks meet, and what their links do, the run itself tells right after.

    Raises:
        InputError: on rank 0, with everything that fails.
        Left: on the other ranks, where something does.
    """
    need = compute_requirements(plan.config, plan.world, plan, address=launch.address if launch.ranks > 1 else None)
    own = run_checks(need, launch.node) if launch.local_rank == 0 else None
    if launch.ranks == 1:
        assert own is not None
        machines, times = [own], []
    else:
        machines = gather_reports(own, launch, meeting)
        times = compare_clocks(machines, launch, meeting)
    if launch.rank != 0:
        meeting.receive("doctor/end", seconds=CHECKS_SECONDS + launch.nodes)
        return None
    report = DoctorReport(
        machines=tuple(machines),
        together=(*cross_node.check_plan(plan, ()), *cross_node.check_uniformity(machines), *times),
    )
    problems = find_failures(report)
    if problems:
        raise InputError(*problems)
    if launch.ranks > 1:
        meeting.publish("doctor/end", {})
    return report


def find_failures(report: DoctorReport) -> list[Problem]:
    """What fails, as a user's mistakes are told."""
    rule = "every machine is fit for the run (cluster.preflight)"
    told = [(machine.host, finding) for machine in report.machines for finding in machine.findings]
    told += [("the run", finding) for finding in report.cross_machine]
    return [
        Problem("cluster.preflight", f"{where}, {finding.check}: {finding.evidence}", rule, finding.remedy)
        for where, finding in told
        if finding.verdict is CheckVerdict.FAIL
    ]
