"""Detect checkpoints that take too long or are overdue."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

from toolkit.config.checkpoint import Cadence
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import Detector, format_percent, format_seconds
from toolkit.monitor.health.step_cost import cost_of_row
from toolkit.monitor.sink import Kind, Row
from toolkit.step_parts import CHECKPOINT

DAY = 86400.0


def best_interval(save_seconds: float, seconds_between_failures: float = DAY) -> float:
    """Return the seconds between saves that minimize the cost of saving plus the expected loss from failures.

    This is sqrt(2 C M) (Young, Communications of the ACM 17, 1974).
    """
    return math.sqrt(2 * save_seconds * seconds_between_failures)


class SlowCheckpoint(Detector):
    """Detect two saves in a row that take three times as long as before, or saves that take 10% of the time.

    The time is the ledger's checkpoint part. Of a background save it contains only the copy to host memory
    and the wait for an unfinished earlier save. Saves that take less than 0.25 s more (0.5 s for the 10%)
    give no alert. On a busy host the time is corrected as in ``step_cost.py``.
    """

    TIMES, SHARE = 3.0, 0.1
    LEAST_SAVE, LEAST_MORE, LEAST_EACH = 0.002, 0.25, 0.5  # seconds
    kinds = (Kind.LEDGER,)

    def __init__(self) -> None:
        # seconds of each save, the same corrected, and since the save before
        self._saves: deque[tuple[float, float, float]] = deque(maxlen=12)
        self._since = 0.0

    def check(self, kind: Kind, row: Row) -> Alert | None:
        self._since += row["wall_seconds"]
        _, middle, took = row["parts"].get(CHECKPOINT, (0.0, 0.0, 0.0))
        if took < self.LEAST_SAVE:
            return None
        account = cost_of_row(row, 1)
        self._saves.append((took, account.corrected(took, account.starved), self._since))
        self._since = 0.0
        # The other ranks wait for a rank that saves longer in the communication of their next step.
        alone = (
            ""
            if row["ranks"] == 1 or took < 2 * middle
            else f"; the median rank took {format_seconds(middle)} and waited for the slowest"
        )
        before, last = (
            [each for each, _, _ in self._saves][:-2],
            [corrected for _, corrected, _ in self._saves][-2:],
        )
        if len(before) >= 2 and min(last) > max(
            self.TIMES * median(before), median(before) + self.LEAST_MORE
        ):
            return self._alert(
                row["step"],
                "has become slow",
                f"{format_seconds(last[0])} and {format_seconds(last[1])} for the last two saves, "
                f"{format_seconds(median(before))} (median) for the {len(before)} before{alone}",
                max(last),
            )
        three = [(corrected, since) for _, corrected, since in self._saves][-3:]
        saving, whole = (median(part) for part in zip(*three, strict=True))
        # The interval before the first save includes the start-up.
        if len(self._saves) > 3 and saving > self.SHARE * whole and saving > self.LEAST_EACH:
            return self._alert(
                row["step"],
                f"takes {format_percent(saving / whole)} of the time",
                f"{format_seconds(saving)} of {format_seconds(whole)} between saves, medians of the last "
                f"three (alert above {self.SHARE:.0%}){alone}",
                saving,
            )
        return None

    def _alert(self, step: int, text: str, evidence: str, took: float) -> Alert:
        minutes = max(1, round(best_interval(took) / 60))
        return Alert(
            name="slow-checkpoint",
            fault="slow-save",
            level=Level.WARNING,
            step=step,
            cause=f"saving {text}",
            evidence=evidence,
            next_step=f"set checkpoint.background=true, or checkpoint.every={minutes}min, which costs "
            "least if a machine fails once a day; check the disk of the run directory: iostat "
            "-x 1, and disk in system/node-*.jsonl",
        )


class LateCheckpoint(Detector):
    """Detect that no checkpoint was completed for 1.5 times ``checkpoint.every``, so that a failure loses
    more than intended.
    """

    TIMES, SPARE_STEPS, SPARE_SECONDS = 1.5, 10, 60.0

    def __init__(self, cadence: Cadence, clock: Callable[[], float]) -> None:
        self._cadence, self._clock = cadence, clock
        self._begun = False
        self._step, self._at = 0, 0.0  # of the newest checkpoint, or of the start of this attempt

    def set_interval(self, seconds: float) -> None:
        """Expect a checkpoint after each ``seconds`` from now on: ``checkpoint.every=auto``."""
        self._cadence = Cadence(seconds=seconds)

    def saved(self, step: int) -> None:
        """Record that the checkpoint of ``step`` is complete."""
        self._begun, self._step, self._at = True, step, self._clock()

    def check(self, kind: Kind, row: Row) -> Alert | None:
        step = row["step"]
        if not self._begun:
            self.saved(step - 1)
        steps, waited = step - self._step, self._clock() - self._at
        every, limit = self._cadence.steps, self._cadence.seconds
        if every is not None and steps > max(self.TIMES * every, every + self.SPARE_STEPS):
            due = f"{every} steps"
        elif limit is not None and waited > max(self.TIMES * limit, limit + self.SPARE_SECONDS):
            due = f"{limit:g} s"
        else:
            return None
        return Alert(
            name="slow-checkpoint",
            fault="late-checkpoint",
            level=Level.WARNING,
            step=step,
            cause="the next checkpoint is overdue: a failure now loses more than checkpoint.every allows",
            evidence=f"the newest complete checkpoint is of step {self._step}, {steps} steps and "
            f"{waited:.0f} s ago; checkpoint.every is {due}",
            next_step="look for a failed or unfinished save in the log (attempts/*/log.txt), and check the "
            "space and speed of the disk: df -h RUN_DIR, iostat -x 1",
        )
