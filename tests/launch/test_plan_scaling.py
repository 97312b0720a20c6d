"""``plan.py scaling=...`` as typed by a user.

pytest tests/launch/test_plan_scaling.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import plan
from toolkit.errors import ExitCode

ARGUMENTS = ("+exp=gpt2_125m", "cluster.gpus_per_node=8", "cluster.gpu=h100")


def test_scaling_writes_a_page_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--json", "scaling=8,1,64", f"out={tmp_path}", *ARGUMENTS]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    for curve in found["curves"].values():
        assert [point["ranks"] for point in curve["points"]] == [1, 8, 64]
        seconds = [point["written"]["step_seconds"] for point in curve["points"] if point["written"]]
        assert all(one["low"] < one["seconds"] < one["high"] for one in seconds)
    assert (tmp_path / "scaling.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "<svg" in (tmp_path / "scaling.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (("scaling=many",), "scaling=many"),
        (("measured=runs/mine",), "measured=runs/mine"),
        (("scaling=1..8", "advise=true"), "scaling=1..8 advise=true"),
        (("scaling=1..8", "cluster.gpu=unknown"), "cluster.gpu=unknown"),
        (("scaling=1..8", "measured=nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_explained(
    arguments: tuple[str, ...], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([*ARGUMENTS, *arguments]) == ExitCode.USER
    printed = capsys.readouterr().err
    assert seen in printed
    assert "remedy:" in printed
    assert "Traceback" not in printed
