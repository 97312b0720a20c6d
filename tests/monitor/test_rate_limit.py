"""Rate limit of a sink: fast runs are thinned evenly, alerts and evaluations always pass.

pytest tests/monitor/test_rate_limit.py
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.sinks.rate_limit import BURST, VALUES_PER_SECOND, RateLimitedSink


class RecordingSink(Sink):
    def __init__(self) -> None:
        self.rows: list[tuple[Kind, Row]] = []

    def log(self, kind: Kind, row: Row) -> None:
        self.rows.append((kind, row))

    def steps(self, kind: Kind) -> list[int]:
        return [row["step"] for seen, row in self.rows if seen is kind]


def run(steps: int, seconds: float, values: int, alert_every: int = 10**9) -> RecordingSink:
    """Simulate steps of ``seconds``, each with a step row and a ledger row of ``values`` values."""
    recorded, now = RecordingSink(), [0.0]
    sink = RateLimitedSink(recorded, lambda: now[0])
    metrics = {str(name): name for name in range(values - 1)}
    for step in range(1, steps + 1):
        now[0] += seconds
        for kind in (Kind.STEP, Kind.LEDGER):
            sink.log(kind, {**metrics, "step": step})
        if step % alert_every == 0:
            sink.log(Kind.ALERT, {"step": step})
            sink.log(Kind.EVAL, {"step": step})
    return recorded


def test_slow_runs_are_not_limited(caplog: pytest.LogCaptureFixture) -> None:
    for steps, seconds, values in ((100, 0.01, 50), (5_000, 1.0, 150)):
        recorded = run(steps, seconds, values)
        assert recorded.steps(Kind.STEP) == recorded.steps(Kind.LEDGER) == list(range(1, steps + 1))
        assert caplog.messages == []


def test_fast_run_is_thinned_evenly_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    recorded = run(20_000, 0.1, 100)
    for kind in (Kind.STEP, Kind.LEDGER):
        steps = recorded.steps(kind)
        values = len(steps) * 100
        assert values <= BURST + 2000 * VALUES_PER_SECOND + 100
        assert values >= 2000 * VALUES_PER_SECOND * 0.99
        late = [step for step in steps if step > 1000]
        assert max(after - before for before, after in pairwise(late)) <= 6
    assert caplog.messages == [
        "RecordingSink receives only some of the rows, the files have all: there are more than 200 values "
        "a second"
    ]


def test_alerts_and_evaluations_are_never_dropped() -> None:
    recorded = run(2000, 0.001, 500, alert_every=10)
    assert len(recorded.steps(Kind.STEP)) < 50
    assert len(recorded.steps(Kind.ALERT)) == len(recorded.steps(Kind.EVAL)) == 200


def test_oversized_rows_pass_occasionally() -> None:
    recorded = run(300, 1.0, 20_000)
    assert 3 <= len(recorded.steps(Kind.STEP)) <= 5
