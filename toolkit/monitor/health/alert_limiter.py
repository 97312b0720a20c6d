"""How often people hear of the same trouble: at once, then at growing distances, with the number of times that were not told.

A small trouble does not hide a large one of the same name and place: an alert that costs at least twice the time of the last one told is
told at once.

Pure: the clock is given. What is remembered is bounded, however many ranks are in trouble.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.monitor.alert import Alert

FIRST_GAP_SECONDS = 600.0  # after the first; it doubles with each that is told
LONGEST_GAP_SECONDS = 24 * 3600.0
WORSE_FACTOR = 2.0  # times the lost share of the last one told
CALM_GAPS = 2.0  # trouble that has not come for so many gaps begins anew when it does
BURST = 8  # of one name within FIRST_GAP_SECONDS, whatever is at fault: when a switch fails a thousand ranks have the same trouble


@dataclass(slots=True)
class _Trouble:
    told_at: float
    seen_at: float
    lost_share: float
    gap: float = FIRST_GAP_SECONDS
    held: int = 0


class AlertLimiter:
    def __init__(self) -> None:
        self._troubles: dict[tuple[str, str], _Trouble] = {}
        self._told: dict[str, list[float]] = {}  # by name: when, within the last FIRST_GAP_SECONDS
        self._unnamed: dict[
            str, int
        ] = {}  # by name: how many were held back because there were too many of it

    def admit(self, alert: Alert, now: float) -> Alert | None:
        """The alert as it is told, with what was held back before it; None if it is held back.

        Args:
            now: seconds of a clock that never goes back.
        """
        key = (alert.name, alert.where)
        trouble = self._troubles.get(key)
        if trouble is not None and now - trouble.seen_at > CALM_GAPS * trouble.gap:
            trouble = None
        if (
            trouble is not None
            and now - trouble.told_at < trouble.gap
            and not _worse(alert.lost_share, trouble.lost_share)
        ):
            trouble.held += 1
            trouble.seen_at = now
            return None
        if not self._room(alert.name, now):
            self._unnamed[alert.name] = self._unnamed.get(alert.name, 0) + 1
            return None
        self._told[alert.name].append(now)
        held = trouble.held if trouble is not None else 0
        gap = min(2 * trouble.gap, LONGEST_GAP_SECONDS) if trouble is not None else FIRST_GAP_SECONDS
        self._troubles[key] = _Trouble(now, now, alert.lost_share, gap)
        self._forget(now)
        return _with_held(alert, held, self._unnamed.pop(alert.name, 0))

    def _room(self, name: str, now: float) -> bool:
        recent = [at for at in self._told.get(name, []) if now - at < FIRST_GAP_SECONDS]
        self._told[name] = recent
        return len(recent) < BURST

    def _forget(self, now: float) -> None:
        """What would begin anew anyway. At most BURST a name are added in FIRST_GAP_SECONDS, so the rest is bounded."""
        for key in [
            key for key, trouble in self._troubles.items() if now - trouble.seen_at > CALM_GAPS * trouble.gap
        ]:
            del self._troubles[key]


def _worse(share: float, told: float) -> bool:
    return 0 < WORSE_FACTOR * told <= share


def _with_held(alert: Alert, held: int, elsewhere: int) -> Alert:
    words = [f"{held} more like it since the last one told"] if held else []
    words += [f"{elsewhere} more of this name elsewhere that were not told"] if elsewhere else []
    return replace(alert, evidence=f"{alert.evidence} ({'; '.join(words)})") if words else alert
