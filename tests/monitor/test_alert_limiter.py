"""Rate limit of alerts: shown at once, then at growing intervals with the number of suppressed ones.

pytest tests/monitor/test_alert_limiter.py
"""

from __future__ import annotations

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.alert_limiter import (
    BURST,
    CALM_GAPS,
    FIRST_GAP_SECONDS,
    LONGEST_GAP_SECONDS,
    AlertLimiter,
)


def alert(
    name: str = "data-stall", where: str = "", step: int = 1, lost_share: float = 0.0, fault: str = ""
) -> Alert:
    return Alert(
        name=name,
        fault=fault,
        where=where,
        level=Level.WARNING,
        step=step,
        cause="c",
        evidence="e",
        next_step="n",
        lost_share=lost_share,
    )


def shown_alerts(limiter: AlertLimiter, seconds: float, every: float) -> list[tuple[float, str]]:
    """Times and evidence of the alerts that are shown, for one alert every ``every`` seconds."""
    found = []
    for number in range(int(seconds / every)):
        if (shown := limiter.admit(alert(), number * every)) is not None:
            found.append((number * every, shown.evidence))
    return found


def test_gaps_grow_and_suppressed_alerts_are_counted() -> None:
    found = shown_alerts(AlertLimiter(), 5 * 3600, 10.0)
    assert [at for at, _ in found] == [0.0, 600.0, 1800.0, 4200.0, 9000.0]
    assert found[0][1] == "e"
    assert found[1][1] == "e (59 more like it since the last one shown)"
    assert found[2][1] == "e (119 more like it since the last one shown)"


def test_alert_with_twice_the_lost_share_is_shown_at_once() -> None:
    limiter = AlertLimiter()
    assert [
        limiter.admit(alert(lost_share=share), 1.0 * number) is not None
        for number, share in enumerate((0.12, 0.12, 0.2, 0.72, 0.72, 0.9))
    ] == [True, False, False, True, False, False]
    assert limiter.admit(alert(lost_share=0.0), 7.0) is None, "an unknown share is not larger"


def test_lasting_alert_is_shown_once_a_day() -> None:
    found = shown_alerts(AlertLimiter(), 60 * 86400, 600.0)
    assert found[-1][0] - found[-2][0] == LONGEST_GAP_SECONDS
    assert 60 < len(found) < 75


def test_gap_starts_over_after_a_calm_period() -> None:
    limiter = AlertLimiter()
    assert limiter.admit(alert(), 0.0) is not None
    assert limiter.admit(alert(), 1.0) is None
    later = limiter.admit(alert(), 2 + CALM_GAPS * FIRST_GAP_SECONDS)
    assert later is not None
    assert later.evidence == "e"
    assert limiter.admit(alert(), 3 + CALM_GAPS * FIRST_GAP_SECONDS + FIRST_GAP_SECONDS) is not None, (
        "the gap started over too"
    )


def test_name_fault_and_where_are_limited_separately() -> None:
    limiter = AlertLimiter()
    kinds = [(name, fault, where) for name in "ab" for fault in "xy" for where in ("rank 1", "rank 2")]
    for now, expected in ((0.0, True), (1.0, False)):
        shown = [limiter.admit(alert(name, where, fault=fault), now) for name, fault, where in kinds]
        assert {one is not None for one in shown} == {expected}


def test_burst_limits_alerts_of_many_ranks() -> None:
    limiter = AlertLimiter()
    found = [limiter.admit(alert(where=f"rank {rank}"), rank * 0.001) for rank in range(1000)]
    assert sum(one is not None for one in found) == BURST
    after = limiter.admit(alert(where="rank 999"), FIRST_GAP_SECONDS + 2)
    assert after is not None
    assert f"{1000 - BURST} more of this kind elsewhere" in after.evidence


def test_state_is_bounded() -> None:
    limiter = AlertLimiter()
    for number in range(20_000):
        limiter.admit(alert(where=f"rank {number}"), number * 60.0)
    assert len(limiter._histories) < 100
