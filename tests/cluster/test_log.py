"""What is printed is logged, without what a terminal overwrites.

    pytest tests/cluster/test_log.py
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from toolkit.cluster.log import Tee, log_to


def test_the_stream_gets_all_and_the_log_what_stays() -> None:
    stream, log = io.StringIO(), io.StringIO()
    tee = Tee(stream, log)
    for text in ("step 1\n", "\x1b[1A\x1b[2K 10% ", "\r20%", "\x1b[32mdone\x1b[0m\n"):
        tee.write(text)
    assert stream.getvalue() == "step 1\n\x1b[1A\x1b[2K 10% \r20%\x1b[32mdone\x1b[0m\n"
    assert log.getvalue() == "step 1\ndone\n"
    assert tee.isatty() is False


def test_both_streams_are_added_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    file = tmp_path / "log.txt"
    file.write_text("before\n")
    log_to(file)
    print("out")
    print("err", file=sys.stderr)
    assert file.read_text() == "before\nout\nerr\n"
    assert capsys.readouterr() == ("out\n", "err\n")
