"""A run directory that comes from somebody else is data for every command that reads one.

pytest tests/launch/test_hostile_runs.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from launch import generate
from tests.checkpoint.tiny_run import tiny_checkpoint, tiny_shape
from tests.data.served import served
from toolkit.errors import ExitCode


def test_generating_sends_no_environment_variable_to_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_SECRET", "key-of-mine")
    run = tmp_path / "run"
    tiny_checkpoint(run / "checkpoints")
    (run / "plan.json").write_text(json.dumps({"model": asdict(tiny_shape())}))
    (tmp_path / "served").mkdir()
    with served(tmp_path / "served") as server:
        (run / "config.yaml").write_text(
            f"data: {{name: prepared, path: '{server.http}/${{oc.env:TOOLKIT_SECRET}}'}}\n"
        )
        assert generate.main([str(run), "text"]) == ExitCode.USER
    assert not server.requests
    said = capsys.readouterr().err
    assert "is not evaluated" in said
    assert "key-of-mine" not in said
