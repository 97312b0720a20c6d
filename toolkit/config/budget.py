"""The section ``budget`` of the schema. The string below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from toolkit.config.checks import check
from toolkit.config.numbers import parse_timestamp


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """Limits of a run over all its attempts, also for the advice of ``launch/plan.py``."""

    usd: float | None = None
    """The most that the run may cost, in the currency of monitor.price_per_gpu_hour, which must be set. The
    run evaluates, saves and stops before it exceeds this. Null: no limit.
    """
    gpu_hours: float | None = None
    """The most GPU-hours that the run may take, from the start to the end of each attempt. On CPUs an hour of
    each rank counts. Null: no limit.
    """
    until: str | None = None
    """The date and time by which the run must have stopped, with its time zone, as in ISO 8601:
    2027-01-31T18:00+01:00. Null: no limit.
    """

    def __post_init__(self) -> None:
        for name, value, example in (("usd", self.usd, 20000), ("gpu_hours", self.gpu_hours, 5000)):
            check(
                value is None or 0 < value < float("inf"),
                f"budget.{name}",
                value,
                "a budget is a positive number",
                f"write budget.{name}={example}",
            )
        check(
            self.until is None or parse_timestamp(self.until) is not None,
            "budget.until",
            self.until,
            "it is a date and a time with a time zone, as in ISO 8601",
            "write budget.until=2027-01-31T18:00+01:00, with the offset of your time zone",
        )

    @property
    def deadline(self) -> datetime | None:
        """``until`` with its time zone."""
        return None if self.until is None else parse_timestamp(self.until)

    @property
    def is_set(self) -> bool:
        return self.usd is not None or self.gpu_hours is not None or self.until is not None
