"""Adam's state in safetensors beside the weights: transformers opens the folder, training resumes from it.

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

from tests.checkpoint.layouts import LAYOUTS, same_bits, save, shards_of, whole
from tests.checkpoint.test_huggingface import FAMILIES, model_of, tiny
from toolkit import families
from toolkit.checkpoint import manifest, open_reader
from toolkit.checkpoint.formats import native
from toolkit.checkpoint.formats.huggingface_target import lay_out
from toolkit.checkpoint.offline import reshard
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, MOMENTUM, WEIGHT, TensorKey
from toolkit.checkpoint.source import Source, open_source
from toolkit.checkpoint.states import tensors_of
from toolkit.checkpoint.target import Target
from toolkit.checkpoint.verify import digest, verify
from toolkit.config.reshard import Format, TargetConfig
from toolkit.config.schema import Precision
from toolkit.engine.build import build_engine, first_weights
from toolkit.errors import CheckpointError, InputError
from toolkit.models.pretrained import open_pretrained
from toolkit.testing.parity import train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task

SCALARS = {
    "step": 7,
    "consumed_samples": 112,
    "optimizer_step": 6,
    "loss_scaler": {"cur_scale": 4.0},
    "data": {"train": "abc"},
}


def with_optimizer(name: str, folder: Path, *, mixed: bool = True, momentum: bool = False) -> Source:
    """A run's checkpoint of step 7 on two ranks. ``momentum``: as Muon keeps it, one moment of matrices and two of the rest."""
    shape = tiny(name)
    weights = model_of(shape).state_dict()
    values = {spec.name: weights[spec.name] for spec in families.get_family(name).parameters(shape)}
    named = {TensorKey(WEIGHT, name): value.bfloat16() if mixed else value for name, value in values.items()}
    named |= {TensorKey(MASTER, name): value for name, value in values.items() if mixed}
    for name, value in values.items():
        if momentum and value.ndim > 1:
            named[TensorKey(MOMENTUM, name)] = value * 3
        else:
            named |= {TensorKey(EXP_AVG, name): value / 3, TensorKey(EXP_AVG_SQ, name): value**2}
    return open_source(save(folder, 7, shards_of(named, LAYOUTS["flat"], 2), scalars=SCALARS), shape)


def write(source: Source, target: Target, folder: Path) -> Path:
    Conversion(source.catalog, target, folder, origin=source.origin(), refuse=source.refuse).run()
    return folder


