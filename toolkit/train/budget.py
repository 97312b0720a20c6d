"""Stop a run before it exceeds its budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from toolkit.estimate.budget import HOUR, BudgetLimit, budget_limits
from toolkit.hooks import CompletedStep, Hook, SaveObserver
from toolkit.monitor.sink import Row
from toolkit.plan.types import RunPlan
from toolkit.progress import duration
from toolkit.rundir.budget import describe_limit
from toolkit.rundir.status import RunState
from toolkit.rundir.usage import AttemptUsage, device_hours

STEPS, SAVES = 20, 5  # the newest, of which the slowest counts
# From the last save to the recorded end of an attempt: plots, sinks, the engine's end. Assumed until an
# earlier attempt has ended in order.
ENDING_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCosts:
    """The seconds that a run may still take: for a step with what follows it, an evaluation of all sets, a
    save, the upload of a checkpoint, and the end after the last save.
    """

    step: float
    evaluation: float
    save: float
    upload: float
    ending: float

    def needed(self, *, evaluation_due: bool) -> float:
        """Return the seconds until the end if the run makes one more step, evaluates, saves and stops.

        One more save and upload count, which may be due now or still in the background.

        Args:
            evaluation_due: an evaluation comes before that step.
        """
        saving = 2 * (self.save + self.upload)
        return self.step + (1 + evaluation_due) * self.evaluation + saving + self.ending


class BudgetWatch(Hook, SaveObserver):
    """Decides after each step whether the budget allows another one. For rank 0.

    Args:
        earlier: the attempts before this one.
        began: start of this attempt, in seconds since 1970.
        save_seconds: returns the expected duration of a save; None if nothing is known about it.
        upload_seconds: returns the duration of the last upload; 0 if there was none.
        evaluation_seconds: the last evaluation of all sets in an earlier attempt; None if there was none.
        clock, now: seconds on a clock that is never set, and the date.

    Attributes:
        reason: why the run stops; None while it may go on.
    """

    def __init__(
        self,
        plan: RunPlan,
        earlier: Sequence[AttemptUsage],
        *,
        began: float,
        save_seconds: Callable[[], float | None],
        upload_seconds: Callable[[], float] = lambda: 0.0,
        evaluation_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.reason: str | None = None
        self._plan, self._clock, self._now, self._save_seconds = plan, clock, now, save_seconds
        self._upload_seconds = upload_seconds
        self._hours_before = device_hours(earlier)
        self._began = clock() - max(0.0, now().timestamp() - began)
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._since = clock()  # the last decision
        self._paused = 0.0  # for evaluations and saves since then
        self._first = True
        self._evaluating = 0.0  # seconds of the evaluation that is under way
        self._evaluation = evaluation_seconds
        self._saves: deque[float] = deque(maxlen=2 * SAVES)  # pauses, and times until the commit
        self._ending = max(_endings(earlier), default=ENDING_SECONDS)

    def on_start(self, step: int) -> None:
        self._since, self._paused = self._clock(), 0.0

    def on_step(self, completed: CompletedStep) -> None:
        self._evaluating = 0.0

    def on_eval(self, row: Row) -> None:
        """Add the seconds of one set."""
        self._evaluating += row["seconds"]
        self._paused += row["seconds"]
        self._evaluation = self._evaluating

    def on_save_blocked(self, seconds: float) -> None:
        self._paused += seconds
        self._saves.append(seconds)

    def on_save_end(self, step: int, seconds: float, size: int) -> None:
        self._saves.append(seconds)

    def spent(self, step: int) -> bool:
        """Return whether the run must stop after ``step`` completed steps. Call it once after each."""
        now = self._clock()
        if len(self._steps) == 1 and self._first:  # the first step includes compilation and warm-up
            self._steps.clear()
            self._first = False
        self._steps.append(max(0.0, now - self._since - self._paused))
        self._since, self._paused = now, 0.0
        every = self._plan.config.eval.every
        needed = self.costs().needed(evaluation_due=every > 0 and step % every == 0)
        limit = min(self._limits(), key=lambda limit: limit.hours_left)
        if limit.hours_left * HOUR >= needed:
            return False
        self.reason = (
            f"{describe_limit(limit)}, and one more step, an evaluation and saving may need "
            f"{duration(needed)}; to continue, raise {limit.key}"
        )
        return True

    def costs(self) -> StopCosts:
        """Return the seconds that the run may still take, as far as they have been measured.

        Before the first evaluation each of its batches is taken to need as long as a step.
        """
        evaluation, step = self._plan.config.eval, max(self._steps, default=0.0)
        seconds = self._evaluation
        if seconds is None:
            seconds = evaluation.batches * len(evaluation.sets) * step
        return StopCosts(
            step=step,
            evaluation=seconds if evaluation.every else 0.0,
            save=max(*self._saves, self._save_seconds() or 0.0, 0.0),
            upload=self._upload_seconds(),
            ending=self._ending,
        )

    def _limits(self) -> list[BudgetLimit]:
        ranks = self._plan.world.ranks
        hours = self._hours_before + (self._clock() - self._began) * ranks / HOUR
        return budget_limits(self._plan.config, ranks=ranks, device_hours=hours, now=self._now())


def _endings(earlier: Sequence[AttemptUsage]) -> list[float]:
    """Return the seconds from the last activity to the end of attempts that ended in order."""
    orderly = (RunState.STOPPED, RunState.DONE)
    return [
        max(0.0, times.ended - times.active)
        for each in earlier
        if (times := each.attempt.times).state in orderly
        and times.ended is not None
        and times.active is not None
    ]
