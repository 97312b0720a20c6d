"""The predicted time of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# An 80% interval reaches so many standard deviations of the normal distribution to each side.
INTERVAL_QUANTILE = 1.2816


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Seconds of one optimizer step after the batch ramp, as the slowest rank spends them.

    Attributes:
        seconds: of the whole step.
        low, high: bounds of the 80% interval of ``seconds``.
        parts: seconds by the part names of the step-time ledger (step_parts.py), such as ``forward``,
            ``backward``, ``bubble``, ``optimizer`` and ``communication/data``. They add up to ``seconds``.
        assumptions: what the estimate takes for granted, one sentence each.
    """

    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    assumptions: tuple[str, ...] = ()
