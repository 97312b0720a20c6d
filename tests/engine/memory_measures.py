"""Measure the memory of DeepSpeed engines by the storages of their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.engine.deepspeed.state import inner_optimizer

# 1.6 M parameters; in smaller models padding and unsharded parameters would dominate.
SIZES = {
    "model__hidden_size": 128,
    "model__intermediate_size": 352,
    "model__num_hidden_layers": 6,
    "model__vocab_size": 1501,
}


@dataclass
class Bytes:
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of state_tensors distinct storage by address."""
    found = {}
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.numel():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found


def weights(engine: DeepSpeedEngine) -> dict[int, int]:
    parameters = list(engine._ds.module.parameters())
    return storages([*(p.data for p in parameters), *(getattr(p, "ds_tensor", None) for p in parameters)])


def gradients(engine: DeepSpeedEngine) -> dict[int, int]:
    optimizer: Any = engine._ds.optimizer
    tensors: list[Any] = []
    for parameter in engine._ds.module.parameters():
        tensors += [parameter.grad, getattr(parameter, "grad_accum", None)]
    for lists in ("averaged_gradients", "all_grad_tensors"):
        tensors += [
            gradient for some in (getattr(optimizer, lists, None) or {}).values() for gradient in some or ()
        ]
    tensors += [
        getattr(optimizer, "grad_partitions_flat_buffer", None),
        *getattr(optimizer, "fp32_groups_gradients_flat", ()),
    ]
    # Gradients that are being reduced are in buckets, which count as buffers.
    buckets = storages(
        buffer
        for bucket in getattr(optimizer, "ipg_buckets", {}).values()
        for buffer in (bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer])
    )
    return {address: size for address, size in storages(tensors).items() if address not in buckets}


def states(engine: DeepSpeedEngine) -> dict[int, int]:
    """Master weights and the optimizer's tensors of parameter shape; in stage 0 masters are weights."""
    state_tensors = [
        tensor for state in inner_optimizer(engine._ds.optimizer).state.values() for tensor in state.values()
    ]
    tensors = [
        tensor for tensor in state_tensors if torch.is_tensor(tensor) and tensor.dim()
    ]  # not the step count
    tensors += [partition.master for partition in engine._partitions()]
    return storages(tensors)
