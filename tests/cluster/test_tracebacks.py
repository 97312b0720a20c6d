"""Tracebacks are reduced to frames of the user's code."""

from __future__ import annotations

import json

from toolkit.cluster.attempt.tracebacks import format_user_frames, is_user_file
from toolkit.errors import UserError
from toolkit.plan import schedule


def test_is_user_file() -> None:
    import numpy as np

    assert is_user_file(__file__)
    assert not any(
        map(is_user_file, (schedule.__file__, json.__file__, np.__file__, "<frozen importlib._bootstrap>"))
    )


def test_library_frames_are_removed() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        text = format_user_frames(error)
    assert text is not None
    assert 'json.loads("{")' in text
    assert "json/decoder" not in text
    assert text.splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_cause_with_user_frames_is_kept() -> None:
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


def test_error_without_user_frames_gives_none() -> None:
    assert format_user_frames(UserError.__new__(UserError)) is None
