"""Whether ranks that failed are started again, and when. Pure: the parent carries it out (cluster/supervisor.py)."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import ExitCode

FIRST_SECONDS = (
    2.0  # before the first start again; each failure in a row without a newer checkpoint doubles it
)
MOST_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Restart:
    """
    Attributes:
        fruitless: failures in a row that left no newer checkpoint, this one too; 0 where it left one.
        seconds: to wait before: what broke may need time to come back.
    """

    fruitless: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NoRestart:
    """``why`` is empty where there is nothing to tell: the run is done, was stopped, or is wrong."""

    why: str = ""


def after(
    code: ExitCode,
    *,
    asked: bool,
    hopeless: bool,
    before: int | None,
    saved: int | None,
    fruitless: int,
    limit: int,
) -> Restart | NoRestart:
    """What follows the end of an attempt.

    Args:
        asked: somebody asked the run to stop: whatever became of it then, it is not started again.
        hopeless: it ended by an error of its own before the first step that the run made since it was typed: a mistake, in a model of
            the user's say, which would be met again.
        before, saved: step of the newest checkpoint when the attempt began, and now; None: there is none.
        fruitless: failures in a row without a newer checkpoint before this one.
        limit: ``cluster.restarts``.
    """
    if code is ExitCode.DIVERGED and limit:
        return NoRestart(
            "its numbers are not finite, and would not be after another start from the same checkpoint"
        )
    if code is not ExitCode.FAILURE or asked or not limit:
        return NoRestart()
    if hopeless:
        return NoRestart("it failed before its first step, by an error that it would meet again")
    if saved is not None and saved != before:
        return Restart(0, FIRST_SECONDS)
    if fruitless >= limit:
        return NoRestart(
            f"it failed {fruitless + 1} times in a row without a newer checkpoint, and cluster.restarts={limit}"
        )
    return Restart(fruitless + 1, min(MOST_SECONDS, FIRST_SECONDS * 2**fruitless))


def words(restart: Restart, *, failed: int, why: str, saved: int | None, limit: int) -> str:
    """To people. ``failed``: the attempt that did, and ``why`` it did."""
    place = f"the checkpoint of step {saved}" if saved is not None else "the beginning"
    count = f" (start {restart.fruitless} of {limit} without a newer checkpoint)" if restart.fruitless else ""
    return f"attempt {failed} failed: {why}\nattempt {failed + 1} begins in {restart.seconds:g} s, from {place}{count}"
