"""The examples in docs/configuration.md work; tests/docs has its commands.

pytest tests/config/test_guide.py
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from toolkit.config.compose import compose
from toolkit.errors import ConfigError

GUIDE = (Path(__file__).resolve().parents[2] / "docs/configuration.md").read_text(encoding="utf-8")


def test_example_experiment_composes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(example)
    config = compose(["+exp=mine", "zero=stage3", f"--config-dir={tmp_path}"])
    assert (config.run.name, config.model.family, config.zero.stage) == ("mine", "gpt2", 3)


def test_example_error_is_printed() -> None:
    (message,) = re.findall(r"```text\n(error: zero=2\n.*?)\n```", GUIDE, re.DOTALL)
    with pytest.raises(ConfigError) as caught:
        compose(["zero=2"])
    assert str(caught.value) == message


def test_python_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/configuration.md", "exec"), {})


def test_overrides_in_the_table_compose() -> None:
    row = re.findall(r"^\| `.*? \| .*? \| (.*?) \|$", GUIDE, re.MULTILINE)
    words = [word for cell in row for word in re.findall(r"`(.*?)`", cell) if not word.startswith("--")]
    assert len(words) > 7
    compose(words)
    compose(shlex.split("'schedule.warmup=${train.steps}' 'monitor.prompt=\"def main(args):\"'"))
