"""Read ZeRO's partitions: locate parameters in the ranks' flat buffers from the recorded shapes.

Parameters are located by ``param_shapes``, which has the buffers' order also under ``round_robin_gradients``.
The recorded ``param_slice_mappings`` have another order there and are not used.

Sources, in ``deepspeed/runtime``: ``zero/stage_1_and_2.py`` and ``bf16_optimizer.py`` (``state_dict``),
``zero/stage3.py`` (``_rigid_state_dict``), ``engine.py`` (``_get_zero_param_shapes``). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats.deepspeed.contents import (
    FlatContent,
    RankParameter,
    Shape,
    StoredContent,
    as_flat_buffer,
    locate_buffer,
)
from toolkit.checkpoint.formats.deepspeed.files import SavedFile
from toolkit.checkpoint.formats.deepspeed.geometry import (
    BufferRange,
    partition_ranges,
    share_numel,
    share_ranges,
)
from toolkit.checkpoint.formats.stored_tensor import StoredTensor
from toolkit.checkpoint.shard import MASTER, MOMENTUM

GroupShapes = Sequence[
    Mapping[str, Shape]
]  # for each group (ZeRO 3: sub-group), shapes by name in the buffers' order


def read_partitions(ranks: Sequence[SavedFile], groups: GroupShapes) -> dict[str, RankParameter]:
    """Return the optimizer's part of every parameter of one model-parallel rank. Raises DamagedFile."""
    read = _read_stage3 if "fp32_flat_groups" in ranks[0].content else _read_stage12
    parameters: dict[str, RankParameter] = {}
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            if name in parameters:
                raise DamagedFile(
                    ranks[0].name, f"{ranks[0].name} has {name} in two groups", "a parameter is in one group"
                )
            parameters[name] = RankParameter(shape)
        for name, state, content in read(ranks, number, shapes):
            if state == MASTER:
                parameters[name].master = content
            elif state in parameters[name].moments:  # Muon: other ranks that have the whole matrix
                parameters[name].copies.append((state, content))
            else:
                parameters[name].moments[state] = content
    return parameters


def read_steps(rank: SavedFile) -> Iterator[object]:
    """Yield the optimizer's step counts of every group; some optimizers store them in the state, some in
    the group.
    """
    inner = rank.content.get("base_optimizer_state", rank.content.get("optimizer_state_dict"))
    states = inner.get("state", {}).values() if isinstance(inner, Mapping) else inner or ()
    for holder in (*states, *read_groups(rank)):
        if holder.get("step") is not None:
            yield holder["step"]


def read_groups(rank: SavedFile) -> Sequence[Mapping[str, object]]:
    """Return the optimizer's parameter groups."""
    inner = rank.content.get("base_optimizer_state", rank.content.get("optimizer_state_dict"))
    return inner.get("param_groups", ()) if isinstance(inner, Mapping) else ()


def _read_stage12(
    ranks: Sequence[SavedFile], number: int, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, str, StoredContent]]:
    """ZeRO 1, 2 and ``BF16_Optimizer``: a group's parameters, with alignment gaps, are concatenated and
    cut into equal parts.
    """
    first = ranks[0].content
    numels = [math.prod(shape) for shape in shapes.values()]
    gaps = (
        first["param_alignment_paddings"][number]
        if "param_alignment_paddings" in first
        else [0] * len(numels)
    )
    if len(gaps) != len(numels):
        raise DamagedFile(
            ranks[0].name,
            f"{ranks[0].name} has {len(gaps)} parameters in group {number}, the model's file {len(numels)}",
            "both are of one run",
        )
    *offsets, total = accumulate((length + gap for length, gap in zip(numels, gaps, strict=True)), initial=0)
    partition = _partition_numel(ranks, number, total)
    least = [min(partition, max(0, total - rank * partition)) for rank in range(len(ranks))]
    states = {
        MASTER: [_group_value(rank, "single_partition_of_fp32_groups", number) for rank in ranks],
        **_moments(ranks, number),
    }
    for state, values in states.items():
        if state == MOMENTUM and any(
            _numel(value) not in (partition, low) for value, low in zip(values, least, strict=True)
        ):
            yield from _whole_matrices(ranks, shapes, offsets, values, partition)
            continue
        buffers = [
            as_flat_buffer(value, rank.name, f"{state} of group {number}", low)
            for value, rank, low in zip(values, ranks, least, strict=True)
        ]
        locations = list(map(locate_buffer, buffers))
        for name, offset, length in zip(shapes, offsets, numels, strict=True):
            yield (
                name,
                state,
                FlatContent(
                    buffers[0].dtype, partial(partition_ranges, offset, length, partition), locations
                ),
            )


def _partition_numel(ranks: Sequence[SavedFile], number: int, total: int) -> int:
    """Return the elements per rank of a group: those in the file plus the removed padding. Raises
    DamagedFile.
    """
    numels = set()
    for rank in ranks:
        master, padding = _group_value(rank, "single_partition_of_fp32_groups", number), 0
        if "zero_stage" in rank.content:  # BF16_Optimizer does not remove the padding
            padding = rank.content["group_paddings"][number]
        numels.add(_numel(master) + padding)
    count = ranks[0].content["partition_count"]
    count = count[number] if isinstance(count, list) else count
    if len(numels) != 1 or count != len(ranks) or max(numels) * len(ranks) < total:
        raise DamagedFile(
            ranks[0].name,
            f"parts of group {number} have {sorted(numels)} elements on {len(ranks)} ranks (saved by "
            f"{count}), its "
            f"parameters {total}",
            "a group is cut into equal parts, one for each rank of the run that saved it",
        )
    return numels.pop()


