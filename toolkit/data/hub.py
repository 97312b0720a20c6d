"""Availability of the Hugging Face hub, checked once with a time limit.

Without the hub, files fetched before are used.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache

CONNECT_SECONDS = 5.0
WAIT_SECONDS = 8.0  # name resolution has no time limit of its own


@cache
def is_online() -> bool:
    """Return whether the hub answers. If it does not, put its libraries into offline mode.

    Otherwise they would retry each file, for minutes in all.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    answered = threading.Event()
    threading.Thread(target=_probe, args=(constants.ENDPOINT, answered), name="hub", daemon=True).start()
    if answered.wait(WAIT_SECONDS):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for modules that are imported later
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def _probe(endpoint: str, answered: threading.Event) -> None:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_SECONDS)
    except Exception:  # noqa: BLE001  any failure means that the hub is not available
        return
    answered.set()


def offline_hint() -> str:
    """Return text to append to an error about a missing hub file; empty if the hub answers."""
    return "" if is_online() else f"; {_OFFLINE} and it was not fetched to this machine before"


_OFFLINE = "the hub does not answer or is switched off (HF_HUB_OFFLINE),"
