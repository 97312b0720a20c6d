"""Diagnose why a run makes no progress, from the reports that ``observe/hang_reporter.py`` collects.

The rules are ordered by certainty. A process that has ended or is stopped explains every wait for it. Ranks
whose calls of one number differ have diverged. If some ranks wait in a collective and one does not, they
wait for it; if it waits in another collective, it has skipped one. If all ranks wait in the same call, the
network or a GPU is at fault.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.rank_reports import (
    HangEvidence,
    RankReport,
    describe_waits,
    format_axis,
    format_ordinal,
    format_ranks,
    group_ranks,
    has_or_have,
    is_or_are,
)
from toolkit.monitor.hangs.stacks import ENDED, SAMPLES, SILENT, STATES, describe_activity, short_path

NAME = "hang"
# Calls in which ranks may have tensors of different shapes.
UNEQUAL = ("gather", "scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The fields have the meaning that they have in :class:`Alert`."""

    cause: str
    where: str
    evidence: str
    next_step: str

    def alert(self, step: int) -> Alert:
        return Alert(
            name=NAME,
            level=Level.ERROR,
            step=step,
            cause=self.cause,
            evidence=self.evidence,
            next_step=self.next_step,
            where=self.where,
        )


def diagnose(evidence: HangEvidence) -> Diagnosis:
    """Return the result of the first rule that applies."""
    assert evidence.reports, "the rank that collects has reported"
    return next(diagnosis for diagnosis in (rule(evidence) for rule in RULES) if diagnosis is not None)


def diagnose_mismatch(evidence: HangEvidence) -> Diagnosis | None:
    """Check only whether ranks make different calls, which may be why a run fails."""
    return _calls_differ(evidence)


# ---- the rules


def _ranks_failed(evidence: HangEvidence) -> Diagnosis | None:
    failed = [rank for rank, report in evidence.reports.items() if report.failure]
    if not failed:
        return None
    first = evidence.reports[failed[0]]
    return Diagnosis(
        f"{format_ranks(failed)} failed: {first.failure.splitlines()[0]}",
        format_ranks(failed),
        describe_waits(evidence),
        "fix what the failure reports; the same command continues from the newest checkpoint",
    )


def _ranks_silent(evidence: HangEvidence) -> Diagnosis | None:
    silent = evidence.silent
    if not silent:
        return None
    states = group_ranks(
        silent, lambda rank: evidence.neighbours[rank].state if rank in evidence.neighbours else ""
    )
    state = next((state for state in SILENT if state in states), None)
    if state is not None:
        ranks = states[state]
        condition = f"{has_or_have(ranks) if state in ENDED else is_or_are(ranks)} {STATES[state]}"
        seen = (
            f"{evidence.format_processes(ranks)} {condition}"
            + ("" if state in ENDED else f" (state {state})")
            + _last_call(evidence, ranks)
        )
        return Diagnosis(
            f"{format_ranks(ranks)} {condition}",
            format_ranks(ranks),
            f"{seen}; {describe_waits(evidence)}",
            _SILENT_REMEDIES.get(state, _ENDED_REMEDY),
        )
    frozen = [rank for rank in silent if rank in evidence.neighbours and evidence.neighbours[rank].notes]
    if frozen:
        return Diagnosis(
            f"{format_ranks(frozen)} {is_or_are(frozen)} blocked by native code that holds "
            "the Python interpreter's lock",
            format_ranks(frozen),
            f"no Python thread of {evidence.format_processes(frozen)} could run; {describe_waits(evidence)}",
            "find the last line of Python in the report: the extension called there does not return",
        )
    hosts = group_ranks(range(len(evidence.processes)), lambda rank: evidence.processes[rank].host)
    lost = {host: ranks for host, ranks in hosts.items() if not set(ranks) & evidence.reports.keys()}
    if lost:
        ranks = [rank for host_ranks in lost.values() for rank in host_ranks]
        names = " and ".join(sorted(lost))
        return Diagnosis(
            f"no rank on {names} responds",
            format_ranks(ranks),
            f"no report from {format_ranks(ranks)}; {describe_waits(evidence)}",
            f"check whether {names} can be reached, and its kernel's log: dmesg",
        )
    return Diagnosis(
        f"{format_ranks(silent)} {'do' if len(silent) > 1 else 'does'} not respond",
        format_ranks(silent),
        f"{evidence.format_processes(silent)} {is_or_are(silent)} alive and not stopped; "
        f"{describe_waits(evidence)}",
        "check its kernel's log (dmesg) and its stack: py-spy dump --pid PID",
    )


def _last_call(evidence: HangEvidence, ranks: Sequence[int]) -> str:
    last = evidence.neighbours[ranks[0]].last
    return f"; the last call of {format_ranks(ranks[:1])}: {last}" if last else ""


