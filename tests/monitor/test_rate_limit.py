"""A sink that gets no more than its share: short runs whole, fast ones thinned evenly, alerts and evaluations always.

pytest tests/monitor/test_rate_limit.py
"""

from __future__ import annotations

from itertools import pairwise

from toolkit.monitor.sink import Kind, NullSink, Row
from toolkit.monitor.sinks.rate_limit import BURST, VALUES_PER_SECOND, RateLimitedSink


class Kept(NullSink):
    def __init__(self) -> None:
        self.rows: list[tuple[Kind, Row]] = []

    def log(self, kind: Kind, row: Row) -> None:
        self.rows.append((kind, row))

    def steps(self, kind: Kind) -> list[int]:
        return [row["step"] for seen, row in self.rows if seen is kind]


def run(steps: int, seconds: float, values: int, alert_every: int = 10**9) -> tuple[Kept, list[str]]:
    """A run of steps that take ``seconds``, each with a row and a ledger of ``values`` values."""
    kept, told, now = Kept(), [], [0.0]
    sink = RateLimitedSink(kept, told.append, lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += seconds
        for kind in (Kind.STEP, Kind.LEDGER):
            sink.log(kind, {"step": step, **{str(name): name for name in range(values - 1)}})
        if step % alert_every == 0:
            sink.log(Kind.ALERT, {"step": step})
            sink.log(Kind.EVAL, {"step": step})
    return kept, told


def test_runs_with_less_to_tell_are_whole() -> None:
    for steps, seconds, values in ((100, 0.01, 50), (20_000, 1.0, 150)):
        kept, told = run(steps, seconds, values)
        assert kept.steps(Kind.STEP) == kept.steps(Kind.LEDGER) == list(range(1, steps + 1))
        assert told == []


def test_a_fast_run_is_thinned_evenly_and_no_kind_takes_from_another() -> None:
    kept, told = run(20_000, 0.1, 100)
    for kind in (Kind.STEP, Kind.LEDGER):
        steps = kept.steps(kind)
        values = len(steps) * 100
        assert values <= BURST + 2000 * VALUES_PER_SECOND + 100
        assert values >= 2000 * VALUES_PER_SECOND * 0.99
        late = [step for step in steps if step > 1000]
        assert max(after - before for before, after in pairwise(late)) <= 6
    assert told == [
        "Kept gets some of the rows only, the files have all: there are more than 200 values a second"
    ]


def test_alerts_and_evaluations_always_go_through() -> None:
    kept, _ = run(2000, 0.001, 500, alert_every=10)
    assert len(kept.steps(Kind.STEP)) < 50
    assert len(kept.steps(Kind.ALERT)) == len(kept.steps(Kind.EVAL)) == 200


def test_a_row_beyond_every_share_goes_through_now_and_then() -> None:
    kept, _ = run(1000, 1.0, 20_000)
    assert 10 <= len(kept.steps(Kind.STEP)) <= 12
