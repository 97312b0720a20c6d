"""Of an exception the user sees the lines of their own code.

pytest tests/cluster/test_tracebacks.py
"""

from __future__ import annotations

import json

from toolkit.cluster.tracebacks import is_user_file, format_user_frames
from toolkit.errors import UserError
from toolkit.plan import schedule


def test_own_files_are_told_from_those_of_the_toolkit_and_of_packages() -> None:
    import numpy as np

    assert is_user_file(__file__)
    assert not any(
        map(is_user_file, (schedule.__file__, json.__file__, np.__file__, "<frozen importlib._bootstrap>"))
    )


def test_the_line_that_called_a_library_is_shown_without_the_library() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        text = format_user_frames(error)
    assert text is not None
    assert 'json.loads("{")' in text
    assert "json/decoder" not in text
    assert text.splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_a_cause_is_shown_if_it_passed_through_own_code() -> None:
    try:
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no batch") from error
    except RuntimeError as error:
        text = format_user_frames(error)
    assert text is not None
    assert text.count("Traceback") == 2
    assert "json/decoder" not in text


def test_an_error_that_never_met_own_code_has_none() -> None:
    assert format_user_frames(UserError.__new__(UserError)) is None
