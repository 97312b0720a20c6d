"""Checkpoints of DeepSpeed without this toolkit's engines: users' settings, groups, pipelines, AutoTP.

pytest tests/checkpoint/test_deepspeed_users.py
pytest tests/checkpoint/test_deepspeed_users.py -m full
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import deepspeed_layers as layers
from tests.checkpoint import deepspeed_saves as saves
from tests.checkpoint.deepspeed_checks import EVEN, ODD, compare_copies, differing, read_like
from tests.checkpoint.deepspeed_saves import TAG
from tests.checkpoint.layouts import same_bits, whole
from toolkit.checkpoint.formats.deepspeed.plain_optimizer import infer_group_names
from toolkit.checkpoint.formats.universal import source as universal
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.plan import plan_reshard
from toolkit.checkpoint.offline.reshard import lay_out
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.verify import compute_digest
from toolkit.config.reshard import TargetConfig, TargetFormat, TargetParallelConfig, TargetZeroStage
from toolkit.config.schema import Precision
from toolkit.errors import CheckpointError
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.tiny import tiny_plan


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


PLAIN: dict[str, dict[str, Any]] = {
    "round-robin": {
        "settings": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
        "tools": True,
    },
    "aligned": {"settings": {"zero_optimization": {"stage": 1, "parameter_alignment": True}}, "tools": False},
    "elastic": {"settings": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "tools": False},
    "frozen-1": {
        "settings": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        "frozen": ("model.embed_tokens.weight", "model.norm.weight"),
        "tools": False,
    },
    "frozen-2": {
        "settings": {"zero_optimization": {"stage": 2}},
        "frozen": ("model.embed_tokens.weight", "model.norm.weight"),
        "tools": True,
    },
    "frozen-3": {
        "settings": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "frozen": ("model.embed_tokens.weight", "model.norm.weight"),
        "tools": True,
    },
    "bf16-stage-0": {"settings": {"bf16": {"enabled": True}}, "tools": False},
    "bf16-optimizer": {
        "settings": {
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        "tools": False,
    },  # zero_to_fp32 does not recognise it as a checkpoint
    "reversed": {"settings": {"zero_optimization": {"stage": 1}}, "shuffled": True, "tools": True},
}


# Forms that the installed DeepSpeed does not write, or not on a CPU.
ALTERED = {"bf16-stage-0": saves.fuse, "bf16-optimizer": saves.forget_shapes}


@pytest.mark.parametrize("name", ["round-robin", "frozen-3"])
def test_read_user_program_checkpoints(name: str, pool: RankPool, tmp_path: Path) -> None:
    check_plain(name, pool, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(PLAIN.keys() - {"round-robin", "frozen-3"}))
def test_read_all_user_program_checkpoints(name: str, pool: RankPool, tmp_path: Path) -> None:
    check_plain(name, pool, tmp_path)


def check_plain(name: str, pool: RankPool, folder: Path) -> None:
    more = dict(PLAIN[name])
    tools = more.pop("tools")
    plan = tiny_plan("llama", **ODD)
    saved_state = (
        pool.run(saves.save_plain, plan, folder, *more.values(), ranks=2)[0]
        if "shuffled" not in more
        else pool.run(saves.save_plain, plan, folder, more["settings"], (), True, ranks=2)[0]
    )
    source = open_source(folder, plan.shape)
    assert not differing(read_like(source, saved_state), saved_state)
    compare_copies(source)
    if name in ALTERED:
        ALTERED[name](folder / TAG / "mp_rank_00_model_states.pt")
        source = open_source(folder, plan.shape)
        assert not differing(read_like(source, saved_state), saved_state)
    if tools:
        weights = pool.run(saves.full_weights, folder, ranks=1)[0]
        for key, tensor in whole(source.reader()).items():
            if key.state == MASTER or (
                key.state == WEIGHT and TensorKey(MASTER, key.name) not in source.catalog.tensors
            ):
                assert same_bits(tensor.float(), weights[key.name].float()), key


def test_unnamed_groups_in_other_order_are_rejected(pool: RankPool, tmp_path: Path) -> None:
    plan = tiny_plan("llama", **ODD)
    pool.run(saves.save_plain, plan, tmp_path, {}, (), True, ranks=1)
    with pytest.raises(CheckpointError, match="order of names"):
        open_source(tmp_path, plan.shape)


def test_infer_group_names() -> None:
    shapes = {"a": (2, 3), "b": (3,), "c": (2, 3), "d": (5,)}
    assert infer_group_names(shapes, [[(2, 3), (2, 3)], [(3,), (5,)]]) == [["a", "c"], ["b", "d"]]
    assert infer_group_names(shapes, [[(2, 3), (3,), (2, 3), None]]) == [["a", "b", "c", "d"]]
    assert infer_group_names(shapes, [[(2, 3), (2, 3), (5,)]]) == [["a", "c", "d"]], "b is frozen"
    assert infer_group_names(shapes, [[(2, 3), (3,)], [(2, 3), (5,)]]) == [["a", "b"], ["c", "d"]]
    assert infer_group_names(shapes, [[(2, 3)], [(2, 3)], [(3,), (5,)]]) is None, (
        "a and c might change places"
    )
    assert infer_group_names(shapes, [[(5,), (2, 3), (2, 3), (3,)]]) is None, "not in the model's order"


# ---- universal


@pytest.mark.full
@pytest.mark.parametrize(("family", "stage"), [("llama", 1), ("qwen2", 2)])
def test_universal_of_autotp(family: str, stage: int, pool: RankPool, tmp_path: Path) -> None:
    plan = tiny_plan(family, **EVEN)
    pool.run(
        saves.save_autotp,
        plan,
        tmp_path / "saved",
        {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
        ranks=4,
    )
    source = open_source(tmp_path / "saved", plan.shape)
    compare_copies(source)
    pool.run(saves.to_universal, tmp_path / "saved", tmp_path / "universal", ranks=1)
    converted = open_source(tmp_path / "universal", plan.shape)
    assert compute_digest(converted.reader()) == compute_digest(source.reader())


@pytest.mark.full
def test_scrambled_universal_checkpoint_is_rejected(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: read without the check, most parameters differ from the original checkpoint."""
    plan = tiny_plan("llama", **ODD)
    settings = {"zero_optimization": {"stage": 1, "round_robin_gradients": True}}
    saved_state = pool.run(saves.save_plain, plan, tmp_path / "saved", settings, ranks=2)[0]
    assert not differing(read_like(open_source(tmp_path / "saved", plan.shape), saved_state), saved_state)
    pool.run(saves.to_universal, tmp_path / "saved", tmp_path / "universal", ranks=1)
    with pytest.raises(CheckpointError, match="round_robin_gradients"):
        open_source(tmp_path / "universal", plan.shape)
    monkeypatch.setattr(universal, "_refuse_scrambled", lambda saved: None)
    assert (
        len(differing(read_like(open_source(tmp_path / "universal", plan.shape), saved_state), saved_state))
        > len(saved_state) // 2
    )


