"""Functions of the ranks in Megatron-core tests: train and save, load with Megatron-core's loader,
continue."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.vendors import vendor_load_megatron, vendor_save_megatron
from tests.engine.cases import WithoutMoments
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.shard import TensorKey
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import StepResult
from toolkit.plan.types import RunPlan
from toolkit.testing.parity import gather_tensors, train_steps
from toolkit.train.task import text_task

STOP, MORE = 4, 6
SAMPLES = 32  # consumed samples in Megatron-LM's arguments

State = dict[TensorKey, torch.Tensor]


@dataclass(frozen=True)
class RankOutcome:
    """Rank 0's state, and the steps that follow."""

    state: State
    scalars: dict[str, object]
    results: list[StepResult]


def train(
    rank: int, ranks: int, plan: RunPlan, folder: Path, settings: dict[str, Any], with_args: bool = False
) -> RankOutcome:
    """``STOP`` steps and Megatron-core's checkpoint, then ``MORE`` uninterrupted steps."""
    engine: Any = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    train_steps(engine, plan, range(STOP), rank=rank)
    more: dict[str, Any] = {"args": arguments(plan)} if with_args else {}
    vendor_save_megatron(engine, folder, STOP, **settings, **more)
    state, scalars = gather_tensors(engine.shards(), rank, ranks), engine.scalars()
    results = train_steps(engine, plan, range(STOP, STOP + MORE), rank=rank)
    engine.close()
    return RankOutcome(state, scalars, results)


def continue_with_vendor(rank: int, ranks: int, plan: RunPlan, folder: Path) -> RankOutcome:
    """Load ``folder`` with Megatron-core, then train ``MORE`` steps."""
    engine: Any = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    vendor_load_megatron(engine, folder)
    return _continue_training(engine, rank, ranks, plan)


def resume(rank: int, ranks: int, plan: RunPlan, folder: Path, forget: bool = False) -> RankOutcome:
    """Load ``folder`` with this toolkit's reader, in any engine, then train ``MORE`` steps."""
    reader = open_reader(folder, model=plan.shape)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(WithoutMoments(reader) if forget else reader)
    return _continue_training(engine, rank, ranks, plan)


def _continue_training(engine: Any, rank: int, ranks: int, plan: RunPlan) -> RankOutcome:
    state, scalars = gather_tensors(engine.shards(), rank, ranks), engine.scalars()
    results = train_steps(engine, plan, range(STOP, STOP + MORE), rank=rank)
    engine.close()
    return RankOutcome(state, scalars, results)


def arguments(plan: RunPlan) -> Namespace:
    """Return Megatron-LM's arguments that describe the model."""
    shape = plan.shape
    assert shape is not None
    assert plan.megatron is not None
    config = plan.megatron["transformer"]
    same = (
        "normalization",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "attention_dropout",
        "hidden_dropout",
    )
    return Namespace(
        **{name: config[name] for name in same},
        swiglu=config["gated_linear_unit"],
        group_query_attention=True,
        num_experts=config.get("num_moe_experts"),
        moe_router_topk=config.get("moe_router_topk", 2),
        moe_aux_loss_coeff=0.0,
        moe_ffn_hidden_size=config.get("moe_ffn_hidden_size"),
        vocab_size=shape.vocab_size,
        padded_vocab_size=plan.megatron["model"]["vocab_size"],
        max_position_embeddings=shape.max_position_embeddings,
        untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
        norm_epsilon=shape.norm_eps,
        position_embedding_type=plan.megatron["model"]["position_embedding_type"],
        rotary_base=shape.rope_theta,
        init_method_std=shape.initializer_range,
        consumed_train_samples=SAMPLES,
        params_dtype=torch.float32,
    )
