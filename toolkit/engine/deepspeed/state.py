"""Read state from DeepSpeed's partitions and load it back, so that all copies of the weights agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolkit.checkpoint.scalars import LOSS_SCALER, SCALER_STATE
from toolkit.checkpoint.shard import WEIGHT, Shard, StateReader
from toolkit.engine.deepspeed.partitions import ZeroPartition
from toolkit.engine.optimizers import (
    has_optimizer_state,
    master_or_weight_key,
    number_scalars,
    numbers_of,
    restore_group_numbers,
    whole_state_tensors,
)
from toolkit.optimizers.base import STEP
from toolkit.optimizers.torch_state import Number, create_state, restore_number, state_tensors


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside DeepSpeed's wrapper; stage 0 has no wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def shards(optimizer: Any, partitions: Sequence[ZeroPartition]) -> list[Shard]:
    """Shards of all state to save: views, except for state on NVMe, which is copied to host memory."""
    collected: list[Shard] = []
    for partition in partitions:
        on_nvme = _on_nvme(optimizer, partition)
        if on_nvme:
            optimizer._optimizer_states_and_gradient_swap_in(partition.number)
        local = [*partition.weights(partition.master)]
        state = inner_optimizer(optimizer).state.get(partition.master, {})
        for name, tensor in state_tensors(partition.states, state):
            local += partition.shards(name, tensor)
        if on_nvme:
            local = [
                Shard(s.key, s.global_shape, s.box, s.data.clone(), s.replica, s.replicas) for s in local
            ]
            optimizer._release_swap_buffers(partition.number)
        collected += local
    return collected


def scalars(optimizer: Any, partitions: Sequence[ZeroPartition], averaged: int) -> dict[str, object]:
    """State that is not a tensor, in JSON types; equal on all ranks.

    Args:
        averaged: the ranks that DeepSpeed averages over; its loss scale is the run's divided by this number.
    """
    values: dict[str, object] = {}
    inner = inner_optimizer(optimizer)
    pairs = [(partition.states, inner.state.get(partition.master, {})) for partition in partitions]
    values |= number_scalars(pairs, inner.param_groups)
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        values[LOSS_SCALER] = {
            **{name: getattr(scaler, name) for name in SCALER_STATE},
            "cur_scale": scaler.cur_scale * averaged,
        }
    return values


@torch.no_grad()
def load(optimizer: Any, partitions: Sequence[ZeroPartition], reader: StateReader, averaged: int) -> None:
    """Load masters, moments, step counts and the loss scaler. Call :func:`update_weights` next.

    Raises:
        CheckpointError: the reader lacks a weight, or has the state of another optimizer.
    """
    with_moments = has_optimizer_state(reader, (partition.states for partition in partitions))
    inner, numbers = inner_optimizer(optimizer), numbers_of(reader) if with_moments else {}
    direct: list[Shard] = []
    for partition in partitions:
        if _on_nvme(optimizer, partition):
            _load_nvme(optimizer, partition, reader, numbers, with_moments=with_moments)
            continue
        partition.master.zero_()  # the padding is uninitialized
        direct += _master_targets(partition, reader)
        state = _create_state(inner, partition, reader, numbers, with_moments=with_moments)
        if with_moments:
            for name, tensor in state_tensors(partition.states, state):
                direct += partition.shards(name, tensor)
    restore_group_numbers(inner, partitions[0].states, numbers)
    reader.read(direct)
    saved, scaler = reader.scalars.get(LOSS_SCALER), getattr(optimizer, "loss_scaler", None)
    if isinstance(saved, dict) and scaler is not None and scaler.dynamic:
        for name in SCALER_STATE:
            setattr(scaler, name, saved[name])
        scaler.cur_scale /= averaged


@torch.no_grad()
def update_weights(optimizer: Any, partitions: Sequence[ZeroPartition]) -> None:
    """Copy the masters to the weights, as DeepSpeed does after a step. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for partition in partitions:
            if not _on_nvme(optimizer, partition):
                optimizer._reassign_or_swap_out_partitioned_parameters(partition.number)
        gather_persistent_parameters(optimizer)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


def partition_parameters(optimizer: Any) -> None:
    """Free every parameter that ZeRO 3 has gathered or is gathering. Collective."""
    optimizer._partition_all_parameters()


def gather_persistent_parameters(optimizer: Any) -> None:
    """Gather the small parameters that ZeRO 3 keeps gathered between steps. Collective."""
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _master_targets(partition: ZeroPartition, reader: StateReader) -> list[Shard]:
    """Return the shards of the partition's master under the keys that a checkpoint has them under."""
    return [
        Shard(master_or_weight_key(reader, s.key.name), s.global_shape, s.box, s.data, s.replica, s.replicas)
        for s in partition.shards(WEIGHT, partition.master)
    ]


def _create_state(
    inner: Any,
    partition: ZeroPartition,
    reader: StateReader,
    numbers: Mapping[str, Number],
    *,
    with_moments: bool,
) -> dict[str, Any]:
    """Create zeroed state as the optimizer would in its first step.

    Without moments to load nothing is created.
    """
    states, group, master = partition.states, partition.group, partition.master
    if states.examples is not None or states.whole:
        inner.state.pop(master, None)
        if with_moments:
            whole = {}
            if states.whole:  # without ZeRO, so the partition is one parameter
                whole = whole_state_tensors(reader, states, partition.ranges[0].parameter_box.name)
            inner.state[master] = {
                **create_state(states, inner, group, master, numbers),
                **{state: tensor.to(master.device) for state, tensor in whole.items()},
            }
        return inner.state.get(master, {})
    state = inner.state[master] if with_moments or master in inner.state else {}
    for name in states.tensors:
        if state.get(name) is not None:
            state[name].zero_()
        elif with_moments:
            size = sum(flat_range.numel for flat_range in partition.whole) if partition.whole else None
            like = torch.zeros_like(master, requires_grad=False, dtype=torch.float32)
            state[name] = like if size is None else like.new_zeros(size)
    if STEP in states.numbers and (with_moments or STEP in state):
        if not group.get("use_muon") and getattr(inner, "aux_optimizer", None) is not None:
            inner = inner.aux_optimizer  # the Adam inside Muon
        state[STEP] = restore_number(inner, group, master, numbers.get(STEP, 0))
    return state


def _on_nvme(optimizer: Any, partition: ZeroPartition) -> bool:
    swappable = getattr(optimizer, "_swappable_optimizer_subgroup", None)
    return swappable is not None and swappable(partition.number)


def _load_nvme(
    optimizer: Any,
    partition: ZeroPartition,
    reader: StateReader,
    numbers: Mapping[str, Number],
    *,
    with_moments: bool,
) -> None:
    """Load a partition on NVMe, which has memory only between swap-in and swap-out."""
    optimizer._optimizer_states_and_gradient_swap_in(partition.number)
    partition.master.zero_()
    targets = _master_targets(partition, reader)
    state = _create_state(inner_optimizer(optimizer), partition, reader, numbers, with_moments=with_moments)
    if with_moments:
        for name, tensor in state_tensors(partition.states, state):
            targets += partition.shards(name, tensor)
    reader.read(targets)
    optimizer._reassign_or_swap_out_partitioned_parameters(partition.number)
    optimizer._optimizer_states_and_gradient_swap_out(partition.number)
