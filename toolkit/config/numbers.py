"""Numbers as people write them: ``10k`` steps, ``1e4`` steps, ``10B`` tokens, ``3%`` of the run."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal, InvalidOperation

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = re.compile(r"([+-]?(?:\d[\d_]*)(?:\.\d+)?(?:e[+-]?\d{1,3})?) ?([kmbgt]?)", re.IGNORECASE)
_LARGEST = 10**18


def parse_count(text: str, *, suffixes: bool = True) -> int | None:
    """Return the whole number that ``text`` writes: ``10000``, ``10_000``, ``1e4``, ``10k``, ``1.5M``,
    ``10B``.

    Args:
        suffixes: accept k (10^3), M (10^6), B or G (10^9) and T (10^12), in either case.

    Returns:
        The number; None if the text is not a number, not whole, or above 10^18.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None or (found[2] and not suffixes):
        return None
    try:
        value = Decimal(found[1].replace("_", "")) * _SUFFIXES[found[2].lower()]
    except InvalidOperation:
        return None
    return int(value) if abs(value) <= _LARGEST and value == int(value) else None


def parse_percent(text: str) -> Decimal | None:
    """Return the share that ``3%`` or ``0.5 %`` writes, in [0, 1]; None if the text is not a percentage."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if found is None or not 0 <= Decimal(found[1]) <= 100:
        return None
    return Decimal(found[1]) / 100


_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([mhd])")
_HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0}


def is_deadline(text: str) -> bool:
    """Return whether :func:`hours_until` accepts ``text``."""
    if (found := _DURATION.fullmatch(text.strip())) is not None:
        return float(found[1]) > 0
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


def hours_until(text: str, now: datetime) -> float:
    """Return the hours from ``now`` to a deadline: ``90m``, ``36h``, ``2d``, or a date and time as in ISO
    8601, local if it has no offset; negative if it is past.
    """
    if (found := _DURATION.fullmatch(text.strip())) is not None:
        return float(found[1]) * _HOURS[found[2]]
    return (datetime.fromisoformat(text.strip()).astimezone() - now.astimezone()).total_seconds() / 3600


def parse_timestamp(text: str) -> datetime | None:
    """Return the date and time that ``text`` writes as in ISO 8601; None if it has no time or no time
    zone.
    """
    text = text.strip()
    try:
        timestamp = datetime.fromisoformat(text)
    except ValueError:
        return None
    return timestamp if timestamp.tzinfo is not None and len(text) > len("2027-01-31") else None
