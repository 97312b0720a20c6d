"""Goodput: how each start of a run spent its time, and the share of the total that was useful.

    attempts/NNN/times.json     one start: when it began, how its time was spent, when it ended
    attempts/NNN/saves.jsonl    its saves: duration, and how much of its work each preserves

Goodput is useful time / wall time over all attempts. Useful is the time of steps that are part of the final
result: a step that a later attempt repeated was not useful. Wall time starts with the first attempt and
continues between attempts. MFU measures how well a step uses its GPUs. Times come from the clocks of the
machines that wrote them; a negative difference counts as zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from toolkit.files import write_whole
from toolkit.progress import duration

TIMES, SAVES = "times.json", "saves.jsonl"

# Causes of lost time, in the order in which they are reported.
REPEATED = "repeated"  # steps that were or must be repeated
STARTING = "starting"  # from a start to its first step: configuration, data, engine, loading
SAVING = "saving"  # training paused for a save
EVALUATION = "evaluation"
ENDING = "ending"  # after an attempt's last step: finalization, a hang, the death of ranks
WAITING = "waiting"  # between attempts: a queue, manual restart, a back-off
OTHER = "other"
MIN_REPORTED_SHARE = 0.002  # of the wall time: smaller losses are not reported
CAUSES = (REPEATED, STARTING, SAVING, EVALUATION, ENDING, WAITING, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """One completed save, as measured on rank 0, which waits for the others.

    Attributes:
        step: Completed optimizer steps that it preserves.
        seconds: From start to commit, also in the background.
        bytes: Written by this rank.
        stepping: Seconds of this attempt's steps up to the save.
    """

    step: int
    seconds: float
    bytes: int
    stepping: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimes:
    """The times of one attempt. Moments are seconds since 1970.

    Attributes:
        began: Start of the attempt.
        seen: Last write of this record, so the attempt lived at least until then.
        ended: None while it runs, or if it died without recording its end.
        first: Completed steps when it began to train; None if it did not.
        first_step: End of its first step, which includes compilation and warm-up.
        starting: Seconds until that step began, without evaluations; None if it did not begin.
        step: Last completed step.
        stepping, saving, evaluating: Seconds of steps, of pauses for saves, and of evaluations.
        repeated: Seconds of further steps that this attempt has undone by rollbacks.
        active: End of its last step, save or evaluation.
        state, reason: How it ended, as in ``status.json``.
        save_interval, save_pause, between_failures: With ``checkpoint.every=auto`` the chosen seconds of
            training between two saves, and what they follow from: seconds for which a save stops training,
            and between failures.
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
    repeated: float = 0.0
    active: float | None = None
    state: str | None = None
    reason: str | None = None
    save_interval: float | None = None
    save_pause: float | None = None
    between_failures: float | None = None

    @property
    def end(self) -> float:
        return self.ended if self.ended is not None else self.seen

    @property
    def start_seconds(self) -> float | None:
        """Seconds from the start to the end of the first step."""
        return None if self.first_step is None else max(0.0, self.first_step - self.began)