_CONTINUES = "the same command continues from the newest checkpoint"
_SILENT_REMEDIES = {
    "T": f"find out what stopped it (SIGSTOP, Ctrl-Z, a paused container); {_CONTINUES}",
    "t": f"leave the debugger; {_CONTINUES}",
    "D": "check the kernel's log of its machine (dmesg): a disk, a file server or a driver does not respond",
}
_ENDED_REMEDY = f"find out why that process ended: dmesg (out of memory?), the attempt's log; {_CONTINUES}"


def _calls_differ(evidence: HangEvidence) -> Diagnosis | None:
    """Ranks of a group made different calls of one number, and one of them has not returned."""
    for group in evidence.groups():
        members = [report for report in evidence.members(group) if report.calls_made(group.group)]
        last = {report.calls_made(group.group) for report in members}
        stuck = {
            call.number for report in members for call in report.collectives(group.group) if not call.finished
        }
        for number in sorted(last | stuck):
            calls_by_rank = {
                report.rank: call
                for report in members
                for call in report.collectives(group.group)
                if call.number == number
            }
            ranks_by_call = group_ranks(calls_by_rank, lambda rank: _comparison_key(calls_by_rank[rank]))  # noqa: B023  used at once
            if len(ranks_by_call) < 2:
                continue
            variants = list(ranks_by_call.values())
            minority = min(variants, key=len) if len(calls_by_rank) > 2 else sorted(calls_by_rank)
            calls = "; ".join(f"{format_ranks(ranks)}: {calls_by_rank[ranks[0]].what}" for ranks in variants)
            skipped = _describe_skipped_call(evidence, group, number, ranks_by_call)
            same = len({call.operation for call in calls_by_rank.values()}) == 1
            what = "with different shapes" if same else "that differ"
            return Diagnosis(
                f"the ranks make calls {what} as number {number} on {format_axis(group)}",
                format_ranks(minority),
                calls + skipped,
                "see where the stacks differ: other shapes of batches or of the model, or a collective "
                "that not all ranks make",
            )
    return None


def _describe_skipped_call(
    evidence: HangEvidence, group: CollectiveCall, number: int, ranks_by_call: Mapping[str, Sequence[int]]
) -> str:
    """Name the call that only one side made, if one side's calls are the other's shifted by one."""
    variants = list(ranks_by_call.values())
    for late, early in ((late, early) for late in variants for early in variants if late is not early):
        early_calls = {call.number: call for call in evidence.reports[early[0]].collectives(group.group)}
        late_call = next(
            call for call in evidence.reports[late[0]].collectives(group.group) if call.number == number
        )
        following = early_calls.get(number + 1)
        if following is not None and _comparison_key(following) == _comparison_key(late_call):
            skipped = early_calls[number].what
            return f"; {format_ranks(late)} skipped {skipped}, or only {format_ranks(early)} made it"
    return ""


def _ranks_outside_calls(evidence: HangEvidence) -> Diagnosis | None:
    """Some ranks wait in a call, and some in none."""
    outside = [rank for rank, report in evidence.reports.items() if report.blocking_call is None]
    if not outside or len(outside) == len(evidence.reports):
        return None
    ranks_by_activity = group_ranks(outside, lambda rank: evidence.reports[rank].activity)
    activity, ranks = max(ranks_by_activity.items(), key=lambda item: len(item[1]))
    late_ranks = [line for blocked in _blocked_collectives(evidence) for line in blocked.lagging(ranks)]
    text = "; ".join(
        [
            *late_ranks[:1],
            *([_locate_prefetch_thread(evidence.reports[ranks[0]])] if activity == SAMPLES else []),
            describe_waits(evidence),
        ]
    )
    next_step = (
        _SAMPLES_REMEDY
        if activity == SAMPLES
        else f"see in the report where {format_ranks(ranks)} {is_or_are(ranks)}"
    )
    pronoun = "them" if len(ranks) > 1 else "it"
    return Diagnosis(
        f"{format_ranks(ranks)} {is_or_are(ranks)} {activity}, and the others wait for {pronoun}",
        format_ranks(ranks),
        text,
        next_step,
    )


_SAMPLES_REMEDY = (
    "check the storage under data.path, and in the report the thread that prefetches samples; the same "
    "command continues"
)


def _locate_prefetch_thread(report: RankReport) -> str:
    """Locate the thread that prefetches samples."""
    prefetching = [
        thread for thread in report.threads if not thread.main and describe_activity(thread.frames) == SAMPLES
    ]
    if not prefetching:
        return f"rank {report.rank} has no thread that prefetches samples: it has ended"
    ours = next(frame for frame in reversed(prefetching[0].frames) if describe_activity([frame]) == SAMPLES)
    inner = prefetching[0].frames[-1]
    below = "" if inner == ours else f", which waits in {inner.function}"
    location = f"{ours.function} ({short_path(ours.file)}:{ours.line})"
    return f"its thread {prefetching[0].name} is in {location}{below}"


