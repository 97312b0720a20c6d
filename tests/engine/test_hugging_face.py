"""Models of transformers without a family: ZeRO 0 to 3 compared with the local engine, and resuming.

pytest tests/engine/test_hugging_face.py             phi3
pytest tests/engine/test_hugging_face.py -m full     every architecture with ZeRO 3 and another stage
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.cases import CHECKPOINTING, Cell, quick
from tests.engine.checks import check_cell, duplicating, far
from tests.engine.resuming import Saved, check_pairs
from toolkit.config.model import HuggingFaceConfig
from toolkit.config.schema import EngineName
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.tiny import LENGTH, MICRO_BATCH, VOCABULARY, tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Fused projections and tied embeddings; norms after blocks, caps of scores and logits; parallel blocks with
# biases; ALiBi; state space; experts with shared ones, whose biases are buffers of the state dict.
CAUSAL: dict[str, dict[str, Any]] = {
    "phi3": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "gpt_neox": SIZES,
    "bloom": {
        **{name: value for name, value in SIZES.items() if name not in ("intermediate_size",)},
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "mamba": {
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "state_size": 8,
    },
    "deepseek_v3": {
        **SIZES,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}


@dataclass(frozen=True)
class HuggingFaceCell(Cell):
    """A cell of ``model.hf``."""

    family: str | None = None
    model_type: str = "phi3"

    def __str__(self) -> str:
        return super().__str__().replace("target", self.model_type)

    def plan(self) -> RunPlan:
        return make_plan(
            tiny_config(
                None,
                engine__name=EngineName.local if self.stage is None else EngineName.deepspeed,
                zero__stage=self.stage or 0,
                train__global_batch=self.data * MICRO_BATCH * self.accumulation,
                model__hf=HuggingFaceConfig(
                    architecture="AutoModelForCausalLM",
                    model_type=self.model_type,
                    config=dict(CAUSAL[self.model_type]),
                ),
                **dict(self.more),
            ),
            self.world(),
        )


def cell(stage: int | None, model_type: str = "phi3", ranks: int = 2, **more: Any) -> Cell:
    return HuggingFaceCell(stage, ranks, 4 // ranks, None, tuple(more.items()), model_type)


CELLS: list[Cell] = [cell(2), *(cell(3, model_type) for model_type in CAUSAL)]
CELLS += [cell(number % 3, model_type) for number, model_type in enumerate(CAUSAL) if number]
CELLS.append(cell(3, **CHECKPOINTING))


@pytest.mark.parametrize("case", quick(CELLS, 1), ids=str)
def test_zero_matches_local(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


def test_duplicated_samples_are_detected(pool: RankPool) -> None:
    far(pool.run(duplicating, cell(2), ranks=2)[0], cell(2))


LAYOUTS = [cell(None, ranks=1), cell(3), cell(2)]


@pytest.mark.parametrize("target", quick(LAYOUTS, 1), ids=str)
def test_resume_in_another_layout(target: Cell, saved: Saved, pool: RankPool) -> None:
    """phi3, whose embedding is tied to its output layer."""
    check_pairs(target, [LAYOUTS[0], LAYOUTS[2]], saved, pool)
