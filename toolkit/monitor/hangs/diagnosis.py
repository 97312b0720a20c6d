"""Why a run makes no progress: from the word of the ranks that can still speak to one cause. Pure; ``observe/watchdog.py`` collects.

The order of the rules is the order of certainty. A process that is gone or stopped explains every wait for it. Ranks that call different
collectives under one number are at odds, whoever is right. A rank that waits in no collective while others do is where they wait for it;
one that waits elsewhere has passed a collective by. Where all wait in the same call, the ranks did their part, and the network did not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.reports import (
    Found,
    Report,
    axis_words,
    be,
    grouped,
    have,
    ordinal,
    ranks_named,
    waits,
)
from toolkit.monitor.hangs.stacks import ENDED, SAMPLES, SILENT, STATES, doing, short

NAME = "hang"
MOST_NAMED = 4  # processes in one sentence
# Calls in which ranks may have tensors of different shapes, and nothing is wrong.
UNEQUAL = ("gather", "scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """As in an :class:`Alert`."""

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


def diagnose(found: Found) -> Diagnosis:
    """The first rule that explains it."""
    assert found.reports, "who asks has reported"
    return next(said for said in (rule(found) for rule in RULES) if said is not None)


def mismatch(found: Found) -> Diagnosis | None:
    """Only whether ranks call different collectives: for a run that fails by itself, perhaps because of that."""
    return _differ(found)


# ---- the rules


def _failed(found: Found) -> Diagnosis | None:
    failed = [rank for rank, report in found.reports.items() if report.failure]
    if not failed:
        return None
    first = found.reports[failed[0]]
    return Diagnosis(
        f"{ranks_named(failed)} failed: {first.failure.splitlines()[0]}",
        ranks_named(failed),
        waits(found),
        "mend what the failure says; the same command continues from the newest checkpoint",
    )


def _silent(found: Found) -> Diagnosis | None:
    silent = found.silent
    if not silent:
        return None
    states = grouped(silent, lambda rank: found.neighbours[rank].state if rank in found.neighbours else "")
    state = next((state for state in SILENT if state in states), None)
    if state is not None:
        ranks = states[state]
        words = f"{have(ranks) if state in ENDED else be(ranks)} {STATES[state]}"
        seen = (
            f"{_processes(found, ranks)} {words}"
            + ("" if state in ENDED else f" (state {state})")
            + _last_call(found, ranks)
        )
        return Diagnosis(
            f"{ranks_named(ranks)} {words}",
            ranks_named(ranks),
            f"{seen}; {waits(found)}",
            _SILENT.get(state, _ENDED),
        )
    frozen = [rank for rank in silent if rank in found.neighbours and found.neighbours[rank].notes]
    if frozen:
        return Diagnosis(
            f"{ranks_named(frozen)} {be(frozen)} held by native code, which keeps the Python interpreter to itself",
            ranks_named(frozen),
            f"no Python thread of {_processes(found, frozen)} could run; {waits(found)}",
            "see in the report where the last line of Python is: the extension that is called there does not come back",
        )
    hosts = grouped(range(len(found.processes)), lambda rank: found.processes[rank].host)
    lost = {host: ranks for host, ranks in hosts.items() if not set(ranks) & found.reports.keys()}
    if lost:
        ranks = [rank for them in lost.values() for rank in them]
        names = " and ".join(sorted(lost))
        return Diagnosis(
            f"nobody on {names} answers",
            ranks_named(ranks),
            f"no word from {ranks_named(ranks)}; {waits(found)}",
            f"look whether {names} can be reached, and at its kernel's log: dmesg",
        )
    return Diagnosis(
        f"{ranks_named(silent)} {'do' if len(silent) > 1 else 'does'} not answer",
        ranks_named(silent),
        f"{_processes(found, silent)} {be(silent)} there and not stopped; {waits(found)}",
        "look at its kernel's log (dmesg) and at its stack: py-spy dump --pid PID",
    )


def _last_call(found: Found, ranks: Sequence[int]) -> str:
    last = found.neighbours[ranks[0]].last
    return f"; the last call of {ranks_named(ranks[:1])}: {last}" if last else ""


_SILENT = {
    "T": "find out who stopped it (SIGSTOP, Ctrl-Z, a paused container); the same command continues from the newest checkpoint",
    "t": "leave the debugger; the same command continues from the newest checkpoint",
    "D": "look at the kernel's log of its machine (dmesg): a disk, a file server or a driver does not answer",
}
_ENDED = "look for the end of that process: dmesg (out of memory?), the attempt's log; the same command continues from the last save"


def _differ(found: Found) -> Diagnosis | None:
    """Ranks of a group have made different calls under one number, and one of them has not come back from it."""
    for group in _groups(found):
        members = [report for report in found.members(group) if _made(report, group.group)]
        last = {_made(report, group.group) for report in members}
        stuck = {
            call.number
            for report in members
            for call in _collectives(report, group.group)
            if not call.finished
        }
        for number in sorted(last | stuck):
            there = {
                report.rank: call
                for report in members
                for call in _collectives(report, group.group)
                if call.number == number
            }
            kinds = grouped(there, lambda rank: _compared(there[rank]))  # noqa: B023  used at once
            if len(kinds) < 2:
                continue
            odd = min(kinds.values(), key=len) if len(there) > 2 else sorted(there)
            said = "; ".join(f"{ranks_named(ranks)}: {there[ranks[0]].what}" for ranks in kinds.values())
            left_out = _left_out(found, group, number, kinds)
            same = len({call.operation for call in there.values()}) == 1
            what = "with different shapes" if same else "that differ"
            return Diagnosis(
                f"the ranks make calls {what} as number {number} on {axis_words(group)}",
                ranks_named(odd),
                said + left_out,
                "see the stacks for where the ranks part: other shapes of batches or of the model, or a collective that not all ranks make",
            )
    return None


def _left_out(found: Found, group: CollectiveCall, number: int, kinds: Mapping[str, Sequence[int]]) -> str:
    """Whether one side's calls are the other's moved by one: then it is a call that only the other made."""
    sides = list(kinds.values())
    for these, those in ((these, those) for these in sides for those in sides if these is not those):
        ahead = {call.number: call for call in _collectives(found.reports[those[0]], group.group)}
        own = next(
            call for call in _collectives(found.reports[these[0]], group.group) if call.number == number
        )
        if number + 1 in ahead and _compared(ahead[number + 1]) == _compared(own):
            return (
                f"; {ranks_named(these)} left out {ahead[number].what}, or {ranks_named(those)} alone made it"
            )
    return ""


def _absent(found: Found) -> Diagnosis | None:
    """Some wait in a call, and some in none."""
    free = [rank for rank, report in found.reports.items() if report.waits_in is None]
    if not free or len(free) == len(found.reports):
        return None
    does, ranks = max(
        grouped(free, lambda rank: found.reports[rank].does).items(), key=lambda pair: len(pair[1])
    )
    behind = [words for blocked in _blocked(found) for words in blocked.lagging(ranks)]
    evidence = "; ".join(
        [*behind[:1], *([_reading(found.reports[ranks[0]])] if does == SAMPLES else []), waits(found)]
    )
    next_step = _SAMPLES if does == SAMPLES else f"see in the report where {ranks_named(ranks)} {be(ranks)}"
    return Diagnosis(
        f"{ranks_named(ranks)} {be(ranks)} {does}, and the others wait for {'them' if len(ranks) > 1 else 'it'}",
        ranks_named(ranks),
        evidence,
        next_step,
    )


_SAMPLES = "look at the storage under data.path, and in the report at the thread that reads ahead; the same command continues"


def _reading(report: Report) -> str:
    """Where the thread is that reads samples ahead."""
    ahead = [thread for thread in report.threads if not thread.main and doing(thread.frames) == SAMPLES]
    if not ahead:
        return f"rank {report.rank} has no thread that reads ahead: it has ended"
    ours = next(frame for frame in reversed(ahead[0].frames) if doing([frame]) == SAMPLES)
    inner = ahead[0].frames[-1]
    below = "" if inner == ours else f", which waits in {inner.function}"
    return f"its thread {ahead[0].name} is in {ours.function} ({short(ours.file)}:{ours.line}){below}"


@dataclass(frozen=True, slots=True)
class _Blocked:
    """A collective that some ranks wait in, and others have not come to. ``behind``: how many calls of the group they have made."""

    call: CollectiveCall
    waiting: tuple[int, ...]
    behind: Mapping[int, int]

    def lagging(self, ranks: Iterable[int]) -> list[str]:
        """What is to be said of those of ``ranks`` that have not come."""
        late = grouped([rank for rank in ranks if rank in self.behind], lambda rank: self.behind[rank])
        others = f"{ranks_named(self.waiting)} wait{'s' * (len(self.waiting) == 1)} in the {ordinal(self.call.number)}: {self.call.what}"
        return [
            f"{ranks_named(them)} {have(them)} made {made} calls on {axis_words(self.call)}, {others}"
            for made, them in late.items()
        ]


def _blocked(found: Found) -> list[_Blocked]:
    """The likeliest culprit first: few ranks that passed a call by before many; then who went from one call to another as nobody had
    before; then the call that was waited in first."""
    seen = Counter(step for report in found.reports.values() for step in _steps(report)[:-1])

    def key(blocked: _Blocked) -> tuple[int, int, float]:
        new = sum(
            seen[_steps(found.reports[rank])[-1]] == 0
            for rank in blocked.behind
            if _steps(found.reports[rank])
        )
        return len(blocked.behind), -new, blocked.call.begun

    waiting: defaultdict[tuple[str, int], list[tuple[int, CollectiveCall]]] = defaultdict(list)
    for rank, report in found.reports.items():
        call = report.waits_in
        if call is not None and call.peer is None:
            waiting[call.group, call.number].append((rank, call))
    entries = []
    for ranks in waiting.values():
        call = min((call for _, call in ranks), key=lambda call: call.begun)
        behind = {
            report.rank: made
            for report in found.members(call)
            if (made := _made(report, call.group)) < call.number
        }
        if behind:
            entries.append(_Blocked(call, tuple(rank for rank, _ in ranks), behind))
    return sorted(entries, key=key)


def _steps(report: Report) -> list[tuple[str, str]]:
    """From call to call, as this rank made them: pairs of what was called, the newest last."""
    made = [f"{call.group} {call.what}" for call in sorted(report.calls, key=lambda call: call.begun)]
    return list(pairwise(made))


def _passed_by(found: Found) -> Diagnosis | None:
    """Somebody waits in a collective that a rank has not made, which waits in another one."""
    blocked = next(iter(_blocked(found)), None)
    if blocked is None:
        return None
    ranks = list(blocked.behind)
    return Diagnosis(
        "; ".join(blocked.lagging(ranks)),
        ranks_named(ranks),
        waits(found),
        f"see in the report where {ranks_named(ranks)} {be(ranks)} and the others are not: a collective that not all ranks "
        "make, or not in the same order",
    )


def _together(found: Found) -> Diagnosis | None:
    """All wait in calls, and nobody in one that another has not made."""
    calls = [report.waits_in for report in found.reports.values()]
    if None in calls:
        return None
    return Diagnosis(
        "every rank has made its call, and the calls do not end",
        "",
        waits(found),
        "look at the network and the GPUs: XID and link errors (dmesg, nvidia-smi), NCCL_DEBUG=INFO, nccl-tests between hosts",
    )


def _alone(found: Found) -> Diagnosis:
    """Nobody waits in a call."""
    does = grouped(found.reports, lambda rank: found.reports[rank].does)
    said = ", ".join(f"{ranks_named(ranks)} {be(ranks)} {what}" for what, ranks in does.items())
    first = next(iter(found.reports.values()))
    samples = first.does == SAMPLES and len(does) == 1
    return Diagnosis(
        said,
        "" if len(found.reports) > 1 else ranks_named(found.reports),
        _reading(first) if samples else waits(found),
        _SAMPLES
        if samples
        else "see the stacks in the report; if that work is sound and slow: a larger monitor.hang_seconds",
    )


RULES: tuple[Callable[[Found], Diagnosis | None], ...] = (
    _failed,
    _silent,
    _differ,
    _absent,
    _passed_by,
    _together,
    _alone,
)


# ---- what is asked of reports


def _groups(found: Found) -> list[CollectiveCall]:
    """One call of each group that a rank has not left, or that was its last one: what can be at odds."""
    return list(
        {
            call.group: call
            for report in found.reports.values()
            for call in report.calls
            if call.peer is None
        }.values()
    )


def _collectives(report: Report, group: str) -> list[CollectiveCall]:
    return [call for call in report.calls if call.group == group and call.peer is None]


def _made(report: Report, group: str) -> int:
    return max((call.number for call in _collectives(report, group)), default=0)


def _compared(call: CollectiveCall) -> str:
    """What has to be equal on all ranks."""
    return call.operation if call.operation.startswith(UNEQUAL) else call.what


def _processes(found: Found, ranks: Sequence[int]) -> str:
    named = ", ".join(
        f"{found.processes[rank].pid} on {found.processes[rank].host}" for rank in ranks[:MOST_NAMED]
    )
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"process{'es' * (len(ranks) > 1)} {named}{more}"
