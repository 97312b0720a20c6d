"""docs/resharding.md shows every action and format, and its table of formats equals the code's.

pytest tests/config/test_reshard_guide.py
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from launch import reshard as command
from toolkit.checkpoint.offline.reshard import WRITERS
from toolkit.checkpoint.source import FORMATS
from toolkit.config.compose import compose_reshard
from toolkit.config.reshard import FORMAT_KEYS, ReshardAction, TargetFormat

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/resharding.md").read_text(encoding="utf-8")


def commands_in(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.match(r"\s*python launch/reshard.py .*=", line)]


def test_there_are_examples_of_every_action() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for text in (GUIDE, readme, command.__doc__ or "") for line in commands_in(text)]
    assert len(lines) > 12
    typed = " ".join(lines)
    for action in set(ReshardAction) - {ReshardAction.convert}:
        assert f"action={action.name}" in typed
    for form in TargetFormat:
        assert f"target.format={form.name}" in typed or form is TargetFormat.native


def test_commands_of_the_help_compose() -> None:
    """tests/docs has those of the pages."""
    for line in commands_in(command.__doc__ or ""):
        compose_reshard(shlex.split(line, comments=True)[2:])


def rows() -> dict[str, list[str]]:
    """By format: reads, writes, keys of target, what it carries."""
    found = re.findall(r"^\| `(\w+)` \| (yes|no) \| (yes|no) \| (.*?) \| (.*?) \|$", GUIDE, re.MULTILINE)
    return {name: cells for name, *cells in found}


def test_the_table_of_formats_is_that_of_the_code() -> None:
    table = rows()
    assert table.keys() == {*FORMATS, *(form.name for form in TargetFormat)}
    for name, (reads, writes, keys, _) in table.items():
        assert (reads == "yes") == (name in FORMATS), name
        form = TargetFormat.__members__.get(name)
        assert (writes == "yes") == (form is TargetFormat.native or form in WRITERS), name
        if writes == "yes" and form is not None:
            assert re.findall(r"`(.*?)`", keys) == list(FORMAT_KEYS[form]), name
