"""People hear of trouble at once and then seldom, and how often it was not told.

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


def alert(name: str = "data-stall", where: str = "", step: int = 1, lost_share: float = 0.0) -> Alert:
    return Alert(
        name=name,
        where=where,
        level=Level.WARNING,
        step=step,
        cause="c",
        evidence="e",
        next_step="n",
        lost_share=lost_share,
    )


def told(limiter: AlertLimiter, seconds: float, every: float) -> list[tuple[float, str]]:
    """Trouble at each ``every`` seconds."""
    found = []
    for number in range(int(seconds / every)):
        if (said := limiter.admit(alert(), number * every)) is not None:
            found.append((number * every, said.evidence))
    return found


def test_gaps_grow_and_the_next_says_what_was_held_back() -> None:
    found = told(AlertLimiter(), 5 * 3600, 10.0)
    assert [at for at, _ in found] == [0.0, 600.0, 1800.0, 4200.0, 9000.0]
    assert found[0][1] == "e"
    assert found[1][1] == "e (59 more like it since the last one told)"
    assert found[2][1] == "e (119 more like it since the last one told)"


def test_a_small_trouble_does_not_hide_one_that_costs_twice_the_time() -> None:
    limiter = AlertLimiter()
    assert [
        limiter.admit(alert(lost_share=share), 1.0 * number) is not None
        for number, share in enumerate((0.12, 0.12, 0.2, 0.72, 0.72, 0.9))
    ] == [True, False, False, True, False, False]
    assert limiter.admit(alert(lost_share=0.0), 7.0) is None, "an unknown share is no larger one"


def test_months_of_trouble_are_told_once_a_day() -> None:
    found = told(AlertLimiter(), 60 * 86400, 600.0)
    assert found[-1][0] - found[-2][0] == LONGEST_GAP_SECONDS
    assert 60 < len(found) < 75


def test_trouble_that_went_away_begins_anew() -> None:
    limiter = AlertLimiter()
    assert limiter.admit(alert(), 0.0) is not None
    assert limiter.admit(alert(), 1.0) is None
    later = limiter.admit(alert(), 2 + CALM_GAPS * FIRST_GAP_SECONDS)
    assert later is not None
    assert later.evidence == "e"
    assert limiter.admit(alert(), 3 + CALM_GAPS * FIRST_GAP_SECONDS + FIRST_GAP_SECONDS) is not None, (
        "the gap began anew too"
    )


def test_names_and_places_are_apart() -> None:
    limiter = AlertLimiter()
    assert all(
        limiter.admit(alert(name, where), 0.0) for name in ("a", "b") for where in ("rank 1", "rank 2")
    )
    assert not any(
        limiter.admit(alert(name, where), 1.0) for name in ("a", "b") for where in ("rank 1", "rank 2")
    )


def test_a_thousand_ranks_with_the_same_trouble_are_a_few_alerts() -> None:
    limiter = AlertLimiter()
    found = [limiter.admit(alert(where=f"rank {rank}"), rank * 0.001) for rank in range(1000)]
    assert sum(one is not None for one in found) == BURST
    after = limiter.admit(alert(where="rank 999"), FIRST_GAP_SECONDS + 2)
    assert after is not None
    assert f"{1000 - BURST} more of this name elsewhere" in after.evidence


def test_memory_is_bounded() -> None:
    limiter = AlertLimiter()
    for number in range(20_000):
        limiter.admit(alert(where=f"rank {number}"), number * 60.0)
    assert len(limiter._troubles) < 100
