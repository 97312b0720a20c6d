"""State out of DeepSpeed's partitions and back into them, after which weights of every precision and place agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIMIZER_STEP, SCALER_STATE
from toolkit.checkpoint.shard import WEIGHT, Shard, StateReader
from toolkit.engine.deepspeed.state import Partition
from toolkit.engine.resume import resumes, weight_key


def base(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's wrapper; in stage 0 there is no wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def shards(optimizer: Any, partitions: Sequence[Partition]) -> list[Shard]:
    """Everything to save. Views, except of what lives on NVMe, which is copied to host memory."""
    found: list[Shard] = []
    for partition in partitions:
        on_nvme = _on_nvme(optimizer, partition)
        if on_nvme:
            optimizer._optimizer_states_and_gradient_swap_in(partition.number)
        held = [*partition.weights(partition.master)]
        state = base(optimizer).state.get(partition.master, {})
        for name in partition.moments:
            if state.get(name) is not None:  # optimizers make their state in their first step
                held += partition.shards(name, state[name])
        if on_nvme:
            held = [Shard(s.key, s.global_shape, s.box, s.data.clone(), s.replica, s.replicas) for s in held]
            optimizer._release_swap_buffers(partition.number)
        found += held
    return found


def scalars(optimizer: Any, partitions: Sequence[Partition], averaged: int) -> dict[str, object]:
    """Plain JSON types; equal on all ranks. ``averaged``: by how much DeepSpeed's loss scale is smaller than the run's."""
    found: dict[str, object] = {}
    steps = {
        int(state["step"]) for p in partitions if "step" in (state := base(optimizer).state.get(p.master, {}))
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
def load(optimizer: Any, partitions: Sequence[Partition], reader: StateReader, averaged: int) -> None:
    """Fill masters, moments, step counts and the loss scaler; ``publish`` then makes the other copies of weights follow. ``averaged``
    as in :func:`scalars`.

    Raises:
        CheckpointError: the reader lacks a weight, or has another optimizer's state.
    """
    with_moments = resumes(reader, {name for partition in partitions for name in partition.moments})
    step = reader.scalars.get(OPTIMIZER_STEP, 0) if with_moments else 0
    assert isinstance(step, int)
    direct: list[Shard] = []
    for partition in partitions:
        if _on_nvme(optimizer, partition):
            _load_nvme(optimizer, partition, reader, with_moments=with_moments, step=step)
            continue
        partition.master.zero_()  # padding too: it was never initialised
        direct += _masters(partition, reader)
        state = _materialise(base(optimizer), partition, step=step, with_moments=with_moments)
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
def publish(optimizer: Any, partitions: Sequence[Partition]) -> None:
    """From the masters to every copy of the weights, as DeepSpeed does after a step. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for partition in partitions:
            if not _on_nvme(optimizer, partition):
                optimizer._reassign_or_swap_out_partitioned_parameters(partition.number)
        _gather_persistent(optimizer)
    elif hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()


def release(optimizer: Any) -> None:
    """Free every parameter that ZeRO 3 holds gathered or has in flight. Collective."""
    optimizer._partition_all_parameters()


def regather(optimizer: Any) -> None:
    """After :func:`release`, bring back the small parameters that ZeRO 3 keeps gathered between steps. Collective."""
    _gather_persistent(optimizer)


def _gather_persistent(optimizer: Any) -> None:
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _masters(partition: Partition, reader: StateReader) -> list[Shard]:
    """The partition's master as targets of a read."""
    found = partition.shards(WEIGHT, partition.master)
    return [
        Shard(weight_key(reader, s.key.name), s.global_shape, s.box, s.data, s.replica, s.replicas)
        for s in found
    ]


def _materialise(inner: Any, partition: Partition, *, step: int, with_moments: bool) -> dict[str, Any]:
    """The state that the optimizer would make in its first step, zeroed. Nothing is made where nothing is resumed."""
    state = inner.state[partition.master] if with_moments or partition.master in inner.state else {}
    for name in partition.moments:
        if state.get(name) is not None:
            state[name].zero_()
        elif with_moments:
            size = sum(piece.numel for piece in partition.whole) if partition.whole else None
            like = torch.zeros_like(partition.master, requires_grad=False, dtype=torch.float32)
            state[name] = like if size is None else like.new_zeros(size)
    if "betas" in partition.group and (with_moments or "step" in state):
        state["step"] = _step_count(inner, partition, step)
    return state


def _step_count(inner: Any, partition: Partition, step: int) -> object:
    """torch's optimizers count in a tensor (each its own: a shared one would be advanced once a parameter), DeepSpeed's in an int."""
    acts = inner
    if not partition.group.get("use_muon") and getattr(inner, "aux_optimizer", None) is not None:
        acts = inner.aux_optimizer  # Muon's matrices apart, an Adam inside it does the work
    if not type(acts).__module__.startswith("torch."):
        return step
    on_device = partition.group.get("capturable") or partition.group.get("fused")
    return torch.tensor(float(step), device=partition.master.device if on_device else "cpu")


def _on_nvme(optimizer: Any, partition: Partition) -> bool:
    swappable = getattr(optimizer, "_swappable_optimizer_subgroup", None)
    return swappable is not None and swappable(partition.number)


def _load_nvme(
    optimizer: Any, partition: Partition, reader: StateReader, *, with_moments: bool, step: int
) -> None:
    """As the rest, but the partition has elements only between the swap in and the swap out."""
    optimizer._optimizer_states_and_gradient_swap_in(partition.number)
    partition.master.zero_()
    targets = _masters(partition, reader)
    state = _materialise(base(optimizer), partition, step=step, with_moments=with_moments)
    if with_moments:
        for name in partition.moments:
            targets += partition.shards(name, state[name])
    reader.read(targets)
    optimizer._reassign_or_swap_out_partitioned_parameters(partition.number)
    optimizer._optimizer_states_and_gradient_swap_out(partition.number)