def _whole_matrices(
    ranks: Sequence[SavedFile],
    shapes: Mapping[str, Shape],
    offsets: Sequence[int],
    values: Sequence[object],
    partition: int,
) -> Iterator[tuple[str, str, StoredContent]]:
    """Muon under ZeRO 1 and 2: the momentum of every matrix of which a rank has a part, whole and
    concatenated.
    """
    buffers = [
        as_flat_buffer(value, rank.name, MOMENTUM, 0) for value, rank in zip(values, ranks, strict=True)
    ]
    locations, at = list(map(locate_buffer, buffers)), [0] * len(ranks)
    for (name, shape), offset in zip(shapes.items(), offsets, strict=True):
        length = math.prod(shape)
        for rank in range(offset // partition, -(-(offset + length) // partition)):
            yield (
                name,
                MOMENTUM,
                FlatContent(
                    buffers[0].dtype, partial(tuple, [BufferRange(rank, 0, at[rank], length)]), locations
                ),
            )
            at[rank] += length
    for file, buffer, used in zip(ranks, buffers, at, strict=True):
        if used != buffer.numel:
            raise DamagedFile(
                file.name,
                f"{MOMENTUM} in {file.name} has {buffer.numel} elements, its matrices {used}",
                "Muon stores the momentum of every matrix of which a rank has a part",
            )


def _read_stage3(
    ranks: Sequence[SavedFile], number: int, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, str, StoredContent]]:
    """ZeRO 3: each parameter's equal shares, the last ones padded, are concatenated."""
    numels = [math.prod(shape) for shape in shapes.values()]
    *starts, total = accumulate((share_numel(length, len(ranks)) for length in numels), initial=0)
    for state, values in {
        MASTER: [_group_value(rank, "fp32_flat_groups", number) for rank in ranks],
        **_moments(ranks, number),
    }.items():
        buffers = [
            as_flat_buffer(value, rank.name, f"{state} of sub-group {number}", total)
            for value, rank in zip(values, ranks, strict=True)
        ]
        if buffers[0].numel != total:
            raise DamagedFile(
                ranks[0].name,
                f"{state} of sub-group {number} has {buffers[0].numel} elements in {ranks[0].name}, its "
                "parameters "
                f"have {total} on each of {len(ranks)} ranks",
                "a checkpoint has the files of all its ranks",
            )
        locations = list(map(locate_buffer, buffers))
        for name, start, length in zip(shapes, starts, numels, strict=True):
            yield (
                name,
                state,
                FlatContent(buffers[0].dtype, partial(share_ranges, start, length, len(ranks)), locations),
            )


def read_frozen(fragments: Sequence[tuple[str, object]], shape: Shape) -> StoredContent:
    """ZeRO 3: return a parameter without optimizer state, of which each rank's model file has a share.

    Args:
        fragments: For each rank, the file and the tensor.
        shape: Shape of the parameter.
    """
    length, ranks = math.prod(shape), len(fragments)
    shares = [
        as_flat_buffer(value, file, "a frozen parameter", share_numel(length, ranks))
        for file, value in fragments
    ]
    return FlatContent(
        shares[0].dtype, partial(share_ranges, 0, length, ranks), list(map(locate_buffer, shares))
    )


def shapes_from_slices(ranks: Sequence[SavedFile], shapes: Mapping[str, Shape]) -> GroupShapes:
    """Return the group shapes for ``BF16_Optimizer`` without ZeRO, which has no ``param_shapes``, from the
    slices of all ranks.

    ``shapes`` are those of the model, by name.
    """
    group_shapes = []
    for number in range(len(ranks[0].content["single_partition_of_fp32_groups"])):
        names = dict.fromkeys(name for rank in ranks for name in rank.content["param_slice_mappings"][number])
        unknown = next((name for name in names if name not in shapes), None)
        if unknown is not None:
            raise DamagedFile(
                ranks[0].name,
                f"{ranks[0].name} has state of {unknown}, which no model's file has",
                "both are of one run",
            )
        group_shapes.append({name: shapes[name] for name in names})
    return group_shapes


def _group_value(rank: SavedFile, key: str, number: int) -> object:
    groups = rank.content.get(key)
    if not isinstance(groups, list) or number >= len(groups):
        raise DamagedFile(
            rank.name,
            f"{rank.name} has no group {number} in {key}",
            "the optimizer's files are of the model's groups",
        )
    return groups[number]


def _moments(ranks: Sequence[SavedFile], number: int) -> dict[str, list[object]]:
    """Return the optimizer's tensors of parameter shape for every rank; empty before its first step.
    Raises DamagedFile.
    """
    of_ranks = []
    for rank in ranks:
        inner = rank.content.get("base_optimizer_state", rank.content.get("optimizer_state_dict"))
        # elastic checkpoints have a list
        states = inner["state"] if isinstance(inner, Mapping) else dict(enumerate(inner or ()))
        state = states.get(number, {})
        of_ranks.append(
            {name: value for name, value in state.items() if isinstance(value, StoredTensor) and value.shape}
        )
    for rank, state in zip(ranks, of_ranks, strict=True):
        if state.keys() != of_ranks[0].keys():
            raise DamagedFile(
                rank.name,
                f"group {number} has optimizer state {sorted(state)} in {rank.name} and "
                f"{sorted(of_ranks[0])} in "
                f"{ranks[0].name}",
                "all ranks of a run have the same optimizer",
            )
    return {name: [state[name] for state in of_ranks] for name in of_ranks[0]}


def _numel(value: object) -> int:
    return value.numel if isinstance(value, StoredTensor) else -1
