"""Errors about data that a run reads."""

from __future__ import annotations

from toolkit.errors import InputError
from toolkit.remote.errors import DATA


def data_path_error(seen: str, rule: str, remedy: str) -> InputError:
    """Return an InputError about ``data.path``."""
    return DATA.error(seen, rule, remedy)