@dataclass(frozen=True, slots=True)
class Attempt:
    times: AttemptTimes
    saves: tuple[SaveRecord, ...] = ()

    def work(self, step: int) -> float:
        """Return the seconds of steps up to ``step``: measured at saves, interpolated between them."""
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
        below = max(point for point in known if point[0] <= step)
        above = min(point for point in known if point[0] > step)
        return below[1] + (above[1] - below[1]) * (step - below[0]) / (above[0] - below[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput of a run.

    Attributes:
        wall_seconds: Seconds from the first start.
        useful_seconds: Seconds of useful steps.
        lost: Seconds by cause, see CAUSES; together with ``useful_seconds`` they add up to ``wall_seconds``
            if clocks agree.
        attempts: Number of attempts.
        start_seconds: For each attempt that made a step, seconds from its start to the end of that step.
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
        """Return the entry of ``status.json``."""
        return {
            "share": round(self.share, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "useful_seconds": round(self.useful_seconds, 3),
            "lost": {cause: round(seconds, 3) for cause, seconds in self.lost.items()},
            "attempts": self.attempts,
            "start_seconds": [round(seconds, 3) for seconds in self.start_seconds],
        }


def compute_goodput(attempts: Sequence[Attempt], *, kept: int | None = None) -> Goodput | None:
    """Compute a run's goodput so far; None if no attempt has begun.

    Args:
        attempts: In order.
        kept: Step of the newest checkpoint if the run ended before its last step, so that later steps must be
            repeated. None: the run continues or is complete, and all steps of its last attempt count.
    """
    if not attempts:
        return None
    lost = dict.fromkeys(CAUSES, 0.0)
    useful = 0.0
    limits = [
        min(after)
        if (after := [later.times.first for later in attempts[number + 1 :] if later.times.first is not None])
        else kept
        for number in range(len(attempts))
    ]
    for attempt, limit in zip(attempts, limits, strict=True):
        times = attempt.times
        work = times.stepping if limit is None else attempt.work(limit)
        useful += work
        lost[REPEATED] += times.stepping - work + times.repeated
        whole = max(0.0, times.end - times.began)
        losses = {SAVING: times.saving, EVALUATION: times.evaluating}
        if times.starting is None:
            losses[STARTING] = max(0.0, whole - times.saving - times.evaluating)
        else:
            losses |= {STARTING: times.starting, ENDING: max(0.0, times.end - (times.active or times.end))}
            losses[OTHER] = max(0.0, whole - times.stepping - times.repeated - sum(losses.values()))
        for cause, seconds in losses.items():
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
    """Describe goodput in one line."""
    losses = ", ".join(
        f"{cause} {duration(seconds)}"
        for cause, seconds in sorted(total.lost.items(), key=lambda item: -item[1])
        if seconds >= max(1.0, MIN_REPORTED_SHARE * total.wall_seconds)
    )
    over = f" over {total.attempts} attempts" if total.attempts > 1 else ""
    return (
        f"goodput {total.share:.1%}: of {duration(total.wall_seconds)}{over}, "
        f"{duration(total.useful_seconds)} went into useful "
        f"steps{f'; the rest: {losses}' if losses else ''}"
    )


# ---- files


def write_times(folder: Path, times: AttemptTimes, *, durable: bool = False) -> None:
    """Write the times to an attempt's folder; not synced while the attempt runs."""
    write_whole(folder / TIMES, json.dumps(asdict(times)) + "\n", durable=durable)


def read_times(folder: Path) -> AttemptTimes | None:
    """Read the times; None if the file is missing, or incomplete after a power failure."""
    found = _parse_object(_text(folder / TIMES)) or {}
    known = {field.name: found[field.name] for field in fields(AttemptTimes) if field.name in found}
    text_fields = {"state", "reason"}
    required = {"began", "seen", "stepping", "saving", "evaluating", "repeated"}
    valid = all(
        isinstance(value, str if name in text_fields else int | float)
        or (value is None and name not in required)
        for name, value in known.items()
    )
    return AttemptTimes(**known) if valid and {"began", "seen"} <= known.keys() else None


def end_times(folder: Path, now: float, *, state: str, reason: str | None, overwrite: bool = False) -> None:
    """Record the end of an attempt, unless an end is recorded and ``overwrite`` is false."""
    times = read_times(folder)
    if times is not None and (times.ended is None or overwrite):
        write_times(
            folder,
            replace(times, ended=now, seen=max(now, times.seen), state=state, reason=reason),
            durable=True,
        )


def write_saves(folder: Path, saves: Iterable[SaveRecord]) -> None:
    """Replace the rows of ``saves.jsonl``."""
    text = "".join(json.dumps(asdict(save)) + "\n" for save in saves)
    write_whole(folder / SAVES, text, durable=False)


def append_save(folder: Path, save: SaveRecord) -> None:
    with (folder / SAVES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(save)) + "\n")


def read_attempt(folder: Path) -> Attempt | None:
    times = read_times(folder)
    return None if times is None else Attempt(times, read_saves(folder))


def read_saves(folder: Path) -> tuple[SaveRecord, ...]:
    """Return complete rows; an incomplete one is skipped."""
    names = {field.name for field in fields(SaveRecord)}
    rows = map(_parse_object, _text(folder / SAVES).splitlines())
    return tuple(
        SaveRecord(**row)
        for row in rows
        if row is not None
        and row.keys() == names
        and all(isinstance(value, int | float) for value in row.values())
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
