"""Map Megatron-core's weights, masters and moments to shards of canonical tensors; all shards are views.

Optimizers store state in three ways. In fp32 the parameter is its own master; in 16 bits each parameter has
an fp32 copy; the distributed optimizer gives each data rank flat ranges of its buffers, hence a range of a
parameter's elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, Shard, TensorKey, flat_boxes
from toolkit.engine.optimizers import spec_of
from toolkit.families import get_family
from toolkit.families.megatron import (
    EMBEDDING,
    FUSED_NORMS,
    OUTPUT,
    LocalTensor,
    TensorCut,
    intersect_parts,
    local_tensor,
    tensors_by_name,
)
from toolkit.optimizers.torch_state import state_tensors
from toolkit.plan.types import RunPlan

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
# Transformer Engine's grouped linear layer has a parameter for each expert, shaped as in a layer of its own.
GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$")


@dataclass(frozen=True, slots=True)
class ReplicaIndex:
    """The index of this rank among the ``count`` ranks that store the same tensor."""

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """One parameter of this rank, its position in the model, and the ranks that also store it.

    Attributes:
        whole: replicas of its weight, and of its state without the distributed optimizer.
        ranges: replicas of a data rank's range of its state: the other data ranks have other ranges.
        mirror: the last stage's copy of a tied embedding, which the first stage saves.
        tied: a tied embedding or its mirror, in a pipeline.
        name: Megatron-core's name in a model with all axes 1.
        data_ranks, tensor_ranks: the ranks along these axes with the same data, including this one.
    """

    tensor: nn.Parameter
    local: LocalTensor
    whole: ReplicaIndex
    ranges: ReplicaIndex
    mirror: bool
    tied: bool
    name: str
    data_ranks: tuple[int, ...]
    tensor_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MasterParameter:
    """The tensor that the optimizer updates: a parameter's elements from ``start`` on, flat.

    ``inner`` is the torch optimizer (or a similar one) that has ``tensor`` in its ``group``.
    """

    parameter: LocalParameter
    tensor: torch.Tensor
    start: int
    inner: torch.optim.Optimizer
    group: dict[str, Any]
    ranged: bool  # by the distributed optimizer


class MegatronState:
    """The shards of one rank's model and optimizer."""

    def __init__(
        self, plan: RunPlan, chunks: Sequence[nn.Module], optimizer: Any, *, sixteen_bits: bool
    ) -> None:
        assert plan.shape is not None
        self._shapes = {spec.name: spec.shape for spec in plan.parameters}
        self._sixteen_bits = sixteen_bits
        self.states = spec_of(plan).states(plan.config.optim)
        self.parameters = list(_local_parameters(plan, chunks))
        self.masters = list(
            _master_parameters(optimizer, {parameter.tensor: parameter for parameter in self.parameters})
        )

    def weights(self) -> list[Shard]:
        return [
            shard
            for parameter in self.parameters
            for shard in self._shards(
                parameter, WEIGHT, parameter.tensor.detach().view(-1), 0, parameter.whole
            )
        ]

    def master_weights(self) -> list[Shard]:
        """Return the masters of runs in 16 bits; in fp32 the optimizer updates the weights themselves."""
        return (
            [shard for master in self.masters for shard in self._master_shards(master, MASTER, master.tensor)]
            if self._sixteen_bits
            else []
        )

    def moments(self) -> list[Shard]:
        """Optimizer state that exists: optimizers create it in their first step."""
        return [
            shard
            for master in self.masters
            for name, tensor in state_tensors(self.states, master.inner.state.get(master.tensor, {}))
            for shard in self._master_shards(master, name, tensor)
        ]

    def _master_shards(self, master: MasterParameter, state: str, tensor: torch.Tensor) -> Iterator[Shard]:
        replica = master.parameter.ranges if master.ranged else master.parameter.whole
        return self._shards(master.parameter, state, tensor.detach().view(-1), master.start, replica)

    def _shards(
        self, parameter: LocalParameter, state: str, flat: torch.Tensor, start: int, replica: ReplicaIndex
    ) -> Iterator[Shard]:
        """Yield the shards in ``flat``, the elements of the parameter's local tensor from ``start`` on."""
        at = 0
        for box in flat_boxes(parameter.local.shape, start, start + flat.numel()):
            data = flat[at : at + box.numel].view(box.shape)
            at += box.numel
            for part in intersect_parts(parameter.local.parts, box.offset, box.shape):
                yield Shard(
                    TensorKey(state, part.canonical),
                    self._shapes[part.canonical],
                    Box(part.offset, part.extent),
                    part.view(data),
                    replica.index,
                    replica.count,
                    mirror=parameter.mirror,
                )


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers in Megatron-core's chained one that have parameters: of experts, of the rest."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            yield part


