"""Wait for a condition in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(
    holds: Callable[[], bool],
    seconds: float = 10.0,
    what: str = "true",
    *,
    ended: Callable[[], bool] = lambda: False,
    output: Callable[[], str] | Path | None = None,
) -> float:
    """Poll until ``holds()`` and return the seconds it took.

    Args:
        what: completes "not ... after 10 s" in the error.
        ended: whether waiting is pointless, since the processes have ended.
        output: what to append to the error.

    Raises:
        AssertionError: on a timeout, or if everything has ended.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > seconds or (ended() and not holds()):
            if isinstance(output, Path):
                text = output.read_text(errors="replace") if output.exists() else ""
            else:
                text = output() if output is not None else ""
            raise AssertionError(f"not {what} after {time.monotonic() - began:.1f} s\n{text}")
        time.sleep(0.02)
    return time.monotonic() - began
