"""What each start of a run did with its time, and which share of all of it was of use: goodput.

    attempts/NNN/times.json     of one start: when it began, what its seconds went into, when it ended
    attempts/NNN/saves.jsonl    its saves: how long each took, and how much of its work each keeps

Goodput is useful time / wall time, over all attempts. Useful is the time of the steps that stand in the end: a step that a later attempt
ran again was of no use. The wall's time begins with the first start, and goes on between attempts. How well a step uses its GPUs is
another question, which MFU answers. Times are of the clocks of the machines that wrote them; where those differ, a negative time counts
as none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from toolkit.files import write_whole
from toolkit.progress import duration

TIMES, SAVES = "times.json", "saves.jsonl"

# Where time is lost, in the order in which people are told.
REPEATED = "repeated"  # steps that were run again, or will have to be
STARTING = "starting"  # from a start to its first step: composing, data, engine, loading
SAVING = "saving"  # training stood still for it
EVALUATION = "evaluation"
ENDING = "ending"  # after an attempt's last step: what follows training, a hang, the death of ranks
WAITING = "waiting"  # between the end of an attempt and the next start: a queue, a person, a back-off
OTHER = "other"  # between steps: logging, plots, probes
MIN_REPORTED_SHARE = 0.002  # of the wall's time: less is not worth a word
CAUSES = (REPEATED, STARTING, SAVING, EVALUATION, ENDING, WAITING, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One save that became complete. Of rank 0, as the others are waited for.

    Attributes:
        step: optimizer steps that it keeps.
        seconds: from its beginning to its commit, in the background too.
        bytes: that this rank wrote.
        stepping: seconds of this attempt's steps up to it.
    """

    step: int
    seconds: float
    bytes: int
    stepping: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """Of one attempt. Moments are seconds since 1970.

    Attributes:
        seen: when this was written last: so long it lived at least.
        ended: None while it runs, and where it died without a word.
        first: steps that were done when it began to train; None: it did not get there.
        first_step: when its first step was done, which has compilation and warm-up in it.
        starting: seconds until that step began, without evaluations; None: it did not come so far.
        step: steps done at last.
        stepping, saving, evaluating: seconds of its steps, and that it stood still for saves and for evaluations.
        active: when its last step, save or evaluation was done.
        state, reason: how it ended, as ``status.json`` had it then.
    """

    began: float
    seen: float
    ended: float | None = None
    first: int | None = None
    first_step: float | None = None
    starting: float | None = None
    step: int | None = None
    stepping: float = 0.0
    saving: float = 0.0
    evaluating: float = 0.0
    active: float | None = None
    state: str | None = None
    reason: str | None = None

    @property
    def end(self) -> float:
        return self.ended if self.ended is not None else self.seen

    @property
    def start_seconds(self) -> float | None:
        """From its start to the end of its first step."""
        return None if self.first_step is None else max(0.0, self.first_step - self.began)


