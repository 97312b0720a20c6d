"""The configuration of launch/prepare.py: types, help and mistakes.

pytest tests/config/test_prepare.py
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.config import keys
from toolkit.config.compose import compose_prepare
from toolkit.config.help import help_text
from toolkit.config.prepare import InputFormat
from toolkit.config.roots import PREPARE
from toolkit.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

# argument, key of the problem, part of the rule, part of the remedy
MISTAKES = (
    ("inputt=x", "inputt", "there is no key", "write input=x;"),
    ("tokenizer.pth=gpt2", "tokenizer.pth", "tokenizer has no key pth", "tokenizer.path"),
    ("zero=stage3", "zero", "there is no key", "--help"),
    ("+exp=quickstart", "exp", "there is no key", "--help"),
    ("data=stdlib", "data", "there is no key", "--help"),
    (
        "engine.deepspeed.dump_state=true",
        "engine.deepspeed.dump_state",
        "no section or group engine",
        "--help",
    ),
    ("+seed=3", "seed", "changed without a plus", "write seed=3"),
    (
        "format=xml",
        "format",
        "one of auto, text, lines, jsonl, json, csv, tsv, parquet, dataset",
        "format=auto",
    ),
    ("workers=two", "workers", "a whole number, or null", "workers="),
    ("workers=0", "workers", "at least 1", "workers=1"),
    ("validation=1.0", "validation", "from 0 to below 1", "validation=0.005"),
    ("tokenizer.vocab_size=256", "tokenizer.vocab_size", "at least 257", "tokenizer.vocab_size=257"),
    ("inspect=data/x", "input", "exactly one of input=", "write one of input=FOLDER"),
)


@pytest.mark.parametrize(("typed", "key", "rule", "remedy"), MISTAKES)
def test_mistakes_are_reported(typed: str, key: str, rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_prepare(["input=books", typed])
    (problem,) = caught.value.problems
    assert (problem.key, rule in problem.rule, remedy in problem.remedy) == (key, True, True), str(problem)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_prepare(["inputt=x", "workers=two", "format=xml"])
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="input=null, inspect=null"):
        compose_prepare([])


def test_arguments_become_typed_values() -> None:
    config = compose_prepare(
        ["input='corpus/*.jsonl.zst'", "format=jsonl", "text=007", "validation=0", "tokenizer.path=gpt2"]
    )
    assert (config.input, config.format, config.text) == ("corpus/*.jsonl.zst", InputFormat.jsonl, "007")
    assert (config.validation, config.tokenizer.path, config.workers) == (0.0, "gpt2", None)


def test_help_describes_every_key() -> None:
    text = help_text(root=PREPARE)
    for name in keys.keys_by_name(PREPARE):
        found = re.search(rf"^    {re.escape(name)}=(.*?)\s\s+(\S.*)$", text, re.MULTILINE)
        assert found, name
        assert len(found[2]) > 5, name
    assert "zero" not in text
    assert help_text(["tokenizer"], PREPARE).count("tokenizer.") >= 4


def test_help_takes_less_than_two_seconds() -> None:
    """Measured 0.3 s. CPU time does not depend on other processes."""
    before, seconds = _cpu_seconds_of_children(), []
    for _ in range(2):
        command = [sys.executable, str(ROOT / "launch" / "prepare.py"), "--help"]
        assert (
            "input=stdlib"
            in subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        )
        now = _cpu_seconds_of_children()
        seconds.append(now - before)
        before = now
    assert min(seconds) < 2


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
