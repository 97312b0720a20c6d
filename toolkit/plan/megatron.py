"""The plan for Megatron-core 0.16: arguments of its dataclasses, in plain types.

There are three layers: tunable defaults, the user's ``engine.megatron`` keys, and keys that the plan derives.
Rules refuse user keys that the plan derives, so the last layer never overrides a user's value. Callables and
dtypes are given by name; ``engine/megatron/model.py`` replaces them by objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.engine_keys_megatron import megatron_keys
from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.families import get_family
from toolkit.families.base import ModelShape
from toolkit.layout.axes import Axes
from toolkit.optimizers import get_optimizer
from toolkit.plan.devices import BLACKWELL, find_gpu
from toolkit.plan.recomputation import recomputation_keys
from toolkit.plan.transformer_engine import has_transformer_engine
from toolkit.plan.types import Device, World

DTYPES = {Precision.fp32: "float32", Precision.bf16: "bfloat16", Precision.fp16: "float16"}
# Arguments of GPTModel rather than fields of TransformerConfig.
GPT_MODEL_ARGUMENTS = ("position_embedding_type", "rotary_base")


def build_settings(
    config: RunConfig, world: World, axes: Axes, shape: ModelShape
) -> dict[str, dict[str, Any]]:
    """Return the sections ``transformer``, ``ddp``, ``optimizer`` (fields of TransformerConfig,
    DistributedDataParallelConfig and OptimizerConfig) and ``model`` (arguments of GPTModel).
    """
    transformer, ddp, optimizer = megatron_keys(config)
    family = get_family(shape.family).megatron_config(shape)
    return {
        "transformer": {
            **_transformer_defaults(config, shape),
            **(_gpu_defaults(config, world, family) if world.device is Device.CUDA else {}),
            **transformer,
            **_transformer(config, axes, shape, family),
        },
        "ddp": {**_ddp_defaults(config, world), **ddp, **_ddp(config)},
        "optimizer": {**optimizer, **_optimizer(config, {**_ddp_defaults(config, world), **ddp})},
        "model": _model(axes, shape, family),
    }


def padded_vocabulary(size: int, tensor: int) -> int:
    """Return the rows of the embedding, padded to a multiple of ``tensor``.

    Padded rows are zero, and masked in the logits.
    """
    return -(-size // tensor) * tensor


def sequence_parallel(config: RunConfig) -> bool:
    """Return whether tensor ranks share norms and dropout along the sequence (Korthikanti et al.,
    2205.05198).

    This needs less memory for the same communication, so it is the default if the sequence is divisible.
    """
    tensor = config.parallel.tensor
    local = config.train.sequence_length // config.parallel.context
    return bool(config.engine.megatron.get("sequence_parallel", tensor > 1 and local % tensor == 0))


def needs_single_cuda_queue(config: RunConfig, world: World) -> bool:
    """Return whether CUDA has to start kernels in the order of their calls
    (``CUDA_DEVICE_MAX_CONNECTIONS=1``).

    Tensor and context parallelism start a collective before the matrix multiplication that hides it. With
    several hardware queues the multiplication may occupy the GPU first
    (megatron/core/tensor_parallel/layers.py). The scripts of Megatron-LM refuse to start without the setting,
    except on Blackwell, which does not need it (megatron/training/arguments.py).
    """
    gpu = find_gpu(world.gpu)
    return (
        world.device is Device.CUDA
        and config.engine.name is EngineName.megatron
        and (config.parallel.tensor > 1 or config.parallel.context > 1)
        and (gpu is None or gpu.architecture is not BLACKWELL)
    )


def virtual_stages(config: RunConfig) -> int:
    """Model chunks per pipeline rank (Narayanan et al., 2104.04473, section 2.2)."""
    return int(config.engine.megatron.get("virtual_pipeline_model_parallel_size") or 1)


def _transformer_defaults(config: RunConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the keys that the user may override."""
    settings: dict[str, Any] = {"sequence_parallel": sequence_parallel(config)}
    if config.parallel.expert > 1:
        settings["moe_token_dispatcher_type"] = "alltoall"
    if config.precision.fp8:  # e4m3, gradients in e5m2; a scale for each tensor, from its current values
        settings |= {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    return settings | recomputation_keys(config, shape)


def _gpu_defaults(config: RunConfig, world: World, family: Mapping[str, Any]) -> dict[str, Any]:
    """Fused kernels and asynchronous messages, which the user may turn off.

    - ``torch.compile`` fuses the activation with its bias and gate, and the residual stream with bias and
      dropout (megatron/core/fusions), if the machine has what it needs.
    - Gradients of linear layers are added to the fp32 buffer within the matrix product: by Transformer Engine
      in its layers, else by ``bind_weight_gradient_kernels`` in engine/megatron/patches.py.
    - Transformer Engine fuses rotary embeddings and the permutation of tokens to experts, and computes the
      experts of a rank in one grouped product.
    - A batch of messages between stages needs no synchronisation of the device: the receiving stream waits
      for the message (``batch_p2p_sync`` protects older versions of torch). The sender frees its output.
    """
    compiles = not world.lacking_for_compile
    settings: dict[str, Any] = {
        "bias_activation_fusion": compiles and (family["gated_linear_unit"] or family["add_bias_linear"]),
        "bias_dropout_fusion": compiles,
        # In fp16 the kernel needs an Ampere GPU, and such runs are often on older ones.
        "gradient_accumulation_fusion": config.precision.name is not Precision.fp16,
    }
    if has_transformer_engine(world):
        settings["apply_rope_fusion"] = family["position_embedding_type"] == "rope"
        if family.get("num_moe_experts"):
            settings |= {"moe_grouped_gemm": True, "moe_permute_fusion": True}
    if config.parallel.pipeline > 1:
        settings |= {"batch_p2p_sync": False, "deallocate_pipeline_outputs": True}
    return settings


def _transformer(
    config: RunConfig, axes: Axes, shape: ModelShape, family: Mapping[str, Any]
) -> dict[str, Any]:
    precision = config.precision.name
    settings: dict[str, Any] = {
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
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return settings


def _ddp_defaults(config: RunConfig, world: World) -> dict[str, Any]:
    """Overlap communication with computation on devices that can do both at once.

    With virtual stages, all stages gather the parameters of a chunk at the same time: a stage that gathers
    later than its neighbours would delay them. Buckets keep Megatron-core's size: 40 M elements, or 1 M for
    each data rank if that is more.
    """
    overlaps = world.device is Device.CUDA
    gathers = overlaps and config.zero.stage > 0
    settings = {"overlap_grad_reduce": overlaps, "overlap_param_gather": gathers}
    if gathers and virtual_stages(config) > 1:
        settings["align_param_gather"] = bool(config.engine.megatron.get("overlap_param_gather", True))
    return settings


def _ddp(config: RunConfig) -> dict[str, Any]:
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.zero.stage > 0,
        "average_in_collective": False,
    }


def _optimizer(config: RunConfig, ddp: Mapping[str, Any]) -> dict[str, Any]:
    optim, precision = config.optim, config.precision.name
    spec = get_optimizer(optim.name)
    return {
        "lr": optim.lr,
        "min_lr": 0.0,  # the loop sets the learning rate
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.clip,
        "use_distributed_optimizer": config.zero.stage > 0,
        "overlap_param_gather": ddp["overlap_param_gather"],
        "params_dtype": DTYPES[precision],
        "bf16": precision is Precision.bf16,
        "fp16": precision is Precision.fp16,
        # A rule refuses the others; the rest of the plan is still made.
        **(spec.megatron(optim) if spec.not_on_megatron is None else {}),
    }


def _model(axes: Axes, shape: ModelShape, family: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": padded_vocabulary(shape.vocab_size, axes.tensor),
        "max_sequence_length": shape.max_position_embeddings,
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
        **{key: family[key] for key in GPT_MODEL_ARGUMENTS},
    }
