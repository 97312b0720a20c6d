"""Format the report of a hang: the ranks' states, their last calls, and each distinct stack once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.diagnosis import Diagnosis
from toolkit.monitor.hangs.rank_reports import HangEvidence, RankReport, describe_rank, format_ranks
from toolkit.monitor.hangs.stacks import ENDED, STATES, ThreadStack, format_frames

MAX_STACKS = 100  # distinct stacks; the rest is in the ranks' own files


def format_report(
    diagnosis: Diagnosis, evidence: HangEvidence, head: str, source: Callable[[str, int], str]
) -> str:
    """
    Args:
        head: the first line: when, and after which limit.
        source: returns a line of a source file, or an empty string.
    """
    parts = [
        head,
        f"cause:     {diagnosis.cause}\nevidence:  {diagnosis.evidence}\nnext step: {diagnosis.next_step}",
        "RANKS\n" + "\n".join(_ranks(evidence)),
        "LAST CALLS, oldest first\n" + ("\n".join(_calls(evidence)) or "  none recorded"),
        "STACKS, innermost frame last\n" + "\n".join(_stacks(evidence, source)),
    ]
    frozen = [
        f"{format_ranks([rank])}, by faulthandler while no Python thread could run:\n{seen.notes.rstrip()}"
        for rank, seen in sorted(evidence.neighbours.items())
        if seen.notes and rank in evidence.silent
    ]
    return "\n\n".join([*parts, *frozen]) + "\n"


def _ranks(evidence: HangEvidence) -> Iterable[str]:
    """Return one line for all ranks in the same state."""
    groups: defaultdict[tuple[str, str, str], list[RankReport]] = defaultdict(list)
    for _, report in sorted(evidence.reports.items()):
        groups[describe_rank(report), report.last, report.part].append(report)
    for (state, last, part), reports in groups.items():
        idle = max(report.idle for report in reports)
        inside = f", in part {part} of the step" if part else ""
        processes = _format_processes(evidence, [report.rank for report in reports])
        yield f"  {processes}: {state}{inside}; {last} completed {idle:.0f} s ago"
        yield from (
            f"    it failed: {report.failure.splitlines()[0]}" for report in reports[:1] if report.failure
        )
    for rank in evidence.silent:
        seen = evidence.neighbours.get(rank)
        verb = "has" if seen is not None and seen.state in ENDED else "is"
        state = (
            f"its process {verb} {STATES.get(seen.state, seen.state)} ({seen.state})"
            if seen is not None
            else "no other rank on its host"
        )
        last = f"; its last call: {seen.last}" if seen is not None and seen.last else ""
        yield f"  {_format_processes(evidence, [rank])}: NO RESPONSE; {state}{last}"


def _format_processes(evidence: HangEvidence, ranks: list[int]) -> str:
    processes = [f"{evidence.processes[rank].host} {evidence.processes[rank].pid}" for rank in ranks[:2]]
    return f"{format_ranks(ranks)} ({', '.join(processes)}{', ...' if len(ranks) > 2 else ''})"


def _calls(evidence: HangEvidence) -> Iterable[str]:
    """Return the last calls of each group that a rank waits in, one line for all ranks with equal calls."""
    waited = {
        call.group: call for report in evidence.reports.values() if (call := report.blocking_call) is not None
    }
    for group in waited.values():
        members = format_ranks(group.ranks) if group.ranks else "unknown ranks"
        yield f"  {group.axis}, group {group.group} of {members}"
        groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for report in evidence.members(group):
            groups[tuple(_call(call) for call in report.calls if call.group == group.group)].append(
                report.rank
            )
        for calls, ranks in groups.items():
            yield f"    {format_ranks(ranks)}: {'; '.join(calls) or 'none'}"


def _call(call: CollectiveCall) -> str:
    return f"{call.number} {call.what}{'' if call.finished else ' WAITS'}"


def _stacks(evidence: HangEvidence, source: Callable[[str, int], str]) -> Iterable[str]:
    groups: defaultdict[tuple[bool, str, tuple[object, ...]], list[tuple[int, ThreadStack]]] = defaultdict(
        list
    )
    for rank, report in sorted(evidence.reports.items()):
        for thread in report.threads:
            groups[not thread.main, thread.name, thread.frames].append((rank, thread))
    # Main threads first, rare stacks before common ones.
    order = sorted(groups.items(), key=lambda item: (item[0][0], len(item[1])))
    for (_, name, _), members in order[:MAX_STACKS]:
        _, thread = members[0]
        state = f" ({thread.state})" if thread.state else ""
        yield f"  {format_ranks({rank for rank, _ in members})}, thread {name}{state}"
        yield from (f"    {line}" for line in format_frames(thread.frames, source))
    if len(order) > MAX_STACKS:
        yield f"  and {len(order) - MAX_STACKS} more distinct stacks: see the ranks' files next to this one"
