"""The plan for Megatron-core 0.16: arguments of its dataclasses, in plain types.

There are three layers: tunable defaults, the user's ``engine.megatron`` keys, and keys that the plan derives.
Rules refuse user keys that the plan derives, so the last layer never overrides a user's value. Callables and
dtypes are given by name; ``engine/megatron/model.py`` replaces them by objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.engine_keys_megatron import megatron_keys
from toolkit.config.schema import OptimizerName, Precision, RunConfig
from toolkit.families import get_family
from toolkit.families.base import ModelShape
from toolkit.layout.axes import Axes
from toolkit.plan.types import Device, World

DTYPES = {Precision.fp32: "float32", Precision.bf16: "bfloat16", Precision.fp16: "float16"}
# Arguments of GPTModel rather than fields of TransformerConfig.
GPT_MODEL_ARGUMENTS = ("position_embedding_type", "rotary_base")


def build_settings(
    config: RunConfig, world: World, axes: Axes, shape: ModelShape
) -> dict[str, dict[str, Any]]:
    """Sections ``transformer``, ``ddp``, ``optimizer`` (fields of TransformerConfig,
    DistributedDataParallelConfig and OptimizerConfig) and ``model`` (arguments of GPTModel).
    """
    transformer, ddp, optimizer = megatron_keys(config)
    family = get_family(shape.family).megatron_config(shape)
    return {
        "transformer": {
            **_transformer_defaults(config),
            **transformer,
            **_transformer(config, axes, shape, family),
        },
        "ddp": {**_ddp_defaults(config, world), **ddp, **_ddp(config)},
        "optimizer": {**optimizer, **_optimizer(config, {**_ddp_defaults(config, world), **ddp})},
        "model": _model(axes, shape, family),
    }


def padded_vocabulary(size: int, tensor: int) -> int:
    """Rows of the embedding, padded to a multiple of ``tensor``.

    Padded rows are zero, and masked in the logits.
    """
    return -(-size // tensor) * tensor


def sequence_parallel(config: RunConfig) -> bool:
    """Whether tensor ranks share norms and dropout along the sequence (Korthikanti et al., 2205.05198).

    This needs less memory for the same communication, so it is the default if the sequence is divisible.
    """
    tensor = config.parallel.tensor
    local = config.train.sequence_length // config.parallel.context
    return bool(config.engine.megatron.get("sequence_parallel", tensor > 1 and local % tensor == 0))


def virtual_stages(config: RunConfig) -> int:
    """Model chunks per pipeline rank (Narayanan et al., 2104.04473, section 2.2)."""
    return int(config.engine.megatron.get("virtual_pipeline_model_parallel_size") or 1)


def _transformer_defaults(config: RunConfig) -> dict[str, Any]:
    """Keys that the user may override."""
    found: dict[str, Any] = {"sequence_parallel": sequence_parallel(config)}
    if config.parallel.expert > 1:
        found["moe_token_dispatcher_type"] = "alltoall"
    if config.train.activation_checkpointing:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return found


def _transformer(
    config: RunConfig, axes: Axes, shape: ModelShape, family: Mapping[str, Any]
) -> dict[str, Any]:
    precision = config.precision.name
    found: dict[str, Any] = {
        **{key: value for key, value in family.items() if key not in GPT_MODEL_ARGUMENTS},
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "tensor_model_parallel_size": axes.tensor,
        "pipeline_model_parallel_size": axes.pipeline,
        "context_parallel_size": axes.context,
        "expert_model_parallel_size": axes.expert,
        "params_dtype": DTYPES[precision],
        "pipeline_dtype": DTYPES[precision],
        "bf16": precision is Precision.bf16,
        "fp16": precision is Precision.fp16,
        "calculate_per_token_loss": False,
    }
    if virtual_stages(config) > 1:
        # With two stages, batched messages of two chunks between the same pair of ranks silently give wrong
        # results.
        found |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return found


def _ddp_defaults(config: RunConfig, world: World) -> dict[str, Any]:
    """Overlap communication with computation on devices that can do both at once."""
    sharded = config.zero.stage > 0
    overlaps = world.device is Device.CUDA
    return {"overlap_grad_reduce": overlaps, "overlap_param_gather": overlaps and sharded}


def _ddp(config: RunConfig) -> dict[str, Any]:
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.zero.stage > 0,
        "average_in_collective": False,
    }


def _optimizer(config: RunConfig, ddp: Mapping[str, Any]) -> dict[str, Any]:
    optim, precision = config.optim, config.precision.name
    found: dict[str, Any] = {
        "optimizer": "sgd" if optim.name is OptimizerName.sgd else "adam",
        "lr": optim.lr,
        "min_lr": 0.0,  # the loop sets the learning rate
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip,
        "use_distributed_optimizer": config.zero.stage > 0,
        "overlap_param_gather": ddp["overlap_param_gather"],
        "params_dtype": DTYPES[precision],
        "bf16": precision is Precision.bf16,
        "fp16": precision is Precision.fp16,
    }
    if optim.name is OptimizerName.sgd:
        return {**found, "sgd_momentum": optim.momentum}
    return {**found, "adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1], "adam_eps": optim.eps}


def _model(axes: Axes, shape: ModelShape, family: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": padded_vocabulary(shape.vocab_size, axes.tensor),
        "max_sequence_length": shape.max_position_embeddings,
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
        **{key: family[key] for key in GPT_MODEL_ARGUMENTS},
    }
