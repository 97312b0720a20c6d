"""Which rank of a DeepSpeed run of this toolkit holds what, and where in its buffers: the run that a target is written for.

A *model rank* holds some of the parameters: all of them, a tensor rank's cut (AutoTP), or those of a stage of the pipeline; its number
is ``mp_rank`` in the names of files. *ZeRO's ranks* are those that hold the same parameters. Each optimizer group (what decays, then
what does not, each in the module's order) is laid into flat buffers, one piece of each on each of ZeRO's ranks.

Sources: ``toolkit/engine/optimizers.py`` (groups), ``toolkit/plan/deepspeed.py`` (what AutoTP cuts), ``toolkit/plan/stages.py``;
``deepspeed_geometry.py`` says where DeepSpeed puts the elements. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from toolkit import families
from toolkit.checkpoint.formats.deepspeed_geometry import (
    Run,
    partition_numel,
    runs_of_range,
    runs_of_shares,
    share_numel,
    sub_groups,
)
from toolkit.checkpoint.shard import Box
from toolkit.config.reshard import TargetParallelConfig
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.plan.deepspeed import tensor_dim
from toolkit.plan.stages import split

SUB_GROUP = 10**9  # elements of a rank: DeepSpeed's default zero_optimization.sub_group_size


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model rank: ``box`` of the canonical tensor of shape ``whole``. ``name`` is what DeepSpeed calls it."""

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
    """Attributes:
    number: ``mp_rank`` in the names of files.
    parameters: in the order of the module's parameters.
    aliases: further names in its state dict -> the name that stores the tensor.
    """

    number: int
    parameters: tuple[Parameter, ...]
    aliases: Mapping[str, str]

    @property
    def groups(self) -> list[list[Parameter]]:
        """What the optimizer gets, each group with one weight decay."""
        both = ([one for one in self.parameters if one.decays is decays] for decays in (True, False))
        return [group for group in both if group]


def model_ranks(shape: ModelShape, parallel: TargetParallelConfig) -> tuple[ModelRank, ...]:
    """By number. The axes must be ones that the toolkit's DeepSpeed engines have: tensor and pipeline do not combine."""
    family = families.get_family(shape.family)
    parameters, tied = family.parameters(shape), family.tied_weights(shape)
    if parallel.pipeline > 1:
        return tuple(
            _stage(number, stage.parameters, tied, parallel.pipeline)
            for number, stage in enumerate(split(parameters, parallel.pipeline, tied.values()))
        )
    return tuple(_tensor_rank(number, parameters, tied, parallel.tensor) for number in range(parallel.tensor))


def _tensor_rank(
    number: int, specs: Sequence[ParameterSpec], tied: Mapping[str, str], ranks: int
) -> ModelRank:
    return ModelRank(
        number,
        tuple(Parameter(spec.name, spec.name, spec.shape, _cut(spec, number, ranks)) for spec in specs),
        tied,
    )


def _cut(spec: ParameterSpec, rank: int, ranks: int) -> Box:
    dim = tensor_dim(spec.name)
    if dim is None or ranks == 1:
        return Box.whole(spec.shape)
    assert spec.shape[dim] % ranks == 0, f"{spec.name} {spec.shape} on {ranks} tensor ranks"
    share = spec.shape[dim] // ranks
    return Box(
        tuple(rank * share if at == dim else 0 for at in range(len(spec.shape))),
        tuple(share if at == dim else size for at, size in enumerate(spec.shape)),
    )


def _stage(number: int, specs: Sequence[ParameterSpec], tied: Mapping[str, str], stages: int) -> ModelRank:
    """A stage is one layer to DeepSpeed, and the model is ``stage.model`` in it (``toolkit/engine/deepspeed/pipeline_module.py``). The last
    one has of a tied weight the other name, and nothing is tied within it."""
    other = {stored: alias for alias, stored in tied.items()} if number == stages - 1 else {}
    names = [f"{number}.stage.model.{other.get(spec.name, spec.name)}" for spec in specs]
    return ModelRank(
        number,
        tuple(
            Parameter(name, spec.name, spec.shape, Box.whole(spec.shape))
            for name, spec in zip(names, specs, strict=True)
        ),
        {},
    )


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat buffer, cut over ZeRO's ranks.

    Attributes:
        number: among those of its model rank; what the optimizer's state calls it.
        group: of ``ModelRank.groups``.
        starts: the element at which each parameter begins: of the whole buffer under ZeRO 1 and 2, of each rank's under ZeRO 3.
        numel: of one rank's part, with padding.
    """

    number: int
    group: int
    parameters: tuple[Parameter, ...]
    starts: tuple[int, ...]
    numel: int

    @property
    def decays(self) -> bool:
        return self.parameters[0].decays


def flats(rank: ModelRank, stage: int, ranks: int, sub_group: int) -> tuple[Flat, ...]:
    """The buffers of ZeRO ``stage`` over ``ranks``, in DeepSpeed's order."""
    found: list[Flat] = []
    for number, group in enumerate(rank.groups):
        sizes = [one.box.numel for one in group]
        if stage < 3:
            found.append(
                Flat(number, number, tuple(group), _starts(sizes), partition_numel(sizes, ranks, 2 * ranks))
            )
            continue
        shares = [share_numel(size, ranks) for size in sizes]
        for part in sub_groups(shares, sub_group):
            inside = shares[part.start : part.stop]
            found.append(
                Flat(len(found), number, tuple(group[part.start : part.stop]), _starts(inside), sum(inside))
            )
    return tuple(found)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


def runs(flat: Flat, index: int, stage: int, ranks: int) -> Iterator[Run]:
    """Where the elements of the buffer's parameter ``index`` lie."""
    numel = flat.parameters[index].box.numel
    return (
        runs_of_range(flat.starts[index], numel, flat.numel)
        if stage < 3
        else runs_of_shares(flat.starts[index], numel, ranks)
    )


def padding(flat: Flat, rank: int) -> int:
    """ZeRO 1, 2: elements at the end of a rank's part that belong to no parameter."""
    filled = sum(math.prod(one.box.shape) for one in flat.parameters)
    return flat.numel - min(max(filled - rank * flat.numel, 0), flat.numel)
