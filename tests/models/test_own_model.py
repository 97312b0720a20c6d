"""The example of docs/own_model.md trains and resumes as written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.config.schema import EngineName, Precision
from toolkit.engine.local import LocalEngine
from toolkit.plan.types import RunPlan
from toolkit.testing import parity
from toolkit.testing.memory_reader import MemoryReader
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task

PAGE = Path(__file__).resolve().parents[2] / "docs/own_model.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Changes of the plan that train the page's model, which is in the working folder."""
    code, _ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert 25 <= len(code.splitlines()) <= 35, "the page promises a short example"
    (tmp_path / "my_model.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return {"model__target": "my_model.Convolutional", "model__arguments": {"vocab_size": 264, "width": 32}}


@pytest.mark.parametrize("precision", Precision, ids=lambda precision: precision.value)
def test_example_trains(example: dict[str, Any], precision: Precision) -> None:
    losses = parity.run_trace(tiny_plan(None, **example, precision__name=precision)).losses
    assert losses[0] - losses[-1] > 0.3


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_example_resumes(example: dict[str, Any], optimizer: str) -> None:
    momentum = 0.0 if optimizer == "adamw" else 0.9
    plan = tiny_plan(None, **example, optim__name=optimizer, optim__momentum=momentum)
    straight, resumed = LocalEngine(plan, text_task(plan)), LocalEngine(plan, text_task(plan))
    straight.load(parity.open_initial_weights(plan))
    parity.train_steps(straight, plan, range(3))
    resumed.load(MemoryReader.from_engine(straight))
    assert parity.train_steps(resumed, plan, range(3, 6)) == parity.train_steps(straight, plan, range(3, 6))


def test_commands_use_existing_keys() -> None:
    """The keys in the page's commands exist."""
    from toolkit.config.compose import compose

    commands = re.findall(
        r"^deepspeed .*?launch/train.py (.*my_model.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(commands) == 2
    for command in commands:
        config = compose(command.split())
        assert config.model.target == "my_model.Convolutional"
        assert config.engine.name is EngineName.deepspeed


def test_conversion_follows_the_page(example: dict[str, Any]) -> None:
    plan: RunPlan = tiny_plan(None, **example, precision__name=Precision.bf16)
    engine = LocalEngine(plan, text_task(plan))
    assert {parameter.dtype for parameter in engine._parameters.values()} == {torch.bfloat16}
