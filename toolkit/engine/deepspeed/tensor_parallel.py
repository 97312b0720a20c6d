"""Tensor parallelism with DeepSpeed's AutoTP, applied on the meta device.

``deepspeed.initialize`` would shard weights that every rank stores whole; sharding on meta avoids that
memory. The plan's ``tensor_parallel.partition_config`` defines how layers are sharded: query, key, value,
gate and up projections by rows of their weight (the output), projections into the residual stream by columns
(the input), an untied output layer by the vocabulary with gathered logits. All other parameters are
replicated with equal gradients; for a norm inside the heads (qwen3), DeepSpeed's hook sums the gradients of
each rank's heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.models.loss_head import ShardedOutputLayer


def apply_tensor_parallel(module: nn.Module, settings: Mapping[str, Any]) -> Callable[[], None]:
    """Replace linear layers of ``module``, whose parameters are on meta, by DeepSpeed's parallel layers.

    Creates DeepSpeed's tensor and data groups; tensor ranks are neighbours, as in ``layout/axes.py``. Call
    the returned function once the parameters have memory.
    """
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.utils import groups

    config = TPTrainingConfig(**settings["tensor_parallel"])
    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(config.autotp_size)
    auto = AutoTP(
        module=module,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=config.get_partition_config_object(),
        model_config=module.config,
        training_mode=True,
    )
    auto.set_tensor_parallel_config(config.autotp_size, groups.get_tensor_model_parallel_group())
    auto.update_linear_policies()
    auto._replace_module(module)
    _use_functional_linear(module)
    module.ds_autotp_parsed = True  # type: ignore[assignment]  # so that ``deepspeed.initialize`` skips it
    return lambda: auto.register_replicated_grad_hooks(module)


def _use_functional_linear(module: nn.Module) -> None:
    """Let parallel layers compute ``functional.linear``, so that ZeRO 3 can free gathered weights.

    DeepSpeed's layers multiply by ``weight.transpose``, a view that autograd keeps for backward, so every
    gathered weight would stay in memory. ``functional.linear``, which ZeRO 3 replaces, keeps the parameter
    instead.
    """
    from deepspeed.module_inject.layers import (
        ColumnParallel,
        GatherFromTensorParallelRegion,
        LinearAllreduce,
        LinearLayer,
        RowParallel,
    )

    def column(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        output = functional.linear(ColumnParallel.apply(layer.mp_group, hidden), layer.weight, layer.bias)
        return (
            GatherFromTensorParallelRegion.apply(layer.mp_group, output, layer._partition_sizes)
            if layer.gather_output
            else output
        )

    def row(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        assert layer.bias is None, "row-parallel projections of the families have no bias"
        return RowParallel.apply(layer.mp_group, functional.linear(hidden, layer.weight), False)

    # Methods rather than partial functions, of which torch.compile would compile one graph each.
    for layer in module.modules():
        if isinstance(layer, LinearLayer):
            layer.forward = MethodType(column, layer)
        elif isinstance(layer, LinearAllreduce):
            layer.forward = MethodType(row, layer)


def output_layer(module: Any) -> ShardedOutputLayer | None:
    """Return the output layer if AutoTP has split its vocabulary; None if every rank stores all of it."""
    from deepspeed.module_inject.layers import ColumnParallel, LinearLayer

    head = module.get_output_embeddings()
    if not isinstance(head, LinearLayer):
        return None
    return ShardedOutputLayer(head.mp_group, partial(ColumnParallel.apply, head.mp_group))


def data_group() -> Any:
    """Return the ranks with the same shards of the weights, over which ZeRO 3 partitions."""
    from deepspeed.utils import groups

    return groups.get_data_parallel_group()
