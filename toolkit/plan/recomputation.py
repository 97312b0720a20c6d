"""Megatron-core's keys for ``train.activation_checkpointing``, or those that the user sets instead."""

from __future__ import annotations

from typing import Any

from toolkit.config.schema import RunConfig
from toolkit.families.base import ModelShape
from toolkit.plan.pipeline_stages import stage_layers


def recomputation_keys(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the keys ``recompute_*`` of Megatron-core's ``TransformerConfig``; empty if nothing is
    recomputed.

    ``full`` checkpoints the blocks one by one. For every N-th block, Megatron-core's method ``block``
    recomputes as many, but the first ones of each stage: one number serves all stages and virtual stages.
    ``selective`` recomputes the norms. The default of Megatron-core, ``core_attn``, is not among them: fused
    attention stores nothing but its inputs, its output, which the projection after it needs as well, and one
    number per row.
    """
    recomputation, given = config.train.recomputation, config.engine.megatron
    if recomputation.full and recomputation.every == 1:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recomputation.full:
        virtual = int(given.get("virtual_pipeline_model_parallel_size") or 1)
        longest = max(stage_layers(shape, config.parallel.pipeline, given)) // virtual
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": -(-longest // recomputation.every),
        }
    if recomputation.selective:
        return {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    return {name: value for name, value in given.items() if name.startswith("recompute_")}
