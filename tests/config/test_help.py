"""``--help`` lists every key, group and experiment, and is fast.

pytest tests/config/test_help.py
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from toolkit.config import keys, search_path
from toolkit.config.compose import compose
from toolkit.config.help import help_text, show_help
from toolkit.errors import ConfigError, ExitCode

FOLDERS = search_path.folders(None)


@pytest.fixture(scope="module")
def text() -> str:
    return help_text()


def test_every_key_has_its_default_and_a_description(text: str) -> None:
    for name in keys.keys_by_name():
        found = re.search(rf"^    {re.escape(name)}=(\S*)(?:\n)?\s+(\S.*)$", text, re.MULTILINE)
        assert found, name
        assert len(found[2]) > 5, name
    assert re.search(r"^    train.steps=100 +Optimizer steps of the run", text, re.MULTILINE)
    assert re.search(r"^    model.hidden_size=64 ", text, re.MULTILINE), "the default value"


def test_every_group_option_and_experiment_is_listed(text: str) -> None:
    for group in search_path.groups(FOLDERS):
        for option in search_path.options(FOLDERS, group):
            assert re.search(rf"^ +{option}\*?( +\S|$)", text, re.MULTILINE), f"{group}={option}"
    assert "stage0*" in text, "the default is marked"
    assert "deepspeed --num_gpus 2 launch/train.py +exp=quickstart" in text


def test_examples_in_the_introduction_compose(text: str) -> None:
    compose(
        [
            "zero=stage3",
            "train.steps=20",
            "optim.betas=[0.9,0.99]",
            'monitor.prompt="def f():"',
            "+engine.deepspeed.zero_optimization.overlap_comm=false",
        ]
    )
    for words in (
        "zero=stage3",
        "train.steps=20",
        "optim.betas=[0.9,0.99]",
        "'monitor.prompt=\"def f():\"'",
        "+engine.deepspeed.zero_optimization.overlap_comm=false",
    ):
        assert words in text


def test_help_on_one_topic() -> None:
    text = help_text(["--help", "optim", "+exp=quickstart", "train.steps=3"])
    assert "optim.weight_decay" in text
    assert "muon" in text
    assert "train.steps" not in text
    assert "train.batch_ramp.start" in help_text(["train"])
    assert help_text(["train.steps"]).count("\n") <= 2
    assert "mixtral_8x7b" in help_text(["exp"])
    with pytest.raises(ConfigError, match="optim"):
        help_text(["optimm"])


def test_command_prints_help_or_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_help(["--help", "zero"], above="What it does.") == ExitCode.DONE
    assert capsys.readouterr().out.startswith("What it does.\n  zero=\n    stage0*")
    assert show_help(["--help", "zerro"]) == ExitCode.USER
    assert "did you mean zero" in capsys.readouterr().err


def test_help_is_fast() -> None:
    """Measured 0.3 s. CPU time does not depend on other processes."""
    code = (
        "import time; began = time.process_time()\nfrom toolkit.config.help import help_text\nhelp_text()\n"
        "print(time.process_time() - began)"
    )

    def seconds() -> float:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return float(done.stdout)

    assert any(seconds() < 2 for _ in range(3))
