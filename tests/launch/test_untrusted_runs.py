"""A run directory from an untrusted source is only data for commands that read it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from launch import generate
from tests.checkpoint.tiny_run import tiny_checkpoint, tiny_shape
from tests.data.local_stores import served
from toolkit.errors import ExitCode


def test_generate_does_not_leak_environment_variables(
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
    text = capsys.readouterr().err
    assert "is not evaluated" in text
    assert "key-of-mine" not in text
