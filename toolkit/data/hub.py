"""Whether the Hugging Face hub answers, found out once and in bounded time; without it what was fetched before still serves."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache

CONNECT_SECONDS = 5.0
WAIT_SECONDS = 8.0  # names are looked up without a limit of their own


@cache
def online() -> bool:
    """Whether the hub is to be asked. Where it does not answer, its libraries are told to take what is on this machine.

    Without that they try each file again and again, minutes in all.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    answered = threading.Event()
    threading.Thread(target=_ask, args=(constants.ENDPOINT, answered), name="hub", daemon=True).start()
    if answered.wait(WAIT_SECONDS):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported from now on
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def _ask(endpoint: str, answered: threading.Event) -> None:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_SECONDS)
    except Exception:  # noqa: BLE001  whatever hinders it: the hub cannot be asked
        return
    answered.set()


def why_absent() -> str:
    """What to add where something of the hub is not found."""
    return "" if online() else f"; {_OFFLINE} and it was not fetched to this machine before"


_OFFLINE = "the hub is not asked (HF_HUB_OFFLINE) or does not answer"