# ---- what a converted checkpoint is to a user's program


@pytest.mark.parametrize(
    "scheduler", ["WarmupDecayLR", pytest.param("LambdaLR", marks=pytest.mark.full), "CosineAnnealingLR"]
)
def test_lr_scheduler_resumes_from_converted_checkpoint(
    scheduler: str, pool: RankPool, tmp_path: Path
) -> None:
    """Learning rates equal those of the uninterrupted program. Control: they change from step to step."""
    plan = tiny_plan("llama", **EVEN)
    rates, losses = pool.run(saves.scheduled, plan, scheduler, tmp_path / "saved", ranks=2)[0]
    converted(tmp_path / "saved", tmp_path / "native", plan, TargetConfig())
    target = converted(
        tmp_path / "native",
        tmp_path / "again",
        plan,
        TargetConfig(format=TargetFormat.deepspeed, parallel=TargetParallelConfig(data=2)),
    )
    again, more = pool.run(
        saves.scheduled, plan, scheduler, tmp_path / "unused", tmp_path / "again", ranks=2
    )[0]
    assert again == pytest.approx(rates, rel=1e-12)
    assert more == pytest.approx(losses, abs=1e-5)
    assert len(set(rates)) == len(rates)
    assert re.search(
        r"2 parameter groups, .*: 16 tensors of more than one dim with weight_decay=0.1, then 5 tensors of "
        r"one dim with "
        r"weight_decay=0; lr=\S+ betas=\[0.9, 0.999\] eps=0.0001",
        target.notes[0],
    )


def converted(path: Path, target: Path, plan: RunPlan, config: TargetConfig) -> CheckpointTarget:
    source = open_source(path, plan.shape)
    laid = lay_out(source, config)
    Conversion(source, laid, target).run()
    return laid


