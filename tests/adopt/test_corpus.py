"""Every key of every configuration of the corpus is accounted for, and every experiment can be planned.

pytest tests/adopt/test_corpus.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launch.adopt import main
from tests.adopt.cases import CORPUS, GOLDEN, RUNS, adopted, experiment, sources
from toolkit.adopt.decide import adopt
from toolkit.adopt.experiment import write_experiment
from toolkit.adopt.read import read_source
from toolkit.adopt.types import Outcome
from toolkit.commands import command_line
from toolkit.errors import ConfigError, InputError
from toolkit.plan.types import RunPlan


def test_the_corpus_has_every_format() -> None:
    assert len(list(CORPUS.iterdir())) >= 25
    assert {source.format.name for name in RUNS for source in sources(name)} == {
        "DEEPSPEED", "TRAINER", "ACCELERATE", "MEGATRON"
    }  # fmt: skip


# One of each kind in the quick suite: composing takes a third of a second.
QUICK = (
    *("ds_zero3_nvme", "ds_bf16_no_zero", "ds_onebit_elastic", "trainer_steps_eval", "trainer_and_deepspeed"),
    *("accelerate_fsdp2", "megatron_llama3_8b", "megatron_mixtral_8x7b"),
)
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in RUNS]


@pytest.mark.parametrize("name", RUNS)
def test_every_key_is_accounted_for(name: str) -> None:
    adoption = adopt(sources(name))
    keys_in = [(source.name, key) for source in sources(name) for key in source.keys]
    assert [(key.source, key.key) for key in adoption.keys] == keys_in
    text = write_experiment(adoption, name, RUNS[name])
    for key in adoption.keys:
        assert f"# {key.key}: " in text or f"#   {key.key}: " in text, key
        if key.outcome is Outcome.REFUSED:
            assert key.note, key
            assert not key.targets, key
        if key.outcome is Outcome.CHANGED:
            assert key.note, key


@pytest.mark.parametrize("name", EACH)
def test_experiments_are_as_before(name: str) -> None:
    assert experiment(name) == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EACH)
def test_experiments_plan(name: str) -> None:
    adoption, plan = adopted(name)
    assert isinstance(plan, RunPlan)
    config = plan.config
    engine = adoption.settings["engine"]
    assert config.engine.name.value == engine
    # The engines' own keys reach the engine as they are.
    for key in adoption.keys:
        for target, value in key.targets:
            if target.startswith("engine.deepspeed."):
                found = plan.deepspeed
                for part in target.split(".")[2:]:
                    assert found is not None
                    found = found[part]
                assert found == value, target


def test_keys_of_a_json_are_counted_from_the_file() -> None:
    """The count does not depend on the code that reads the file."""

    def leaves(tree: object) -> int:
        return sum(map(leaves, tree.values())) if isinstance(tree, dict) and tree else 1

    for path in CORPUS.glob("*.json"):
        tree = json.loads(path.read_text())
        if path.name.startswith(("ds_", "parity_")):
            assert len(adopt(sources(path.stem)).keys) == leaves(tree), path.name
    for path in CORPUS.glob("*.yaml"):
        assert len(adopt(sources(path.stem)).keys) == leaves(yaml.safe_load(path.read_text())), path.name


def test_values_of_the_files_reach_the_plan() -> None:
    plan = adopted("megatron_llama3_8b")[1]
    assert plan.shape is not None
    assert (plan.shape.family, plan.shape.hidden_size, plan.shape.num_key_value_heads) == ("llama", 4096, 8)
    assert (plan.config.train.steps, plan.config.schedule.warmup, plan.config.schedule.decay) == (
        10_000,
        100,
        8900,
    )
    assert (plan.axes.tensor, plan.axes.data, plan.config.zero.stage) == (2, 4, 1)
    plan = adopted("trainer_and_deepspeed")[1]
    assert plan.deepspeed is not None
    assert plan.deepspeed["zero_optimization"]["stage"] == 3
    assert plan.deepspeed["train_micro_batch_size_per_gpu"] == 4
    assert plan.deepspeed["gradient_accumulation_steps"] == 2
    assert plan.config.optim.lr == 1e-5
    assert plan.config.checkpoint.every == "100"


def test_two_files_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}')
    (tmp_path / "args.json").write_text('{"per_device_train_batch_size": 4, "max_grad_norm": 0.5}')
    with pytest.raises(
        ConfigError, match=r"gradient_clipping=1\.0 in ds\.json, max_grad_norm=0\.5 in args\.json"
    ):
        adopt([read_source(tmp_path / name) for name in ("ds.json", "args.json")])


def test_a_model_without_a_family_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "args.txt").write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --squared-relu"
    )
    assert main([str(tmp_path / "args.txt")]) == 2
    assert "no family here has --squared-relu" in capsys.readouterr().err
    (tmp_path / "args.txt").write_text("--num-layers 2 --position-embedding-type rope --swiglu")
    assert main([str(tmp_path / "args.txt")]) == 2
    assert "no family here has rotary positions, SwiGLU, LayerNorm, biases" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[1]", "is not an object"),
        ("a.json", '{"colour": "red"}', "has none of their keys: colour"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.yaml", "a: 1", "has none of the keys of accelerate"),
        ("a.sh", "echo hello", "has no command with options"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, word: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=word):
        read_source(tmp_path / name)


def test_the_command_writes_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "conf" / "exp" / "mine.yaml"
    words = [str(CORPUS / "ds_bf16_zero1.json"), "--ranks=4", f"--output={output}"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "18 keys" in printed
    assert command_line("plan", f"--config-dir={tmp_path / 'conf'}", "+exp=mine") in printed
    assert yaml.safe_load(output.read_text())["train"]["global_batch"] == 8 * 4 * 4
    assert main(words) == 2
    assert "add --force" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert main([words[0], f"--output={tmp_path / 'mine.yaml'}"]) == 2
    assert "--output=conf/exp/mine.yaml" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2


def test_text_of_a_file_is_not_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user cannot read this machine's environment."""
    monkeypatch.setenv("PRIVATE", "hidden")
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 8, "wandb": {"enabled": true, "project": "${oc.env:PRIVATE}"}}'
    )
    from toolkit.adopt.check import resolve_adoption

    adoption = adopt([read_source(tmp_path / "ds.json")])
    assert resolve_adoption(adoption, ["ds.json"])[1].config.monitor.project == "${oc.env:PRIVATE}"
