"""The tensor axis: DeepSpeed's AutoTP, on a model that has no memory yet.

``deepspeed.initialize`` would cut weights that every rank holds whole. Cut on the meta device, a rank never holds more than its
share. Which linear layers are cut, and how, stands in the plan's ``tensor_parallel.partition_config``: queries, keys, values, gate
and up by rows of their weight (the output), the projections into the residual stream by its columns (the input), an untied output
layer by the vocabulary with its logits gathered. Everything else is on all tensor ranks, with equal gradients: a norm inside the
heads (qwen3) gets a part of its gradient from each rank's heads, which DeepSpeed's hook adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def apply_tensor_parallel(module: nn.Module, settings: Mapping[str, Any]) -> Callable[[], None]:
    """Replace linear layers of ``module``, whose parameters are on meta, by DeepSpeed's parallel ones under the same names.

    Makes DeepSpeed's tensor and data groups: tensor ranks are neighbours, as in ``layout/axes.py``. The returned function is called
    once the parameters have memory.
    """
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.layers import set_autotp_mode
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.utils import groups

    wanted = TPTrainingConfig(**settings["tensor_parallel"])
    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(wanted.autotp_size)
    auto = AutoTP(
        module=module,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=wanted.get_partition_config_object(),
        model_config=module.config,
        training_mode=True,
    )
    auto.set_tensor_parallel_config(wanted.autotp_size, groups.get_tensor_model_parallel_group())
    auto.update_linear_policies()
    auto._replace_module(module)
    _use_functional_linear(module)
    module.ds_autotp_parsed = True  # type: ignore[assignment]  # ``deepspeed.initialize`` leaves it as it is
    return lambda: auto.register_replicated_grad_hooks(module)


def _use_functional_linear(module: nn.Module) -> None:
    """DeepSpeed's layers multiply by ``weight.transpose``, and autograd keeps that view for backward: under ZeRO 3 every gathered
    weight stays in memory until then (measured: all that are cut). ``functional.linear``, which ZeRO 3 replaces, keeps the parameter."""
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
        assert layer.bias is None, "no family's projection into the residual stream is cut and has a bias"
        return RowParallel.apply(layer.mp_group, functional.linear(hidden, layer.weight), False)

    for layer in module.modules():
        if isinstance(layer, LinearLayer):
            layer.forward = partial(column, layer)
        elif isinstance(layer, LinearAllreduce):
            layer.forward = partial(row, layer)


def data_group() -> Any:
    """The ranks that hold the same cut of the weights: what ZeRO 3 shards over."""
    from deepspeed.utils import groups

    return groups.get_data_parallel_group()
