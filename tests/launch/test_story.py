"""The end-to-end story, and that it can fail.

pytest tests/launch/test_story.py            its comparisons
pytest tests/launch/test_story.py -m full    all of it: what `make story` runs
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.story.__main__ import main
from tests.story.losses import TOLERANCE, apart, losses
from tests.story.steps import Story, StoryFailed

EXPECTED = {1: 5.0, 2: 4.5, 3: 4.25}


def test_differing_runs_are_detected() -> None:
    assert apart(EXPECTED, EXPECTED, range(1, 4)) == 0
    assert apart(EXPECTED | {3: 4.25 + 2 * TOLERANCE}, EXPECTED, range(1, 4)) > TOLERANCE
    assert apart({step + 1: loss for step, loss in EXPECTED.items()}, EXPECTED, range(2, 4)) == 0.5
    for found in ({1: 5.0, 2: 4.5}, {}):
        with pytest.raises(StoryFailed, match="no loss of step"):
            apart(found, EXPECTED, range(1, 4))
    with pytest.raises(StoryFailed, match="no steps"):
        apart(EXPECTED, EXPECTED, [])


def test_repeated_step_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(StoryFailed, match="is missing"):
        losses(file)
    rows = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in EXPECTED.items()]
    file.write_text("".join(rows))
    assert losses(file) == EXPECTED
    file.write_text("".join([*rows, rows[-1]]))
    with pytest.raises(StoryFailed, match="4 rows of 3 steps"):
        losses(file)


def test_failed_check_appears_in_the_table(tmp_path: Path) -> None:
    story = Story(tmp_path, dict(os.environ), io.StringIO())
    with story.step("first"):
        story.check(True, "seen")
        assert story.run("echo", [sys.executable, "-c", "print('printed')"]) == "printed\n"
    with pytest.raises(StoryFailed, match="exit code 3"), story.step("second"):
        story.run("fails", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(StoryFailed, match="check failed: equal"), story.step("third"):
        story.check(False, "equal")
    lines = story.table().splitlines()
    assert [("FAILED" in line) for line in lines] == [False, True, True, False]
    assert lines[0].startswith("1. first")
    assert lines[0].endswith("  seen")


@pytest.mark.full
@pytest.mark.timeout(470)
def test_story(tmp_path: Path) -> None:
    assert main([str(tmp_path / "story")]) == 0, "see the output above"
