"""Choose the interval between saves with ``checkpoint.every=auto`` from what saves and failures cost."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from toolkit.estimate.save_interval import (
    SaveCosts,
    choose_interval,
    first_costs,
    mean_between_failures,
    prior_between_failures,
)
from toolkit.hooks import SaveObserver
from toolkit.plan.types import RunPlan
from toolkit.progress import duration
from toolkit.rundir.usage import AttemptUsage, restart_seconds

log = logging.getLogger(__name__)

MAX_SAVES = 5  # the newest saves, of which the median counts
LOGGED_CHANGE = 0.2  # of the interval, above which a new one is logged


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenInterval:
    """An interval between saves, and its reasons.

    Attributes:
        seconds: of training between two saves.
        failures, observed: failures so far, and the seconds in which they happened, as if on this attempt's
            number of nodes.
        measured: whether ``costs.save`` was measured, and not assumed by the plan.
    """

    seconds: float
    costs: SaveCosts
    failures: int
    observed: float
    measured: bool

    def __str__(self) -> str:
        costs, source = self.costs, "measured" if self.measured else "assumed"
        return (
            f"checkpoint.every=auto: a save after {duration(self.seconds)} of training. It stops training "
            f"for {costs.save:.2g} s ({source}) and is complete after {costs.commit:.2g} s; a failure is "
            f"expected every {duration(costs.between_failures)} ({self.failures} in "
            f"{duration(self.observed)} so far), and costs {duration(costs.restart)}; expected goodput "
            f"{costs.share(self.seconds):.1%}"
        )


def interval_from_history(
    plan: RunPlan,
    earlier: Sequence[AttemptUsage],
    *,
    elapsed: float,
    paused: Sequence[float] = (),
    committed: Sequence[float] = (),
) -> ChosenInterval:
    """Choose the interval. Pure.

    Args:
        earlier: the attempts before this one.
        elapsed: seconds of this attempt so far.
        paused: seconds for which each save of this attempt stopped training. Without any, those that the
            newest attempt with saves recorded, else those that the plan assumes.
        committed: seconds from the start of each of its saves to its commit; likewise.
    """
    costs, nodes = first_costs(plan), plan.world.nodes
    failures = sum(each.failed for each in earlier)
    observed = elapsed + sum(each.seconds * each.nodes for each in earlier) / nodes
    recorded = [found for each in earlier if (found := each.attempt.times.save_pause) is not None]
    commits = committed or [save.seconds for each in earlier for save in each.attempt.saves][-MAX_SAVES:]
    pauses = paused or recorded[-1:]
    restart = restart_seconds(earlier)
    costs = SaveCosts(
        save=median(pauses) if pauses else costs.save,
        commit=median(commits) if commits else costs.commit,
        restart=costs.restart if restart is None else restart,
        between_failures=mean_between_failures(prior_between_failures(plan), observed, failures),
    )
    return ChosenInterval(
        seconds=choose_interval(costs),
        costs=costs,
        failures=failures,
        observed=observed,
        measured=bool(pauses),
    )


class AutoInterval(SaveObserver):
    """Chooses the interval at the start and after each save. For rank 0, whose timer decides for all ranks.

    Args:
        began: start of this attempt, in seconds since 1970.
        apply: receives each choice.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        plan: RunPlan,
        earlier: Sequence[AttemptUsage],
        *,
        began: float,
        apply: Callable[[ChosenInterval], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan, self._earlier, self._began = plan, tuple(earlier), began
        self._apply, self._clock = apply, clock
        self._paused: deque[float] = deque(maxlen=MAX_SAVES)
        self._committed: deque[float] = deque(maxlen=MAX_SAVES)
        self._saving = False  # a save has started, and its pause has not ended
        self._logged = 0.0
        self._choose()

    def on_save_start(self, step: int) -> None:
        self._saving = True

    def on_save_blocked(self, seconds: float) -> None:
        if self._saving:  # and not the wait for a background save at the end
            self._saving = False
            self._paused.append(seconds)
            self._choose()

    def on_save_end(self, step: int, seconds: float, size: int) -> None:
        self._committed.append(seconds)

    def _choose(self) -> None:
        chosen = interval_from_history(
            self._plan,
            self._earlier,
            elapsed=max(0.0, self._clock() - self._began),
            paused=list(self._paused),
            committed=list(self._committed),
        )
        if abs(chosen.seconds - self._logged) > LOGGED_CHANGE * self._logged:
            self._logged = chosen.seconds
            log.info(str(chosen))
        self._apply(chosen)