@pytest.fixture(scope="module")
def partly_frozen(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> CheckpointSource:
    folder, plan = tmp_path_factory.mktemp("frozen"), tiny_plan("llama", **EVEN)
    frozen = (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    pool.run(saves.save_plain, plan, folder, {"zero_optimization": {"stage": 2}}, frozen, ranks=2)
    return open_source(folder, plan.shape)


@pytest.mark.parametrize("form", [TargetFormat.deepspeed, TargetFormat.universal, TargetFormat.megatron])
def test_frozen_parameters_are_rejected_with_working_remedies(
    form: TargetFormat, partly_frozen: CheckpointSource, tmp_path: Path
) -> None:
    """Some of them are parts of Megatron-core's fused tensors."""
    with pytest.raises(CheckpointError) as refused:
        lay_out(partly_frozen, TargetConfig(format=form))
    assert "no optimizer state of model.embed_tokens.weight, " in str(refused.value)
    assert "3 of 21 parameters were frozen" in str(refused.value)
    weights = (
        "target.format=deepspeed target.optimizer=false"
        if form is TargetFormat.universal
        else "target.optimizer=false"
    )
    assert f"write {weights} for the weights alone, or target.format=native" in str(refused.value)
    for config in (
        TargetConfig(
            format=TargetFormat.deepspeed if form is TargetFormat.universal else form, optimizer=False
        ),
        TargetConfig(),
    ):
        target = lay_out(partly_frozen, config)
        plan_reshard(partly_frozen.catalog, target)
        Conversion(partly_frozen, target, tmp_path / config.format.name).run()
    assert open_source(tmp_path / "native").catalog.tensors.keys() == partly_frozen.catalog.tensors.keys()


def test_zero3_in_bf16_stays_bf16(pool: RankPool, tmp_path: Path) -> None:
    """ZeRO 3 files and universal checkpoints made from them have fp32 masters only."""
    plan = tiny_plan("llama", **EVEN)
    pool.run(
        saves.save_plain,
        plan,
        tmp_path / "saved",
        {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        ranks=2,
    )
    pool.run(saves.to_universal, tmp_path / "saved", tmp_path / "theirs", ranks=1)
    converted(tmp_path / "saved", tmp_path / "ours", plan, TargetConfig(format=TargetFormat.universal))
    converted(
        tmp_path / "saved",
        tmp_path / "again",
        plan,
        TargetConfig(format=TargetFormat.deepspeed, zero=TargetZeroStage.stage3),
    )
    for name in ("saved", "theirs", "ours", "again"):
        source = open_source(tmp_path / name, plan.shape)
        assert {key.state for key in source.catalog.tensors} == {MASTER, EXP_AVG, EXP_AVG_SQ}, name
        for config in (
            TargetConfig(),
            TargetConfig(format=TargetFormat.deepspeed),
            TargetConfig(format=TargetFormat.megatron),
            TargetConfig(format=TargetFormat.huggingface),
        ):
            dtypes = {
                info.dtype for key, info in lay_out(source, config).tensors.items() if key.state == WEIGHT
            }
            assert dtypes == {"bfloat16"}, (name, config.format)
    wide = lay_out(source, TargetConfig(precision=Precision.fp32))
    assert {info.dtype for key, info in wide.tensors.items() if key.state == WEIGHT} == {"float32"}, (
        "as asked"
    )


def test_amsgrad_third_state_is_never_dropped(pool: RankPool, tmp_path: Path) -> None:
    plan = tiny_plan("llama", **EVEN)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "amsgrad": True}}
    pool.run(
        saves.save_plain,
        plan,
        tmp_path / "saved",
        {"zero_optimization": {"stage": 1}, "optimizer": optimizer},
        ranks=2,
    )
    source = open_source(tmp_path / "saved", plan.shape)
    assert "max_exp_avg_sq" in {key.state for key in lay_out(source, TargetConfig()).tensors}
    for form in (TargetFormat.deepspeed, TargetFormat.universal, TargetFormat.megatron):
        with pytest.raises(
            CheckpointError, match=r"exp_avg, exp_avg_sq, max_exp_avg_sq[\s\S]*target.format=native"
        ):
            lay_out(source, TargetConfig(format=form))
    pool.run(saves.to_universal, tmp_path / "saved", tmp_path / "universal", ranks=1)
    with pytest.raises(CheckpointError, match="AMSGrad and lacks its third state, max_exp_avg_sq"):
        open_source(tmp_path / "universal", plan.shape)


# ---- a user's own pipeline

LAYERS: dict[str, dict[str, Any]] = {
    "tied": {
        "tied": True,
        "settings": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        "ranks": 2,
        "tensor": 1,
    },
    "untied": {"tied": False, "settings": {"zero_optimization": {"stage": 1}}, "ranks": 4, "tensor": 1},
    "no-zero": {"tied": False, "settings": {}, "ranks": 2, "tensor": 1},
    "three-axes": {
        "tied": False,
        "settings": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
        "ranks": 4,
        "tensor": 2,
    },
}


@pytest.mark.parametrize("name", ["tied"])
def test_read_pipeline_of_layers(name: str, pool: RankPool, tmp_path: Path) -> None:
    check_layers(name, pool, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"tied"}))
def test_read_all_pipelines_of_layers(name: str, pool: RankPool, tmp_path: Path) -> None:
    check_layers(name, pool, tmp_path)


def check_layers(name: str, pool: RankPool, folder: Path) -> None:
    case = LAYERS[name]
    plan = tiny_plan("llama", **EVEN, model__num_hidden_layers=3, model__tie_word_embeddings=case["tied"])
    saved_state = pool.run(
        layers.save_layers, plan, folder, case["settings"], case["tensor"], ranks=case["ranks"]
    )[0]
    source = open_source(folder, plan.shape)
    assert not differing(read_like(source, saved_state), saved_state)
    assert source.catalog.tensors.keys() == saved_state.keys()
    compare_copies(source)