@dataclass(frozen=True, slots=True)
class Attempt:
    times: AttemptTimes
    saves: tuple[SaveRecord, ...] = ()

    def work(self, step: int) -> float:
        """Seconds of its steps up to ``step``: measured at its saves, between them in proportion to steps."""
        times = self.times
        if times.first is None or times.step is None or step <= times.first:
            return 0.0
        if step >= times.step:
            return times.stepping
        known = [
            (times.first, 0.0),
            *((save.step, save.stepping) for save in self.saves),
            (times.step, times.stepping),
        ]
        below = max(known_one for known_one in known if known_one[0] <= step)
        above = min(known_one for known_one in known if known_one[0] > step)
        return below[1] + (above[1] - below[1]) * (step - below[0]) / (above[0] - below[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """
    Attributes:
        lost: seconds by cause, of CAUSES; with ``useful_seconds`` they add up to ``wall_seconds`` where clocks agree.
        start_seconds: from each start to the end of its first step, of the attempts that made one.
    """

    wall_seconds: float
    useful_seconds: float
    lost: Mapping[str, float]
    attempts: int
    start_seconds: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        return min(1.0, self.useful_seconds / self.wall_seconds) if self.wall_seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``status.json``."""
        return {
            "share": round(self.share, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "useful_seconds": round(self.useful_seconds, 3),
            "lost": {cause: round(seconds, 3) for cause, seconds in self.lost.items()},
            "attempts": self.attempts,
            "start_seconds": [round(seconds, 3) for seconds in self.start_seconds],
        }


def compute_goodput(attempts: Sequence[Attempt], *, kept: int | None = None) -> Goodput | None:
    """Of a run, as far as it has come; None where nothing has begun.

    Args:
        attempts: in their order.
        kept: the newest checkpoint's step where the run has ended before its last one: later steps will have to be run again. None:
            it is under way, or done, and all of its last attempt's steps stand.
    """
    if not attempts:
        return None
    lost = dict.fromkeys(CAUSES, 0.0)
    useful = 0.0
    stands = [
        min(after)
        if (after := [later.times.first for later in attempts[number + 1 :] if later.times.first is not None])
        else kept
        for number in range(len(attempts))
    ]
    for attempt, limit in zip(attempts, stands, strict=True):
        times = attempt.times
        work = times.stepping if limit is None else attempt.work(limit)
        useful += work
        lost[REPEATED] += times.stepping - work
        whole = max(0.0, times.end - times.began)
        told = {SAVING: times.saving, EVALUATION: times.evaluating}
        if times.starting is None:
            told[STARTING] = max(0.0, whole - times.saving - times.evaluating)
        else:
            told |= {STARTING: times.starting, ENDING: max(0.0, times.end - (times.active or times.end))}
            told[OTHER] = max(0.0, whole - times.stepping - sum(told.values()))
        for cause, seconds in told.items():
            lost[cause] += seconds
    for one, following in pairwise(attempts):
        lost[WAITING] += max(0.0, following.times.began - one.times.end)
    wall = max(attempt.times.end for attempt in attempts) - attempts[0].times.began
    starts = tuple(took for attempt in attempts if (took := attempt.times.start_seconds) is not None)
    return Goodput(
        wall_seconds=max(0.0, wall),
        useful_seconds=useful,
        lost=lost,
        attempts=len(attempts),
        start_seconds=starts,
    )


def format_goodput(total: Goodput) -> str:
    """To people."""
    told = ", ".join(
        f"{cause} {duration(seconds)}"
        for cause, seconds in sorted(total.lost.items(), key=lambda one: -one[1])
        if seconds >= max(1.0, MIN_REPORTED_SHARE * total.wall_seconds)
    )
    over = f" over {total.attempts} attempts" if total.attempts > 1 else ""
    return (
        f"goodput {total.share:.1%}: of {duration(total.wall_seconds)}{over}, {duration(total.useful_seconds)} went into steps that "
        f"stand{f'; the rest: {told}' if told else ''}"
    )


# ---- files


def write_times(folder: Path, times: AttemptTimes, *, durable: bool = False) -> None:
    """Into an attempt's folder. While it runs nothing is synced, as of ``status.json``."""
    write_whole(folder / TIMES, json.dumps(asdict(times)) + "\n", durable=durable)


def read_times(folder: Path) -> AttemptTimes | None:
    """None where there is none, as of older versions, or a power failure left half of it."""
    found = _object(_text(folder / TIMES)) or {}
    known = {field.name: found[field.name] for field in fields(AttemptTimes) if field.name in found}
    words = {"state", "reason"}
    must = {"began", "seen", "stepping", "saving", "evaluating"}
    right = all(
        isinstance(value, str if name in words else int | float) or (value is None and name not in must)
        for name, value in known.items()
    )
    return AttemptTimes(**known) if right and {"began", "seen"} <= known.keys() else None


def end_times(folder: Path, now: float, *, state: str, reason: str | None, anew: bool = False) -> None:
    """The attempt has ended. ``anew``: even where an end is recorded."""
    times = read_times(folder)
    if times is not None and (times.ended is None or anew):
        write_times(
            folder,
            replace(times, ended=now, seen=max(now, times.seen), state=state, reason=reason),
            durable=True,
        )


def append_save(folder: Path, save: SaveRecord) -> None:
    with (folder / SAVES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(save)) + "\n")


def read_attempt(folder: Path) -> Attempt | None:
    times = read_times(folder)
    return None if times is None else Attempt(times, tuple(read_saves(folder)))


def read_saves(folder: Path) -> Iterator[SaveRecord]:
    """Whole rows; a torn one is passed over."""
    names = {field.name for field in fields(SaveRecord)}
    for line in _text(folder / SAVES).splitlines():
        row = _object(line)
        if (
            row is not None
            and row.keys() == names
            and all(isinstance(value, int | float) for value in row.values())
        ):
            yield SaveRecord(**row)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
