"""Read state from DeepSpeed's partitions and load it back, so that all copies of the weights agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIMIZER_STEP, SCALER_STATE
from toolkit.checkpoint.shard import WEIGHT, Reader, Shard
from toolkit.engine.deepspeed.partitions import ZeroPartition
from toolkit.engine.optimizers import has_optimizer_state, master_or_weight_key


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's wrapper; stage 0 has no wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def shards(optimizer: Any, partitions: Sequence[ZeroPartition]) -> list[Shard]:
    """Shards of all state to save: views, except for state on NVMe, which is copied to host memory."""
    found: list[Shard] = []
    for partition in partitions:
        on_nvme = _on_nvme(optimizer, partition)
        if on_nvme:
            optimizer._optimizer_states_and_gradient_swap_in(partition.number)
        local = [*partition.weights(partition.master)]
        state = inner_optimizer(optimizer).state.get(partition.master, {})
        for name in partition.moments:
            if state.get(name) is not None:  # optimizers create their state in their first step
                local += partition.shards(name, state[name])
        if on_nvme:
            local = [
                Shard(s.key, s.global_shape, s.box, s.data.clone(), s.replica, s.replicas) for s in local
            ]
            optimizer._release_swap_buffers(partition.number)
        found += local
    return found


def scalars(optimizer: Any, partitions: Sequence[ZeroPartition], averaged: int) -> dict[str, object]:
    """State that is not a tensor, in JSON types; equal on all ranks.

    Args:
        averaged: the ranks that DeepSpeed averages over; its loss scale is the run's divided by this number.
    """
    found: dict[str, object] = {}
    steps = {
        int(state["step"])
        for p in partitions
        if "step" in (state := inner_optimizer(optimizer).state.get(p.master, {}))
    }
    assert len(steps) <= 1, f"one optimizer, several step counts: {steps}"
    if steps:
        found[OPTIMIZER_STEP] = steps.pop()
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        found[LOSS_SCALER] = {
            **{name: getattr(scaler, name) for name in SCALER_STATE},
            "cur_scale": scaler.cur_scale * averaged,
        }
    return found


@torch.no_grad()
def load(optimizer: Any, partitions: Sequence[ZeroPartition], reader: Reader, averaged: int) -> None:
    """Load masters, moments, step counts and the loss scaler. Call :func:`update_weights` next.

    Raises:
        CheckpointError: the reader lacks a weight, or has the state of another optimizer.
    """
    with_moments = has_optimizer_state(
        reader, {name for partition in partitions for name in partition.moments}
    )
    step = reader.scalars.get(OPTIMIZER_STEP, 0) if with_moments else 0
    assert isinstance(step, int)
    direct: list[Shard] = []
    for partition in partitions:
        if _on_nvme(optimizer, partition):
            _load_nvme(optimizer, partition, reader, with_moments=with_moments, step=step)
            continue
        partition.master.zero_()  # the padding is uninitialized
        direct += _master_targets(partition, reader)
        state = _create_state(inner_optimizer(optimizer), partition, step=step, with_moments=with_moments)
        if with_moments:
            for name in partition.moments:
                direct += partition.shards(name, state[name])
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


def _master_targets(partition: ZeroPartition, reader: Reader) -> list[Shard]:
    """The shards of the partition's master under the keys that a checkpoint has them under."""
    found = partition.shards(WEIGHT, partition.master)
    return [
        Shard(master_or_weight_key(reader, s.key.name), s.global_shape, s.box, s.data, s.replica, s.replicas)
        for s in found
    ]


def _create_state(inner: Any, partition: ZeroPartition, *, step: int, with_moments: bool) -> dict[str, Any]:
    """Create zeroed state as the optimizer would in its first step.

    Without moments to load nothing is created.
    """
    state = inner.state[partition.master] if with_moments or partition.master in inner.state else {}
    for name in partition.moments:
        if state.get(name) is not None:
            state[name].zero_()
        elif with_moments:
            size = sum(flat_range.numel for flat_range in partition.whole) if partition.whole else None
            like = torch.zeros_like(partition.master, requires_grad=False, dtype=torch.float32)
            state[name] = like if size is None else like.new_zeros(size)
    if "betas" in partition.group and (with_moments or "step" in state):
        state["step"] = _step_count(inner, partition, step)
    return state


def _step_count(inner: Any, partition: ZeroPartition, step: int) -> object:
    """The step count of a parameter: a new tensor for torch's optimizers, an int for DeepSpeed's."""
    if not partition.group.get("use_muon") and getattr(inner, "aux_optimizer", None) is not None:
        inner = inner.aux_optimizer  # the Adam inside Muon
    if not type(inner).__module__.startswith("torch."):
        return step
    on_device = partition.group.get("capturable") or partition.group.get("fused")
    return torch.tensor(float(step), device=partition.master.device if on_device else "cpu")


def _on_nvme(optimizer: Any, partition: ZeroPartition) -> bool:
    swappable = getattr(optimizer, "_swappable_optimizer_subgroup", None)
    return swappable is not None and swappable(partition.number)


def _load_nvme(
    optimizer: Any, partition: ZeroPartition, reader: Reader, *, with_moments: bool, step: int
) -> None:
    """Load a partition on NVMe, which has memory only between swap-in and swap-out."""
    optimizer._optimizer_states_and_gradient_swap_in(partition.number)
    partition.master.zero_()
    targets = _master_targets(partition, reader)
    state = _create_state(inner_optimizer(optimizer), partition, step=step, with_moments=with_moments)
    if with_moments:
        for name in partition.moments:
            targets += partition.shards(name, state[name])
    reader.read(targets)
    optimizer._reassign_or_swap_out_partitioned_parameters(partition.number)
    optimizer._optimizer_states_and_gradient_swap_out(partition.number)
