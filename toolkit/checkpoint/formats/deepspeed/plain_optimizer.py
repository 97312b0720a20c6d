"""Read the optimizer of a run without ZeRO: it is in the model's file, and keys its state by parameter index
in its groups.

The index's parameter is recorded only if the groups were created from named parameters. Groups are selected
from the model's parameters in order, so names are inferred from the shapes of the state. If not exactly one
selection fits the shapes, the checkpoint is rejected.

Sources: ``torch/optim/optimizer.py`` (``state_dict``), ``deepspeed/runtime/fp16/fused_optimizer.py`` and
``unfused_optimizer.py`` (``state_dict``). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats.deepspeed.contents import (
    FlatContent,
    RankParameter,
    Shape,
    WholeTensor,
    as_flat_buffer,
    locate_buffer,
)
from toolkit.checkpoint.formats.deepspeed.files import SavedFile, unsupported_error
from toolkit.checkpoint.formats.deepspeed.geometry import BufferRange
from toolkit.checkpoint.formats.stored_tensor import StoredTensor

MAX_WAYS = 100_000  # maximum number of selections that are tracked at once


def read_optimizer(folder: Path, file: SavedFile, shapes: Mapping[str, Shape]) -> dict[str, RankParameter]:
    """Return the optimizer's part of every parameter. ``shapes`` are those of the model, in order; a tied
    parameter occurs once.

    Raises:
        DamagedFile: The file has unexpected content. CheckpointError: The names are ambiguous.
    """
    saved = file.content["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    states, groups = inner.get("state", {}), inner.get("param_groups", ())
    if "fp32_groups_flat" in saved:
        return dict(_read_fused(folder, file, saved["fp32_groups_flat"], states, shapes))
    indices = [list(group["params"]) for group in groups]
    masters = dict(enumerate(tensor for group in saved.get("fp32_groups", ()) for tensor in group))
    group_shapes = [
        [_shape(masters.get(index), states.get(index, {})) for index in group] for group in indices
    ]
    recorded = [group.get("param_names") for group in groups]
    named = recorded if all(recorded) else infer_group_names(shapes, group_shapes)
    if named is None:
        raise unsupported_error(
            folder,
            f"has the optimizer's state in {file.name} by number, and more than one order of names (or "
            "none) fits its "
            "shapes",
            "save it with ZeRO 1, which records names",
        )
    found: dict[str, RankParameter] = {}
    for names, group in zip(named, indices, strict=True):
        for name, number in zip(names, group, strict=True):
            found[name] = RankParameter(
                shapes[name], master=WholeTensor(masters[number]) if number in masters else None
            )
            found[name].moments.update(
                (state, WholeTensor(value)) for state, value in _tensors(states.get(number, {}))
            )
    return found


def read_steps(file: SavedFile) -> Iterator[object]:
    """Return the step counts as :func:`zero.read_steps` does."""
    saved = file.content.get("optimizer") or {}
    inner = saved.get("optimizer_state_dict", saved)
    for holder in (*inner.get("state", {}).values(), *read_groups(file)):
        if holder.get("step") is not None:
            yield holder["step"]


def read_groups(file: SavedFile) -> Sequence[Mapping[str, Any]]:
    """Return the optimizer's parameter groups."""
    saved = file.content.get("optimizer") or {}
    found: Sequence[Mapping[str, Any]] = saved.get("optimizer_state_dict", saved).get("param_groups", ())
    return found


def count_parameters(file: SavedFile) -> int:
    """Return the number of the optimizer's parameters."""
    return sum(len(group["params"]) for group in read_groups(file))


def infer_group_names(
    shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]] | None:
    """Return the names of each group if exactly one in-order selection from ``shapes`` fits, otherwise None.

    Args:
        shapes: Shapes of the model's parameters, in order.
        groups: For each group, the shape of each parameter; None if unknown.
    """
    total = sum(map(len, groups))
    if total > len(shapes):
        return None
    # Number of filled entries per group -> number of selections, and the last choice of each: (previous
    # state, group).
    Filled = tuple[int, ...]
    ways: dict[Filled, int] = {(0,) * len(groups): 1}
    trail: list[dict[Filled, tuple[Filled, int | None]]] = []
    remaining = len(shapes)
    for shape in shapes.values():
        remaining -= 1
        after: dict[Filled, int] = {}
        choices: dict[Filled, tuple[Filled, int | None]] = {}
        for filled, count in ways.items():
            for number, group in enumerate(groups):
                at = filled[number]
                if at < len(group) and group[at] in (None, shape):
                    then = (*filled[:number], at + 1, *filled[number + 1 :])
                    after[then] = after.get(then, 0) + count
                    choices[then] = (filled, number)
            if total - sum(filled) <= remaining:  # a frozen parameter is in no group
                after[filled] = after.get(filled, 0) + count
                choices[filled] = (filled, None)
        if len(after) > MAX_WAYS:
            return None
        ways = after
        trail.append(choices)
    end = tuple(map(len, groups))
    if ways.get(end) != 1:
        return None
    found: list[list[str]] = [[] for _ in groups]
    for name, choices in zip(reversed(list(shapes)), reversed(trail), strict=True):
        end, chosen = choices[end]
        if chosen is not None:
            found[chosen].append(name)
    return [names[::-1] for names in found]


def _read_fused(
    folder: Path,
    file: SavedFile,
    masters: Sequence[object],
    states: Mapping[int, Any],
    shapes: Mapping[str, Shape],
) -> Iterator[tuple[str, RankParameter]]:
    """Read ``FP16_Optimizer``, which has one flat buffer per group.

    Only the buffers' lengths are known, so one group must be all parameters, and two must be the matrices and
    the rest.
    """
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    rest = [name for name, shape in shapes.items() if len(shape) <= 1]
    lengths = [value.numel if isinstance(value, StoredTensor) else -1 for value in masters]
    fitting = [
        groups
        for groups in ([list(shapes)], [matrices, rest], [rest, matrices])
        if [sum(math.prod(shapes[name]) for name in names) for names in groups] == lengths
    ]
    if len(fitting) != 1:
        raise unsupported_error(
            folder,
            f"has groups of {lengths} elements without names in {file.name}",
            "save it with ZeRO 1, which records names",
        )
    for number, names in enumerate(fitting[0]):
        numels = [math.prod(shapes[name]) for name in names]
        tensors = {"": masters[number], **dict(_tensors(states.get(number, {})))}
        buffers = {
            state: as_flat_buffer(value, file.name, f"group {number}", sum(numels))
            for state, value in tensors.items()
        }
        for name, at, length in zip(names, accumulate(numels, initial=0), numels, strict=False):
            spread = {
                state: FlatContent(
                    buffer.dtype, partial(tuple, [BufferRange(0, 0, at, length)]), [locate_buffer(buffer)]
                )
                for state, buffer in buffers.items()
            }
            yield name, RankParameter(shapes[name], master=spread.pop(""), moments=dict(spread))


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    yield from (
        (name, value) for name, value in state.items() if isinstance(value, StoredTensor) and name != "step"
    )


def _shape(master: StoredTensor | None, state: Mapping[str, Any]) -> Shape | None:
    """Return a parameter's shape according to its state, or None."""
    found = {value.shape for _, value in _tensors(state)} | ({master.shape} if master is not None else set())
    if len(found) > 1:
        raise DamagedFile(
            "", f"one parameter has state of shapes {sorted(found)}", "moments have their parameter's shape"
        )
    return next(iter(found), None)
