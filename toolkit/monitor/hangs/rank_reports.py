"""The reports of ranks when a run makes no progress. ``observe/hang_reporter.py`` collects them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from toolkit.layout.axes import ALL
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.stacks import (
    ENGINE,
    MODEL,
    OWN_DATASET,
    SILENT,
    Frame,
    ProcessId,
    ThreadStack,
    describe_activity,
    format_location,
)
from toolkit.step_parts import BACKWARD, FORWARD, OPTIMIZER

K = TypeVar("K", bound=Hashable)

ENGINE_PARTS = {FORWARD: MODEL, BACKWARD: "in the model's backward", OPTIMIZER: "in the optimizer's step"}
MAX_NAMED = 4  # processes in one sentence
COLLECTIVES_FILE = "toolkit/engine/collectives.py"  # a thread in a collective call has frames of this file


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process as another process of its host sees it.

    Attributes:
        state: a letter of proc(5).
        notes: stacks that ``faulthandler`` wrote while native code held the interpreter's lock.
        last: its newest call, formatted.
    """

    state: str
    notes: str = ""
    last: str = ""

    @property
    def silent(self) -> bool:
        return self.state in SILENT or bool(self.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank.

    Attributes:
        at: ``time.time()`` of the report.
        last: the newest progress, as ``step 16``; ``idle``: seconds since then.
        part: the open part of the step, or the user's hook that runs, as ``hooks.NAME.on_step``; empty if it
            is not recorded.
        calls: the last calls of each group; ``begun`` is ``time.time()`` here, so that ranks can be
            compared.
        neighbours: ranks of the same host that cannot report.
        failure: why this rank ends, if it fails by itself.
        whole: whether the report is final.
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
    def from_json(text: str) -> RankReport:
        fields: dict[str, Any] = json.loads(text)
        return RankReport(
            **{
                **fields,
                "threads": tuple(map(ThreadStack.from_json, fields["threads"])),
                "calls": tuple(map(CollectiveCall.from_json, fields["calls"])),
                "neighbours": {int(rank): Neighbour(**seen) for rank, seen in fields["neighbours"].items()},
            }
        )

    @property
    def blocking_call(self) -> CollectiveCall | None:
        """The call that blocks this rank: the first unfinished one since its last progress.

        An older call that was never waited for blocks nothing, unless the main thread is in a call.
        """
        unfinished = [call for call in self.calls if not call.finished]
        recent = [call for call in unfinished if call.begun >= self.at - self.idle]
        in_call = any(frame.file.endswith(COLLECTIVES_FILE) for frame in self._main_frames)
        return min(recent or (unfinished if in_call else []), key=lambda call: call.begun, default=None)

    def collectives(self, group: str) -> list[CollectiveCall]:
        """Return the recorded collective calls of a group."""
        return [call for call in self.calls if call.group == group and call.peer is None]

    def calls_made(self, group: str) -> int:
        """Return the number of collective calls of a group so far."""
        return max((call.number for call in self.collectives(group)), default=0)

    @property
    def _main_frames(self) -> tuple[Frame, ...]:
        return next((thread.frames for thread in self.threads if thread.main), ())

    @property
    def activity(self) -> str:
        """Return what the main thread does, such as ``waiting for samples``, or its location."""
        if not self._main_frames:
            return "outside of Python"
        activity, location = describe_activity(self._main_frames), format_location(self._main_frames)
        if self.part.startswith("hooks."):
            return f"in {self.part}, {location}"
        if activity in ("", ENGINE):
            activity = ENGINE_PARTS.get(self.part, activity)
        if activity in (OWN_DATASET, *ENGINE_PARTS.values()):
            return f"{activity}, in {location}"
        return activity or f"in {location}"


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """Everything that the collecting rank knows.

    Attributes:
        processes: of all ranks, by rank.
        expected: ranks that were asked for a report; None: all ranks.
    """

    reports: Mapping[int, RankReport]
    processes: Sequence[ProcessId]
    neighbours: Mapping[int, Neighbour]
    expected: Sequence[int] | None = None

    @property
    def silent(self) -> list[int]:
        expected = range(len(self.processes)) if self.expected is None else self.expected
        return [rank for rank in expected if rank not in self.reports]

    def members(self, call: CollectiveCall) -> list[RankReport]:
        """Return the reports of the ranks in the call's group."""
        return [self.reports[rank] for rank in call.ranks if rank in self.reports]

    def groups(self) -> list[CollectiveCall]:
        """Return one call of each group."""
        calls = (call for report in self.reports.values() for call in report.calls if call.peer is None)
        return list({call.group: call for call in calls}.values())

    def format_processes(self, ranks: Sequence[int]) -> str:
        """``processes 17 on node0, 23 on node1``."""
        named = ", ".join(
            f"{self.processes[rank].pid} on {self.processes[rank].host}" for rank in ranks[:MAX_NAMED]
        )
        more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
        return f"process{'es' * (len(ranks) > 1)} {named}{more}"


def combine_reports(
    reports: Mapping[int, RankReport],
    processes: Sequence[ProcessId],
    own: Mapping[int, Neighbour],
    expected: Sequence[int] | None = None,
) -> HangEvidence:
    """Combine the reports with ``own``, what the collecting rank sees of its host's processes."""
    neighbours = {rank: seen for report in reports.values() for rank, seen in report.neighbours.items()}
    return HangEvidence(reports, processes, neighbours | dict(own), expected)


# ---- formatting


def describe_waits(evidence: HangEvidence) -> str:
    """Describe which ranks wait in which call, and what the others do."""
    states = group_ranks(evidence.reports, lambda rank: describe_rank(evidence.reports[rank]))
    return "; ".join(f"{format_ranks(ranks)}: {state}" for state, ranks in states.items())


def describe_rank(report: RankReport) -> str:
    call = report.blocking_call
    return report.activity if call is None else f"waits in {format_call(call)}"


def format_call(call: CollectiveCall) -> str:
    if call.peer is None:
        return f"call {call.number} on {format_axis(call)}, {call.what}"
    return f"{call.what} on {format_axis(call)}"


def format_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    several = len(runs) > 1 or len(runs[0]) > 1
    return f"rank{'s' * several} " + ", ".join("-".join(map(str, run)) for run in runs)


def format_ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def format_axis(call: CollectiveCall) -> str:
    return "all ranks" if call.axis == ALL else f"axis {call.axis}"


def is_or_are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def has_or_have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def group_ranks(ranks: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    """Group sorted ranks by ``key``."""
    groups: defaultdict[K, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        groups[key(rank)].append(rank)
    return dict(groups)
