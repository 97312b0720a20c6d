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
from typing import Any

import torch
from torch import nn
from torch.nn import functional


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
        found = functional.linear(ColumnParallel.apply(layer.mp_group, hidden), layer.weight, layer.bias)
        return (
            GatherFromTensorParallelRegion.apply(layer.mp_group, found, layer._partition_sizes)
            if layer.gather_output
            else found
        )

    def row(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        assert layer.bias is None, "row-parallel projections of the families have no bias"
        return RowParallel.apply(layer.mp_group, functional.linear(hidden, layer.weight), False)

    for layer in module.modules():
        if isinstance(layer, LinearLayer):
            layer.forward = partial(column, layer)
        elif isinstance(layer, LinearAllreduce):
            layer.forward = partial(row, layer)


def data_group() -> Any:
    """The ranks with the same shards of the weights, over which ZeRO 3 partitions."""
    from deepspeed.utils import groups

    return groups.get_data_parallel_group()
