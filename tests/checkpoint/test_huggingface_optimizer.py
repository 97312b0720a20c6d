"""Adam's state in safetensors next to the weights: transformers loads the folder, and training resumes from
it.

pytest tests/checkpoint/test_huggingface_optimizer.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.huggingface_folders import (
    FAMILIES,
    SCALARS,
    converted,
    model_of,
    tiny,
    with_optimizer,
    write,
)
from tests.checkpoint.layouts import LAYOUTS, same_bits, save, shards_of, whole
from toolkit import families
from toolkit.checkpoint import manifest, open_reader
from toolkit.checkpoint.formats import native
from toolkit.checkpoint.formats.huggingface.target import lay_out
from toolkit.checkpoint.offline import reshard
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.target_tensors import select_target_tensors
from toolkit.checkpoint.verify import compute_digest, verify
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.config.schema import Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.errors import CheckpointError, InputError
from toolkit.models.pretrained import open_pretrained
from toolkit.testing.parity import train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.full) for name in FAMILIES]
)
def test_round_trip_keeps_optimizer_state(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    source = with_optimizer(name, tmp_path / "run")
    folder = converted(tmp_path / "there", name)
    assert len(list((folder / "optimizer").glob("exp_avg-0000*"))) > 1, "several files"
    assert verify(folder) == []
    by_manifest = open_source(folder)
    (folder / manifest.FOREIGN_NAME).unlink()
    found = open_source(folder)
    assert (found.format, found.step, found.shape, found.namespace) == (
        "huggingface",
        7,
        source.shape,
        families.get_family(name).namespace,
    )
    assert found.catalog.scalars == SCALARS
    assert (
        compute_digest(found.reader())
        == compute_digest(by_manifest.reader())
        == compute_digest(source.reader())
    )
    opened, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    weights = model_of(
        tiny(name)
    ).state_dict()  # rotations are buffers in fp32, so a model that is cast is another one
    assert all(same_bits(tensor, weights[key].bfloat16()) for key, tensor in opened.state_dict().items())
    back = open_source(
        write(
            found,
            native.lay_out(found, select_target_tensors(found, None, optimizer=True)),
            tmp_path / "back",
        )
    )
    assert compute_digest(back.reader()) == compute_digest(source.reader())
    assert back.step == 7
    assert {name: back.catalog.scalars[name] for name in SCALARS} == SCALARS


def test_fp32_and_muon_states_are_stored(tmp_path: Path) -> None:
    for number, settings in enumerate(({"mixed": False}, {"momentum": True})):
        source = with_optimizer("llama", tmp_path / f"{number}" / "same", **settings)
        folder = converted(tmp_path / f"{number}", "llama", **settings)
        (folder / manifest.FOREIGN_NAME).unlink()
        assert compute_digest(open_reader(folder)) == compute_digest(source.reader())
        states = json.loads((folder / "optimizer" / "state.json").read_text())["states"]
        assert (
            sorted(states)
            == [["exp_avg", "exp_avg_sq"], ["exp_avg", "exp_avg_sq", "master", "momentum_buffer"]][number]
        )


def test_weights_only_have_no_step(tmp_path: Path) -> None:
    source = with_optimizer("llama", tmp_path / "run")
    folder = write(
        source,
        lay_out(source, TargetConfig(format=TargetFormat.huggingface, precision=Precision.fp32)),
        tmp_path / "hub",
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "toolkit-manifest.json",
    ]
    for remove in (False, True):
        if remove:
            (folder / manifest.FOREIGN_NAME).unlink()
        found = open_source(folder)
        assert "step" not in found.catalog.scalars
        assert {(key.state, info.dtype) for key, info in found.catalog.tensors.items()} == {
            (WEIGHT, "float32")
        }
        for key, tensor in whole(found.reader()).items():
            assert torch.equal(tensor, whole(source.reader())[TensorKey(MASTER, key.name)]), "of the masters"


def test_unknown_model_must_be_given(tmp_path: Path) -> None:
    named = {TensorKey(WEIGHT, "w"): torch.ones(3)}
    source = open_source(save(tmp_path, 1, shards_of(named, LAYOUTS["flat"], 1)))
    lay_out(source, TargetConfig(format=TargetFormat.huggingface))
    folder = converted(tmp_path / "a", "llama")
    (folder / manifest.FOREIGN_NAME).unlink()
    with pytest.raises(InputError, match="model=llama"):
        lay_out(replace(open_source(folder), shape=None), TargetConfig(format=TargetFormat.huggingface))


def test_settings_and_tokenizer_files_may_change(tmp_path: Path) -> None:
    """The manifest covers tensors only."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    source = with_optimizer("llama", tmp_path / "run")
    target = lay_out(source, TargetConfig(format=TargetFormat.huggingface), tokenizer=tmp_path / "tokenizer")
    folder = write(source, target, tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (folder / "tokenizer.json").unlink()
    assert verify(folder) == []
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has"):
        open_source(folder)


def test_fp32_norms_among_16_bit_weights_keep_dtype(tmp_path: Path) -> None:
    shape = tiny("llama")
    values = {spec.name: torch.randn(spec.shape) for spec in families.get_family("llama").parameters(shape)}
    named = {
        TensorKey(WEIGHT, name): value if value.ndim == 1 else value.bfloat16()
        for name, value in values.items()
    }
    source = open_source(save(tmp_path / "run", 1, shards_of(named, LAYOUTS["flat"], 2)), shape)
    assert compute_digest(
        open_reader(write(source, lay_out(source, TargetConfig()), tmp_path / "hub"))
    ) == compute_digest(source.reader())


# ---- damage


def json_of(change: dict[str, Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "optimizer" / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return apply


def first(folder: Path, state: str = "exp_avg") -> Path:
    return sorted((folder / "optimizer").glob(f"{state}-*"))[0]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing file": (
        lambda folder: first(folder).unlink(),
        r"optimizer/exp_avg-00001-of-\d{5}\.safetensors is missing",
    ),
    "a truncated file": (
        lambda folder: first(folder).write_bytes(first(folder).read_bytes()[:-8]),
        "bytes, but its header describes",
    ),
    "no states": (json_of({"states": None}), "has no scalars or no states"),
    "files elsewhere": (
        json_of({"states": {"exp_avg": ["../model.safetensors"]}}),
        "does not name the files",
    ),
    "another version": (json_of({"format_version": 2}), "format_version=2"),
    "no JSON": (lambda folder: (folder / "optimizer" / "state.json").write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_by_file(tmp_path: Path, damage: str) -> None:
    folder = converted(tmp_path, "llama")
    (folder / manifest.FOREIGN_NAME).unlink()
    change, match = DAMAGES[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=match):
        open_source(folder)
    [finding] = verify(folder)
    assert finding.where.startswith("optimizer/")


def test_incomplete_moment_is_rejected(tmp_path: Path) -> None:
    """Mixtral's experts are separate tensors on the hub, and one in memory."""
    from safetensors.torch import load_file, save_file

    folder = converted(tmp_path, "mixtral")
    (folder / manifest.FOREIGN_NAME).unlink()
    for file in sorted((folder / "optimizer").glob("exp_avg-*")):
        tensors = {name: tensor for name, tensor in load_file(file).items() if "experts.1.w2" not in name}
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"exp_avg:model\.layers\.0\.mlp\.experts\.down_proj: \d+ of \d+ elements are stored",
    ):
        open_source(folder)


# ---- training


def test_run_resumes_bitwise(tmp_path: Path) -> None:
    plan = tiny_plan("llama", precision__name=Precision.bf16)
    assert plan.shape is not None

    def engine(source: Path | None) -> Any:
        made = build_engine(plan, text_task(plan), rank=0, local_rank=0)
        made.load(open_initial_weights(plan) if source is None else open_reader(source))
        return made

    stayed = engine(None)
    train_steps(stayed, plan, range(2))
    saved = (
        CheckpointStore(tmp_path / "run")
        .save(
            2,
            stayed.shards(),
            {"step": 2, **stayed.scalars()},
            rank=0,
            ranks=1,
            attempt=1,
            namespace=families.get_family("llama").namespace,
        )
        .wait()
    )
    source = open_source(saved, plan.shape)
    folder = write(source, lay_out(source, TargetConfig(optimizer=True)), tmp_path / "hub")
    (folder / manifest.FOREIGN_NAME).unlink()
    went_on = [result.loss for result in train_steps(stayed, plan, range(2, 4))]
    assert [result.loss for result in train_steps(engine(folder), plan, range(2, 4))] == went_on
    weights = write(source, lay_out(source, TargetConfig()), tmp_path / "weights")
    assert [result.loss for result in train_steps(engine(weights), plan, range(2, 4))] != went_on, (
        "the control: without moments and masters"
    )

    reader = open_pretrained(
        tiny_plan("llama", precision__name=Precision.bf16, model__pretrained=str(folder))
    )
    assert {key.state for key in reader.tensors} == {WEIGHT, MASTER}, (
        "a new run begins with an optimizer of its own"
    )
    assert reader.scalars == {}


def test_checkpoint_of_other_model_is_rejected(tmp_path: Path) -> None:
    """For every target format: wrong sizes would cut tensors or be recorded."""
    source = with_optimizer("llama", tmp_path / "run")
    wrong = replace(source, shape=tiny("llama", num_key_value_heads=4))
    for written in (TargetFormat.native, TargetFormat.huggingface, TargetFormat.universal):
        with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \(16, 32\)[\s\S]*\(32, 32\)"):
            reshard.lay_out(wrong, TargetConfig(format=written))
        reshard.lay_out(source, TargetConfig(format=written))
