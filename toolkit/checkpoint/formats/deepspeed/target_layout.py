"""Assign parameters to the ranks and flat buffers of the DeepSpeed run that a target is written for.

A *model rank* has some of the parameters: all of them, a tensor rank's part (AutoTP), or those of a pipeline
stage. Its number is ``mp_rank`` in file names. *ZeRO's ranks* share the same parameters. Each optimizer group
(parameters with weight decay, then those without, in the module's order) is laid out in flat buffers that are
split over ZeRO's ranks.

Sources: ``toolkit/optimizers/base.py`` (groups), ``toolkit/plan/deepspeed.py`` (what AutoTP cuts),
``toolkit/plan/pipeline_stages.py``; ``geometry.py`` has DeepSpeed's placement of elements. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from toolkit import families
from toolkit.checkpoint.formats.deepspeed.geometry import (
    BufferRange,
    partition_numel,
    partition_ranges,
    share_numel,
    share_ranges,
    sub_groups,
)
from toolkit.checkpoint.shard import Box
from toolkit.config.reshard import TargetParallelConfig
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.plan.deepspeed import tensor_parallel_dim
from toolkit.plan.pipeline_stages import split_into_stages

DEFAULT_SUB_GROUP_SIZE = 10**9  # elements per rank: DeepSpeed's default zero_optimization.sub_group_size


@dataclass(frozen=True, slots=True)
class TargetParameter:
    """A parameter of a model rank: ``box`` of a canonical tensor of shape ``whole``. ``name`` is
    DeepSpeed's name for it.
    """

    name: str
    canonical: str
    whole: tuple[int, ...]
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.shape

    @property
    def decays(self) -> bool:
        return len(self.whole) > 1


@dataclass(frozen=True, slots=True)
class ModelRank:
    """The parameters of one model rank.

    Attributes:
        number: ``mp_rank`` in file names.
        parameters: In the order of the module's parameters.
        aliases: Further names in its state dict -> the name that stores the tensor.
    """

    number: int
    parameters: tuple[TargetParameter, ...]
    aliases: Mapping[str, str]

    @property
    def groups(self) -> list[list[TargetParameter]]:
        """The optimizer's parameter groups, each with one weight decay."""
        both = (
            [parameter for parameter in self.parameters if parameter.decays is decays]
            for decays in (True, False)
        )
        return [group for group in both if group]


def build_model_ranks(shape: ModelShape, parallel: TargetParallelConfig) -> tuple[ModelRank, ...]:
    """Return the model ranks by number. Tensor and pipeline parallelism do not combine in the toolkit's
    DeepSpeed engines.
    """
    family = families.get_family(shape.family)
    parameters, tied = family.parameters(shape), family.tied_weights(shape)
    if parallel.pipeline > 1:
        return tuple(
            _pipeline_rank(number, stage.parameters, tied, parallel.pipeline)
            for number, stage in enumerate(split_into_stages(parameters, parallel.pipeline, tied.values()))
        )
    return tuple(_tensor_rank(number, parameters, tied, parallel.tensor) for number in range(parallel.tensor))


def _tensor_rank(
    number: int, specs: Sequence[ParameterSpec], tied: Mapping[str, str], ranks: int
) -> ModelRank:
    return ModelRank(
        number,
        tuple(TargetParameter(spec.name, spec.name, spec.shape, _cut(spec, number, ranks)) for spec in specs),
        tied,
    )


def _cut(spec: ParameterSpec, rank: int, ranks: int) -> Box:
    dim = tensor_parallel_dim(spec.name)
    if dim is None or ranks == 1:
        return Box.whole(spec.shape)
    assert spec.shape[dim] % ranks == 0, f"{spec.name} {spec.shape} on {ranks} tensor ranks"
    share = spec.shape[dim] // ranks
    return Box(
        tuple(rank * share if at == dim else 0 for at in range(len(spec.shape))),
        tuple(share if at == dim else size for at, size in enumerate(spec.shape)),
    )


def _pipeline_rank(
    number: int, specs: Sequence[ParameterSpec], tied: Mapping[str, str], stages: int
) -> ModelRank:
    """DeepSpeed sees a stage as one layer, whose model is ``stage.model``
    (``toolkit/engine/deepspeed/pipeline_module.py``).

    The last stage stores a tied weight under its alias; nothing is tied within it.
    """
    other = {stored: alias for alias, stored in tied.items()} if number == stages - 1 else {}
    names = [f"{number}.stage.model.{other.get(spec.name, spec.name)}" for spec in specs]
    return ModelRank(
        number,
        tuple(
            TargetParameter(name, spec.name, spec.shape, Box.whole(spec.shape))
            for name, spec in zip(names, specs, strict=True)
        ),
        {},
    )


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer that is split over ZeRO's ranks.

    Attributes:
        number: Index among the model rank's buffers, which keys the optimizer's state.
        group: Index in ``ModelRank.groups``.
        parameters: The parameters in it.
        starts: First element of each parameter: in the whole buffer under ZeRO 1 and 2, in each rank's under
            ZeRO 3.
        numel: Elements per rank, with padding.
    """

    number: int
    group: int
    parameters: tuple[TargetParameter, ...]
    starts: tuple[int, ...]
    numel: int

    @property
    def decays(self) -> bool:
        return self.parameters[0].decays


def build_flat_buffers(rank: ModelRank, stage: int, ranks: int, sub_group: int) -> tuple[FlatBuffer, ...]:
    """Return the buffers of ZeRO ``stage`` over ``ranks``, in DeepSpeed's order."""
    buffers: list[FlatBuffer] = []
    for number, group in enumerate(rank.groups):
        sizes = [parameter.box.numel for parameter in group]
        if stage < 3:
            buffers.append(
                FlatBuffer(
                    number, number, tuple(group), _starts(sizes), partition_numel(sizes, ranks, 2 * ranks)
                )
            )
            continue
        shares = [share_numel(size, ranks) for size in sizes]
        for part in sub_groups(shares, sub_group):
            inside = shares[part.start : part.stop]
            buffers.append(
                FlatBuffer(
                    len(buffers), number, tuple(group[part.start : part.stop]), _starts(inside), sum(inside)
                )
            )
    return tuple(buffers)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


def buffer_ranges(flat: FlatBuffer, index: int, stage: int, ranks: int) -> Iterator[BufferRange]:
    """Return the positions of the elements of parameter ``index``."""
    numel = flat.parameters[index].box.numel
    return (
        partition_ranges(flat.starts[index], numel, flat.numel)
        if stage < 3
        else share_ranges(flat.starts[index], numel, ranks)
    )


def padding_numel(flat: FlatBuffer, rank: int) -> int:
    """ZeRO 1, 2: return the number of trailing elements of a rank's part that belong to no parameter."""
    filled = sum(math.prod(parameter.box.shape) for parameter in flat.parameters)
    return flat.numel - min(max(filled - rank * flat.numel, 0), flat.numel)
