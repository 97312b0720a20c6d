"""What ranks say of themselves when a run makes no progress, and what can be read from it at once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from toolkit.layout.axes import ALL
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.stacks import ENGINE, MODEL, SILENT, Frame, ProcessId, ThreadStack, doing, place
from toolkit.monitor.step_parts import BACKWARD, FORWARD, OPTIMIZER

K = TypeVar("K", bound=Hashable)

PARTS_IN_WORDS = {FORWARD: MODEL, BACKWARD: "in the model's backward", OPTIMIZER: "in the optimizer's step"}
CALLING = "toolkit/engine/collectives.py"  # a thread in a call has frames of it


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process as another one of its host sees it. ``state``: a letter of proc(5). ``notes``: stacks that its own watch wrote while
    native code held the interpreter. ``last``: its newest call, in words."""

    state: str
    notes: str = ""
    last: str = ""

    @property
    def silent(self) -> bool:
        return self.state in SILENT or bool(self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One rank's word.

    Attributes:
        at: ``time.time()`` of the report.
        last: the newest piece of progress, as ``step 16``; ``idle``: seconds since then.
        part: the part of the step that it is in, by its recorder; empty where nobody recorded it.
        calls: the last ones of each group; ``begun`` is ``time.time()`` here, so that ranks can be compared.
        neighbours: ranks of the same host that cannot speak for themselves.
        failure: why this rank ends, where it ends by itself.
        whole: nothing is added to it any more.
    """

    rank: int
    host: str
    pid: int
    at: float
    step: int
    last: str
    idle: float
    part: str = ""
    threads: tuple[ThreadStack, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()
    neighbours: Mapping[int, Neighbour] = field(default_factory=dict)
    failure: str = ""
    whole: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        fields: dict[str, Any] = json.loads(text)
        return Report(
            **{
                **fields,
                "threads": tuple(map(ThreadStack.from_json, fields["threads"])),
                "calls": tuple(map(CollectiveCall.from_json, fields["calls"])),
                "neighbours": {int(rank): Neighbour(**found) for rank, found in fields["neighbours"].items()},
            }
        )

    @property
    def waits_in(self) -> CollectiveCall | None:
        """The call that has stopped it: the first one since its last progress that has not ended.

        One that was begun before and never waited for says nothing, unless the main thread is in a call.
        """
        open_ones = [call for call in self.calls if not call.finished]
        since = [call for call in open_ones if call.begun >= self.at - self.idle]
        inside = any(frame.file.endswith(CALLING) for frame in self._main)
        return min(since or (open_ones if inside else []), key=lambda call: call.begun, default=None)

    @property
    def _main(self) -> tuple[Frame, ...]:
        return next((thread.frames for thread in self.threads if thread.main), ())

    @property
    def does(self) -> str:
        """What its main thread is at: ``waiting for samples``, or where it is."""
        if not self._main:
            return "doing nothing that Python knows of"
        words, where = doing(self._main), place(self._main)
        if words in ("", ENGINE):
            words = PARTS_IN_WORDS.get(self.part, words)
        return f"{words}, in {where}" if words in PARTS_IN_WORDS.values() else words or f"in {where}"


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that is known. ``processes``: of all ranks, by rank. ``asked``: who was asked for a word; None: all."""

    reports: Mapping[int, Report]
    processes: Sequence[ProcessId]
    neighbours: Mapping[int, Neighbour]
    asked: Sequence[int] | None = None

    @property
    def silent(self) -> list[int]:
        asked = range(len(self.processes)) if self.asked is None else self.asked
        return [rank for rank in asked if rank not in self.reports]

    def members(self, call: CollectiveCall) -> list[Report]:
        """Of the call's group, those that reported."""
        return [self.reports[rank] for rank in call.ranks if rank in self.reports]


def found_of(
    reports: Mapping[int, Report],
    processes: Sequence[ProcessId],
    own: Mapping[int, Neighbour],
    asked: Sequence[int] | None = None,
) -> Found:
    """``own``: what the collecting rank sees of its host's processes; the others' words add to it."""
    neighbours = {rank: seen for report in reports.values() for rank, seen in report.neighbours.items()}
    return Found(reports, processes, neighbours | dict(own), asked)


# ---- words


def waits(found: Found) -> str:
    """Who waits in which call, and what the others do."""
    words = grouped(found.reports, lambda rank: state_of(found.reports[rank]))
    return "; ".join(f"{ranks_named(ranks)}: {what}" for what, ranks in words.items())


def state_of(report: Report) -> str:
    call = report.waits_in
    if call is None:
        return report.does
    return f"waits in {call_words(call)}"


def call_words(call: CollectiveCall) -> str:
    number = f"call {call.number} on {axis_words(call)}, " if call.peer is None else ""
    return f"{number}{call.what}" if number else f"{call.what} on {axis_words(call)}"


def ranks_named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    several = len(runs) > 1 or len(runs[0]) > 1
    return f"rank{'s' * several} " + ", ".join("-".join(map(str, run)) for run in runs)


def ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def axis_words(call: CollectiveCall) -> str:
    return "all ranks" if call.axis == ALL else f"axis {call.axis}"


def be(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def grouped(ranks: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    """Ranks by what they have in common, in order."""
    found: defaultdict[K, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        found[key(rank)].append(rank)
    return dict(found)
