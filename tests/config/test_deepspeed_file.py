"""``+engine.deepspeed=FILE.json`` merges the keys of a DeepSpeed JSON as if they were typed.

pytest tests/config/test_deepspeed_file.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plan.cases import CPU
from toolkit.config.compose import compose, from_yaml, to_yaml
from toolkit.errors import ConfigError, PlanError
from toolkit.plan.make import make_plan
from toolkit.plan.types import RunPlan

Write = Callable[[dict[str, Any]], None]
TUNED = {
    "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000},
    "wall_clock_breakdown": True,
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write ds.json into the working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda tree: (tmp_path / "ds.json").write_text(json.dumps(tree)) and None


def plan(*words: str) -> RunPlan:
    return make_plan(compose(["+exp=quickstart", *words]), CPU)


def test_keys_of_a_file_are_those_typed_one_by_one(write: Write) -> None:
    write(TUNED)
    typed = [
        "+engine.deepspeed.zero_optimization.overlap_comm=true",
        "+engine.deepspeed.zero_optimization.reduce_bucket_size=1000",
        "+engine.deepspeed.wall_clock_breakdown=true",
    ]
    from_file, one_by_one = plan("+engine.deepspeed=ds.json"), plan(*typed)
    assert from_file.deepspeed == one_by_one.deepspeed
    assert from_file.identity == one_by_one.identity
    assert from_file.config.engine.deepspeed_file == "ds.json"
    again = from_yaml(to_yaml(from_file.config))
    assert make_plan(again, CPU).deepspeed == from_file.deepspeed, "a frozen run needs no file"


def test_typed_settings_win_over_the_file(write: Write) -> None:
    write(TUNED)
    for words in (["+engine.deepspeed=ds.json", "+engine.deepspeed.wall_clock_breakdown=false"],) * 2:
        settings = plan(*words).deepspeed
        assert settings is not None
        assert settings["wall_clock_breakdown"] is False
        assert settings["zero_optimization"]["reduce_bucket_size"] == 1000
        words.reverse()


def test_derived_keys_that_agree_with_the_run_are_accepted(write: Write) -> None:
    write(
        {
            **TUNED,
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "torch_adam": True}},
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": False, "initial_scale_power": 16},
            "tensorboard": {"enabled": False},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        }
    )
    accepted = plan("+engine.deepspeed=ds.json", "train.micro_batch=4")
    assert accepted.config.engine.deepspeed == {
        "zero_optimization": {"overlap_comm": True},
        "wall_clock_breakdown": True,
    }


@pytest.mark.parametrize(
    ("tree", "key", "remedy"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping", "optim.clip=0.5"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "zero=stage3"),
        ({"train_batch_size": 32}, "train_batch_size", "train.global_batch=32"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "optimizer.params.lr", "optim.lr"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type", "schedule=constant"),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "precision=bf16"),
    ],
)
def test_derived_keys_that_differ_are_refused(
    write: Write, tree: dict[str, Any], key: str, remedy: str
) -> None:
    write(tree)
    with pytest.raises(PlanError) as refused:
        plan("+engine.deepspeed=ds.json")
    (problem,) = refused.value.problems
    assert problem.key == f"engine.deepspeed.{key}"
    assert remedy in problem.remedy
    assert "toolkit.launch.adopt ds.json" in problem.remedy


def test_files_that_cannot_be_used_are_refused(write: Write, tmp_path: Path) -> None:
    write({"no_such_key": 1})
    with pytest.raises(PlanError, match="no key no_such_key"):
        plan("+engine.deepspeed=ds.json")
    with pytest.raises(ConfigError, match="No such file"):
        compose(["+engine.deepspeed=absent.json"])
    (tmp_path / "ds.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not an object"):
        compose(["+engine.deepspeed=ds.json"])
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        compose(["+engine.deepspeed=ds.json"])


def test_text_of_a_file_is_not_evaluated(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE", "hidden")
    write({"compile": {"backend": "${oc.env:PRIVATE}"}})
    config = compose(["+engine.deepspeed=ds.json"])
    assert config.engine.deepspeed["compile"]["backend"] == "${oc.env:PRIVATE}"
