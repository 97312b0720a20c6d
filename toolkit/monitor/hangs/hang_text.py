"""The report of a hang, for people: what is known of the ranks, and the stacks, each told once for all ranks that have it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.diagnosis import Diagnosis
from toolkit.monitor.hangs.reports import Found, Report, ranks_named, state_of
from toolkit.monitor.hangs.stacks import ENDED, STATES, ThreadStack, lines

MOST_STACKS = 100  # different ones; the rest is in the ranks' own files


def report_text(diagnosis: Diagnosis, found: Found, head: str, source: Callable[[str, int], str]) -> str:
    """
    Args:
        head: when and after which limit.
        source: a line of a source file, or nothing.
    """
    parts = [
        head,
        f"cause:     {diagnosis.cause}\nevidence:  {diagnosis.evidence}\nnext step: {diagnosis.next_step}",
        "RANKS\n" + "\n".join(_ranks(found)),
        "LAST CALLS, oldest first\n" + ("\n".join(_calls(found)) or "  none on record"),
        "STACKS, innermost frame last\n" + "\n".join(_stacks(found, source)),
    ]
    frozen = [
        f"{ranks_named([rank])}, by its own watch while no Python thread could run:\n{seen.notes.rstrip()}"
        for rank, seen in sorted(found.neighbours.items())
        if seen.notes and rank in found.silent
    ]
    return "\n\n".join([*parts, *frozen]) + "\n"


def _ranks(found: Found) -> Iterable[str]:
    """A line for all ranks that are in the same place."""
    alike: defaultdict[tuple[str, str, str], list[Report]] = defaultdict(list)
    for _, report in sorted(found.reports.items()):
        alike[state_of(report), report.last, report.part].append(report)
    for (state, last, part), reports in alike.items():
        idle = max(report.idle for report in reports)
        inside = f", in the step's part {part}" if part else ""
        yield f"  {_who(found, [report.rank for report in reports])}: {state}{inside}; {last} done {idle:.0f} s ago"
        yield from (
            f"    it failed: {report.failure.splitlines()[0]}" for report in reports[:1] if report.failure
        )
    for rank in found.silent:
        seen = found.neighbours.get(rank)
        verb = "has" if seen is not None and seen.state in ENDED else "is"
        state = (
            f"its process {verb} {STATES.get(seen.state, seen.state)} ({seen.state})"
            if seen is not None
            else "nobody else on its host"
        )
        last = f"; its last call: {seen.last}" if seen is not None and seen.last else ""
        yield f"  {_who(found, [rank])}: NO ANSWER; {state}{last}"


def _who(found: Found, ranks: list[int]) -> str:
    places = [f"{found.processes[rank].host} {found.processes[rank].pid}" for rank in ranks[:2]]
    return f"{ranks_named(ranks)} ({', '.join(places)}{', ...' if len(ranks) > 2 else ''})"


def _calls(found: Found) -> Iterable[str]:
    """The history of each group that somebody waits in, a line for all ranks with the same one."""
    waited = {call.group: call for report in found.reports.values() if (call := report.waits_in) is not None}
    for group in waited.values():
        yield f"  {group.axis}, group {group.group} of {ranks_named(group.ranks) if group.ranks else 'unknown ranks'}"
        alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for report in found.members(group):
            alike[tuple(_call(call) for call in report.calls if call.group == group.group)].append(
                report.rank
            )
        for calls, ranks in alike.items():
            yield f"    {ranks_named(ranks)}: {'; '.join(calls) or 'none'}"


def _call(call: CollectiveCall) -> str:
    return f"{call.number} {call.what}{'' if call.finished else ' WAITS'}"


def _stacks(found: Found, source: Callable[[str, int], str]) -> Iterable[str]:
    alike: defaultdict[tuple[bool, str, tuple[object, ...]], list[tuple[int, ThreadStack]]] = defaultdict(
        list
    )
    for rank, report in sorted(found.reports.items()):
        for thread in report.threads:
            alike[not thread.main, thread.name, thread.frames].append((rank, thread))
    order = sorted(
        alike.items(), key=lambda item: (item[0][0], len(item[1]))
    )  # main threads first, the odd ones before the many
    for (_, name, _), them in order[:MOST_STACKS]:
        rank, thread = them[0]
        state = f" ({thread.state})" if thread.state else ""
        yield f"  {ranks_named({rank for rank, _ in them})}, thread {name}{state}"
        yield from (f"    {line}" for line in lines(thread.frames, source))
    if len(order) > MOST_STACKS:
        yield f"  and {len(order) - MOST_STACKS} more that differ: see the files of the ranks beside this one"
