"""Who looks when: one process of each machine looks at it, rank 0 hears all of them, and clocks are compared through the store."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial

from toolkit.cluster.doctor import clocks, cross_node, disk, gpus, host, network, software
from toolkit.cluster.doctor.timeout import TimedCall, TimedResult
from toolkit.cluster.doctor.types import Check, Finding, MachineReport, Need, Report, Verdict, need_of, warn
from toolkit.cluster.environment import Launch
from toolkit.cluster.rendezvous import Meeting
from toolkit.errors import InputError, Problem
from toolkit.plan.types import RunPlan

CHECKS: tuple[Check, ...] = (*software.CHECKS, *gpus.CHECKS, *host.CHECKS, disk.CHECK, *network.CHECKS)
LOOK_SECONDS = 90.0  # in which a machine tells what was found there: its checks run side by side, each with its own bound
MOMENT_SECONDS = 0.1  # for one message that is there already


def look(need: Need, node: int = 0, checks: Sequence[Check] = CHECKS) -> MachineReport:
    """This machine, all of it at the same time: in no more than the seconds of the slowest check."""
    asked = [(check, TimedCall(partial(check.measure, need), check.seconds)) for check in checks]
    findings: list[Finding] = []
    traits: dict[str, str] = {}
    for check, question in asked:
        answer = question.answer()
        findings += judged(check, answer, need)
        if answer.problem is None:
            traits |= check.traits(answer.value)
    return MachineReport(node=node, host=socket.gethostname(), findings=tuple(findings), traits=traits)


def judged(check: Check, answer: TimedResult, need: Need) -> list[Finding]:
    if answer.hangs:
        found = [Finding(check.hanging, f"no answer within {check.seconds:g} s", check.stuck)]
    elif answer.problem is not None:
        found = [
            warn(
                f"it could not be looked at: {answer.problem}",
                "look by hand; other checks are not touched by it",
            )
        ]
    else:
        found = list(check.judge(answer.value, need))
    return [Finding(one.verdict, one.evidence, one.remedy, check.name, check.how) for one in found]


class Silent(TimeoutError):
    """Machines that have not said anything in time. ``heard``: what the others have."""

    def __init__(self, nodes: Sequence[int], heard: Sequence[MachineReport], seconds: float) -> None:
        which = ", ".join(map(str, nodes))
        super().__init__(
            f"machine {which} of {len(nodes) + len(heard)} (from 0) has said nothing within {seconds:g} s"
        )
        self.heard = list(heard)


def gather(
    own: MachineReport | None, launch: Launch, meeting: Meeting, seconds: float = LOOK_SECONDS
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
                f"doctor/machine/{node}", seconds=max(MOMENT_SECONDS, deadline - time.monotonic())
            )
        except TimeoutError:
            silent.append(node)
    reports = [MachineReport.from_json(one) for one in heard]
    if silent:
        raise Silent(silent, reports, seconds)
    return reports


def compare_clocks(machines: Sequence[MachineReport], launch: Launch, meeting: Meeting) -> list[Finding]:
    """By the first rank of each machine; the findings are on rank 0."""
    if launch.nodes == 1 or launch.local_rank != 0:
        return []
    if launch.rank != 0:
        offset = clocks.compare(meeting.store, launch.node)
        meeting.publish(
            f"doctor/clock/{launch.node}", {"seconds": offset.seconds, "error_seconds": offset.error_seconds}
        )
        return []
    for node in range(1, launch.nodes):
        clocks.tell(meeting.store, node)
    told = meeting.receive(*(f"doctor/clock/{node}" for node in range(1, launch.nodes)))
    return cross_node.clocks(
        {
            f"{machine.host} (machine {machine.node})": clocks.Offset(**one)
            for machine, one in zip(machines[1:], told, strict=True)
        }
    )


def preflight(plan: RunPlan, launch: Launch, meeting: Meeting) -> Report | None:
    """``cluster.preflight``: every machine of a run, before its process group. Each rank calls it; rank 0 has the report.

    That ranks meet, and what their links do, the run itself tells right after.

    Raises:
        InputError: on rank 0, with everything that fails.
        Left: on the other ranks, where something does.
    """
    need = need_of(plan.config, plan.world, plan, address=launch.address if launch.ranks > 1 else None)
    own = look(need, launch.node) if launch.local_rank == 0 else None
    if launch.ranks == 1:
        assert own is not None
        machines, times = [own], []
    else:
        machines = gather(own, launch, meeting)
        times = compare_clocks(machines, launch, meeting)
    if launch.rank != 0:
        meeting.receive("doctor/end", seconds=LOOK_SECONDS + launch.nodes)
        return None
    report = Report(
        machines=tuple(machines),
        together=(*cross_node.of_plan(plan, ()), *cross_node.alike(machines), *times),
    )
    problems = failures(report)
    if problems:
        raise InputError(*problems)
    if launch.ranks > 1:
        meeting.publish("doctor/end", {})
    return report


def failures(report: Report) -> list[Problem]:
    """What fails, as a user's mistakes are told."""
    rule = "every machine is fit for the run (cluster.preflight)"
    told = [(machine.host, finding) for machine in report.machines for finding in machine.findings]
    told += [("the run", finding) for finding in report.together]
    return [
        Problem("cluster.preflight", f"{where}, {finding.check}: {finding.evidence}", rule, finding.remedy)
        for where, finding in told
        if finding.verdict is Verdict.FAIL
    ]