@dataclass(frozen=True, slots=True)
class _BlockedCollective:
    """A collective that some ranks wait in and others have not reached.

    Attributes:
        calls_by_late_rank: number of the group's calls that the latter have made, by rank.
    """

    call: CollectiveCall
    waiting: tuple[int, ...]
    calls_by_late_rank: Mapping[int, int]

    def lagging(self, ranks: Iterable[int]) -> list[str]:
        """Describe those of ``ranks`` that have not reached the call."""
        late = group_ranks(
            [rank for rank in ranks if rank in self.calls_by_late_rank],
            lambda rank: self.calls_by_late_rank[rank],
        )
        wait = f"wait{'s' * (len(self.waiting) == 1)}"
        number = format_ordinal(self.call.number)
        others = f"{format_ranks(self.waiting)} {wait} in the {number}: {self.call.what}"
        axis = format_axis(self.call)
        return [
            f"{format_ranks(members)} {has_or_have(members)} made {count} calls on {axis}, {others}"
            for count, members in late.items()
        ]


def _blocked_collectives(evidence: HangEvidence) -> list[_BlockedCollective]:
    """Return blocked calls, the likeliest cause first.

    Calls that few ranks have not reached come first, then ranks that made a transition between calls that no
    rank made before, then the call that blocked first.
    """
    common = Counter(step for report in evidence.reports.values() for step in _call_transitions(report)[:-1])

    def key(blocked: _BlockedCollective) -> tuple[int, int, float]:
        unusual = sum(
            common[_call_transitions(evidence.reports[rank])[-1]] == 0
            for rank in blocked.calls_by_late_rank
            if _call_transitions(evidence.reports[rank])
        )
        return len(blocked.calls_by_late_rank), -unusual, blocked.call.begun

    waiting: defaultdict[tuple[str, int], list[tuple[int, CollectiveCall]]] = defaultdict(list)
    for rank, report in evidence.reports.items():
        call = report.blocking_call
        if call is not None and call.peer is None:
            waiting[call.group, call.number].append((rank, call))
    entries = []
    for ranks in waiting.values():
        call = min((call for _, call in ranks), key=lambda call: call.begun)
        calls_made = {
            report.rank: made
            for report in evidence.members(call)
            if (made := report.calls_made(call.group)) < call.number
        }
        if calls_made:
            entries.append(_BlockedCollective(call, tuple(rank for rank, _ in ranks), calls_made))
    return sorted(entries, key=key)


def _call_transitions(report: RankReport) -> list[tuple[str, str]]:
    """Return the transitions from call to call on this rank, the newest last."""
    calls = [f"{call.group} {call.what}" for call in sorted(report.calls, key=lambda call: call.begun)]
    return list(pairwise(calls))


def _call_skipped(evidence: HangEvidence) -> Diagnosis | None:
    """A rank waits in a collective that another rank has not made, which waits in a different one."""
    blocked = next(iter(_blocked_collectives(evidence)), None)
    if blocked is None:
        return None
    ranks = list(blocked.calls_by_late_rank)
    return Diagnosis(
        "; ".join(blocked.lagging(ranks)),
        format_ranks(ranks),
        describe_waits(evidence),
        f"see in the report where {format_ranks(ranks)} {is_or_are(ranks)} and the others are not: a "
        "collective that not all ranks make, or not in the same order",
    )


def _all_ranks_in_calls(evidence: HangEvidence) -> Diagnosis | None:
    """All ranks wait in calls that every rank has made."""
    calls = [report.blocking_call for report in evidence.reports.values()]
    if None in calls:
        return None
    return Diagnosis(
        "every rank has made its call, and the calls do not complete",
        "",
        describe_waits(evidence),
        "check the network and the GPUs: XID and link errors (dmesg, nvidia-smi), NCCL_DEBUG=INFO, "
        "nccl-tests between hosts",
    )


def _no_rank_in_call(evidence: HangEvidence) -> Diagnosis:
    """No rank waits in a call."""
    activities = group_ranks(evidence.reports, lambda rank: evidence.reports[rank].activity)
    cause = ", ".join(
        f"{format_ranks(ranks)} {is_or_are(ranks)} {what}" for what, ranks in activities.items()
    )
    first = next(iter(evidence.reports.values()))
    samples = first.activity == SAMPLES and len(activities) == 1
    return Diagnosis(
        cause,
        "" if len(evidence.reports) > 1 else format_ranks(evidence.reports),
        _locate_prefetch_thread(first) if samples else describe_waits(evidence),
        _SAMPLES_REMEDY
        if samples
        else "see the stacks in the report; if the work is only slow, raise monitor.hang_seconds",
    )


RULES: tuple[Callable[[HangEvidence], Diagnosis | None], ...] = (
    _ranks_failed,
    _ranks_silent,
    _calls_differ,
    _ranks_outside_calls,
    _call_skipped,
    _all_ranks_in_calls,
    _no_rank_in_call,
)


def _comparison_key(call: CollectiveCall) -> str:
    """Return what must be equal on all ranks."""
    return call.operation if call.operation.startswith(UNEQUAL) else call.what