def _local_parameters(plan: RunPlan, chunks: Sequence[nn.Module]) -> Iterator[LocalParameter]:
    assert plan.shape is not None
    assert plan.megatron is not None
    tensors = tensors_by_name(get_family(plan.shape.family).megatron_tensors(plan.shape))
    rows = plan.megatron["model"]["vocab_size"]
    tied = plan.axes.pipeline > 1 and OUTPUT in tensors and tensors[OUTPUT].name == EMBEDDING
    for chunk in chunks:
        for own, parameter in chunk.named_parameters():
            name = global_name(chunk, own)
            tensor = tensors[name]
            expert = tensor.expert is not None
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if expert
                else parallel_state.get_tensor_model_parallel_group()
            )
            local = local_tensor(
                tensor, group.rank(), group.size(), rows if tensor.cut is TensorCut.vocabulary else None
            )
            assert local.shape == tuple(parameter.shape), (
                f"{name}: Megatron-core has {tuple(parameter.shape)}, the map {local.shape}"
            )
            over_tensor = (
                ReplicaIndex(group.rank(), group.size())
                if tensor.cut is TensorCut.whole
                else ReplicaIndex(0, 1)
            )
            peers = _data_group(expert)
            whole = ReplicaIndex(
                over_tensor.index * peers.size() + peers.rank(), over_tensor.count * peers.size()
            )
            yield LocalParameter(
                parameter,
                local,
                whole,
                over_tensor,
                mirror=name == OUTPUT and tensor.name == EMBEDDING,
                tied=tied and tensor.name == EMBEDDING,
                name=tensor.name,
                data_ranks=_ranks(peers),
                tensor_ranks=_ranks(group) if tensor.cut is TensorCut.whole else (dist.get_rank(),),
            )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _data_group(expert: bool) -> dist.ProcessGroup:
    """Return the ranks with the same weights, over which the distributed optimizer partitions their state."""
    if expert:
        return cast(dist.ProcessGroup, parallel_state.get_expert_data_parallel_group())
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def global_name(chunk: nn.Module, name: str) -> str:
    """Return a parameter's name in the local layer spec, with the global numbers of its layer and its
    expert.
    """
    layer_match = LAYER.match(name)
    if layer_match is None:
        return name
    layer: Any = chunk.get_submodule(layer_match[0].rstrip("."))
    name = f"decoder.layers.{layer.layer_number - 1}.{name[layer_match.end() :]}"
    for fused, norm in FUSED_NORMS.items():
        name = name.replace(fused, norm)
    name = GROUPED_EXPERT.sub(r".experts.local_experts.\2.\1.weight", name)
    if expert := EXPERT.search(name):
        first = layer.mlp.local_expert_indices[0]
        name = name.replace(expert[0], f".local_experts.{int(expert[1]) + first}.")
    return name


def _master_parameters(
    optimizer: Any, parameters: Mapping[nn.Parameter, LocalParameter]
) -> Iterator[MasterParameter]:
    for part in inner_optimizers(optimizer):
        groups = {tensor: group for group in part.optimizer.param_groups for tensor in group["params"]}
        if hasattr(part, "model_param_group_index_map"):
            for parameter, (group, index) in part.model_param_group_index_map.items():
                tensor = part.optimizer.param_groups[group]["params"][index]
                start = part._get_model_param_range_map(parameter)["param"].start
                yield MasterParameter(
                    parameters[parameter], tensor, start, part.optimizer, groups[tensor], ranged=True
                )
            continue
        for parameter, own in parameters.items():
            tensor = getattr(parameter, "main_param", parameter)
            if tensor in groups:
                yield MasterParameter(own, tensor, 0, part.optimizer, groups[tensor], ranged=False)
