"""Limit how often the same alert is shown.

An alert is shown at once and then at growing intervals, with the number of suppressed repeats. An alert that
costs at least twice the time of the last one shown is never suppressed, so that a small problem does not hide
a large one. The state is bounded, however many ranks have a problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.monitor.alert import Alert

FIRST_GAP_SECONDS = 600.0  # after the first alert; doubles with each alert shown
LONGEST_GAP_SECONDS = 24 * 3600.0
WORSE_FACTOR = 2.0  # ratio to the lost share of the last alert shown
CALM_GAPS = 2.0  # an alert that was absent for this many gaps starts over
# Alerts of one kind within FIRST_GAP_SECONDS, wherever they are: a failing switch affects a thousand ranks.
BURST = 8

AlertKind = tuple[str, str]  # name and fault


@dataclass(slots=True)
class _History:
    shown_at: float
    seen_at: float
    lost_share: float
    gap: float = FIRST_GAP_SECONDS
    suppressed: int = 0


class AlertLimiter:
    def __init__(self) -> None:
        self._histories: dict[tuple[AlertKind, str], _History] = {}  # by kind and ``where``
        self._shown: dict[AlertKind, list[float]] = {}  # times within the last FIRST_GAP_SECONDS
        self._over_burst: dict[AlertKind, int] = {}  # number of alerts suppressed by BURST

    def admit(self, alert: Alert, now: float) -> Alert | None:
        """Return the alert with the number of suppressed ones added, or None if it is suppressed.

        Args:
            now: seconds of a monotonic clock.
        """
        kind = (alert.name, alert.fault)
        key = (kind, alert.where)
        history = self._histories.get(key)
        if history is not None and now - history.seen_at > CALM_GAPS * history.gap:
            history = None
        if (
            history is not None
            and now - history.shown_at < history.gap
            and not _is_worse(alert.lost_share, history.lost_share)
        ):
            history.suppressed += 1
            history.seen_at = now
            return None
        if not self._has_room(kind, now):
            self._over_burst[kind] = self._over_burst.get(kind, 0) + 1
            return None
        self._shown[kind].append(now)
        suppressed = history.suppressed if history is not None else 0
        gap = min(2 * history.gap, LONGEST_GAP_SECONDS) if history is not None else FIRST_GAP_SECONDS
        self._histories[key] = _History(now, now, alert.lost_share, gap)
        self._drop_old(now)
        return _add_counts(alert, suppressed, self._over_burst.pop(kind, 0))

    def _has_room(self, kind: AlertKind, now: float) -> bool:
        recent = [at for at in self._shown.get(kind, []) if now - at < FIRST_GAP_SECONDS]
        self._shown[kind] = recent
        return len(recent) < BURST

    def _drop_old(self, now: float) -> None:
        """Drop the state of alerts that would start over anyway. BURST bounds the rest."""
        old = [
            key for key, history in self._histories.items() if now - history.seen_at > CALM_GAPS * history.gap
        ]
        for key in old:
            del self._histories[key]


def _is_worse(share: float, shown: float) -> bool:
    return 0 < WORSE_FACTOR * shown <= share


def _add_counts(alert: Alert, suppressed: int, elsewhere: int) -> Alert:
    notes = [f"{suppressed} more like it since the last one shown"] if suppressed else []
    notes += [f"{elsewhere} more of this kind elsewhere were not shown"] if elsewhere else []
    return replace(alert, evidence=f"{alert.evidence} ({'; '.join(notes)})") if notes else alert