def converted(folder: Path, name: str, **settings: Any) -> Path:
    source = with_optimizer(name, folder / "run", **settings)
    return write(
        source,
        lay_out(source, TargetConfig(format=Format.huggingface, optimizer=True), shard_bytes=30_000),
        folder / "hub",
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    source = with_optimizer(name, tmp_path / "run")
    folder = converted(tmp_path / "there", name)
    assert len(list((folder / "optimizer").glob("exp_avg-0000*"))) > 1, "several files"
    assert verify(folder) == []
    by_manifest = open_source(folder)
    (folder / manifest.BESIDE).unlink()
    found = open_source(folder)
    assert (found.format, found.step, found.shape, found.namespace) == (
        "huggingface",
        7,
        source.shape,
        families.get_family(name).namespace,
    )
    assert found.catalog.scalars == SCALARS
    assert digest(found.reader()) == digest(by_manifest.reader()) == digest(source.reader())
    opened, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    weights = model_of(
        tiny(name)
    ).state_dict()  # rotations are buffers in fp32, so a model that is cast is another one
    assert all(same_bits(tensor, weights[key].bfloat16()) for key, tensor in opened.state_dict().items())
    back = open_source(
        write(found, native.lay_out(found, tensors_of(found, None, optimizer=True)), tmp_path / "back")
    )
    assert digest(back.reader()) == digest(source.reader())
    assert back.step == 7
    assert {name: back.catalog.scalars[name] for name in SCALARS} == SCALARS


def test_what_an_fp32_run_and_what_muon_keeps(tmp_path: Path) -> None:
    for number, settings in enumerate(({"mixed": False}, {"momentum": True})):
        source = with_optimizer("llama", tmp_path / f"{number}" / "same", **settings)
        folder = converted(tmp_path / f"{number}", "llama", **settings)
        (folder / manifest.BESIDE).unlink()
        assert digest(open_reader(folder)) == digest(source.reader())
        states = json.loads((folder / "optimizer" / "state.json").read_text())["states"]
        assert (
            sorted(states)
            == [["exp_avg", "exp_avg_sq"], ["exp_avg", "exp_avg_sq", "master", "momentum_buffer"]][number]
        )


def test_weights_alone_are_of_no_step(tmp_path: Path) -> None:
    source = with_optimizer("llama", tmp_path / "run")
    folder = write(
        source,
        lay_out(source, TargetConfig(format=Format.huggingface, precision=Precision.fp32)),
        tmp_path / "hub",
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "toolkit-manifest.json",
    ]
    for remove in (False, True):
        if remove:
            (folder / manifest.BESIDE).unlink()
        found = open_source(folder)
        assert "step" not in found.catalog.scalars
        assert {(key.state, info.dtype) for key, info in found.catalog.tensors.items()} == {
            (WEIGHT, "float32")
        }
        for key, tensor in whole(found.reader()).items():
            assert torch.equal(tensor, whole(source.reader())[TensorKey(MASTER, key.name)]), "of the masters"


def test_a_model_that_nobody_knows_is_asked_for(tmp_path: Path) -> None:
    named = {TensorKey(WEIGHT, "w"): torch.ones(3)}
    source = open_source(save(tmp_path, 1, shards_of(named, LAYOUTS["flat"], 1)))
    lay_out(source, TargetConfig(format=Format.huggingface))
    folder = converted(tmp_path / "a", "llama")
    (folder / manifest.BESIDE).unlink()
    with pytest.raises(InputError, match="model=llama"):
        lay_out(replace(open_source(folder), shape=None), TargetConfig(format=Format.huggingface))


def test_people_change_settings_and_tokenizers(tmp_path: Path) -> None:
    """What a manifest lies beside is still the folder that it was: its tensors are known, its settings are anybody's."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    source = with_optimizer("llama", tmp_path / "run")
    target = lay_out(source, TargetConfig(format=Format.huggingface), tokenizer=tmp_path / "tokenizer")
    folder = write(source, target, tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (folder / "tokenizer.json").unlink()
    assert verify(folder) == []
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has"):
        open_source(folder)


def test_norms_in_fp32_among_weights_of_16_bits_stay_what_they_are(tmp_path: Path) -> None:
    shape = tiny("llama")
    values = {spec.name: torch.randn(spec.shape) for spec in families.get_family("llama").parameters(shape)}
    named = {
        TensorKey(WEIGHT, name): value if value.ndim == 1 else value.bfloat16()
        for name, value in values.items()
    }
    source = open_source(save(tmp_path / "run", 1, shards_of(named, LAYOUTS["flat"], 2)), shape)
    assert digest(open_reader(write(source, lay_out(source, TargetConfig()), tmp_path / "hub"))) == digest(
        source.reader()
    )


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
        "bytes where its header says",
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
def test_damage_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    folder = converted(tmp_path, "llama")
    (folder / manifest.BESIDE).unlink()
    change, match = DAMAGES[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=match):
        open_source(folder)
    [finding] = verify(folder)
    assert finding.where.startswith("optimizer/")


def test_half_of_a_moment_is_refused(tmp_path: Path) -> None:
    """Mixtral's experts are tensors of their own on the hub, and one in memory."""
    from safetensors.torch import load_file, save_file

    folder = converted(tmp_path, "mixtral")
    (folder / manifest.BESIDE).unlink()
    for file in sorted((folder / "optimizer").glob("exp_avg-*")):
        tensors = {name: tensor for name, tensor in load_file(file).items() if "experts.1.w2" not in name}
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"exp_avg:model\.layers\.0\.mlp\.experts\.down_proj: \d+ of \d+ elements are there",
    ):
        open_source(folder)


# ---- training


def test_a_run_resumes_from_it_to_the_bit(tmp_path: Path) -> None:
    plan = tiny_plan("llama", precision__name=Precision.bf16)
    assert plan.shape is not None

    def engine(source: Path | None) -> Any:
        made = build_engine(plan, text_task(plan), rank=0, local_rank=0)
        made.load(first_weights(plan) if source is None else open_reader(source))
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
    (folder / manifest.BESIDE).unlink()
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


def test_a_model_that_the_checkpoint_is_not_of_is_refused(tmp_path: Path) -> None:
    """Whatever is written: sizes that the user said wrong would cut tensors, or be recorded beside them."""
    source = with_optimizer("llama", tmp_path / "run")
    wrong = replace(source, shape=tiny("llama", num_key_value_heads=4))
    for written in (Format.native, Format.huggingface, Format.universal):
        with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \(16, 32\)[\s\S]*\(32, 32\)"):
            reshard.lay_out(wrong, TargetConfig(format=written))
        reshard.lay_out(source, TargetConfig(format=written))
