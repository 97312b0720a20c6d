"""The optimizer of a run without ZeRO: it lies in the model's file, and keys its state by the parameters' places in its groups.

Which parameter is at a place is not recorded (torch records it where the groups were made of named parameters). Groups are made by
picking from the model's parameters in their order, so the names are found by the shapes of the state: where only one way of picking
fits the shapes it is taken, and else the checkpoint is refused.

Sources: ``torch/optim/optimizer.py`` (``state_dict``), ``deepspeed/runtime/fp16/fused_optimizer.py`` and ``unfused_optimizer.py``
(``state_dict``). Imports no torch.
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
from toolkit.checkpoint.formats.deepspeed.geometry import FlatRun
from toolkit.checkpoint.formats.stored_tensor import StoredTensor

MAX_WAYS = 100_000  # of picking, looked at together


def read_optimizer(folder: Path, file: SavedFile, shapes: Mapping[str, Shape]) -> dict[str, RankParameter]:
    """The optimizer's part of every parameter. ``shapes`` are the model's, in its order; a tied parameter is there once.

    Raises:
        Damage: the file is not what it should be. CheckpointError: the names cannot be known.
    """
    saved = file.content["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    states, groups = inner.get("state", {}), inner.get("param_groups", ())
    if "fp32_groups_flat" in saved:
        return dict(_fused(folder, file, saved["fp32_groups_flat"], states, shapes))
    places = [list(group["params"]) for group in groups]
    masters = dict(enumerate(tensor for group in saved.get("fp32_groups", ()) for tensor in group))
    kept = [[_shape(masters.get(place), states.get(place, {})) for place in group] for group in places]
    recorded = [group.get("param_names") for group in groups]
    named = recorded if all(recorded) else infer_group_names(shapes, kept)
    if named is None:
        raise unsupported_error(
            folder,
            f"has the optimizer's state in {file.name} by number, and more than one order of names (or none) fits its "
            "shapes",
            "save it with ZeRO 1, which records names",
        )
    found: dict[str, RankParameter] = {}
    for names, group in zip(named, places, strict=True):
        for name, number in zip(names, group, strict=True):
            found[name] = RankParameter(
                shapes[name], master=WholeTensor(masters[number]) if number in masters else None
            )
            found[name].moments.update(
                (state, WholeTensor(value)) for state, value in _tensors(states.get(number, {}))
            )
    return found


def read_steps(file: SavedFile) -> Iterator[object]:
    """As ``deepspeed_zero.steps_of``."""
    saved = file.content.get("optimizer") or {}
    inner = saved.get("optimizer_state_dict", saved)
    for holder in (*inner.get("state", {}).values(), *read_groups(file)):
        if holder.get("step") is not None:
            yield holder["step"]


def read_groups(file: SavedFile) -> Sequence[Mapping[str, Any]]:
    """Of the optimizer's groups, with their places."""
    saved = file.content.get("optimizer") or {}
    found: Sequence[Mapping[str, Any]] = saved.get("optimizer_state_dict", saved).get("param_groups", ())
    return found


def count_parameters(file: SavedFile) -> int:
    """How many the optimizer has."""
    return sum(len(group["params"]) for group in read_groups(file))


def infer_group_names(
    shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]] | None:
    """The names of each group, where one way of picking from ``shapes``, in order, fits; None where none or several do.

    Args:
        groups: the shape of each place; None where it is not known.
    """
    taken = sum(map(len, groups))
    if taken > len(shapes):
        return None
    # How far each group is filled -> ways that come there, and the last one's choices: (before, group).
    Filled = tuple[int, ...]
    ways: dict[Filled, int] = {(0,) * len(groups): 1}
    trail: list[dict[Filled, tuple[Filled, int | None]]] = []
    left = len(shapes)
    for shape in shapes.values():
        left -= 1
        after: dict[Filled, int] = {}
        choices: dict[Filled, tuple[Filled, int | None]] = {}
        for filled, count in ways.items():
            for number, group in enumerate(groups):
                at = filled[number]
                if at < len(group) and group[at] in (None, shape):
                    then = (*filled[:number], at + 1, *filled[number + 1 :])
                    after[then] = after.get(then, 0) + count
                    choices[then] = (filled, number)
            if taken - sum(filled) <= left:  # it may be in no group: frozen
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


def _fused(
    folder: Path,
    file: SavedFile,
    masters: Sequence[object],
    states: Mapping[int, Any],
    shapes: Mapping[str, Shape],
) -> Iterator[tuple[str, RankParameter]]:
    """``FP16_Optimizer``: a flat buffer a group. Its length is all that is known, so one group is all parameters, and two are the
    matrices and the rest."""
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
                    buffer.dtype, partial(tuple, [FlatRun(0, 0, at, length)]), [locate_buffer(buffer)]
                )
                for state, buffer in buffers.items()
            }
            yield name, RankParameter(shapes[name], master=spread.pop(""), moments=dict(spread))


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    yield from (
        (name, value) for name, value in state.items() if isinstance(value, StoredTensor) and name != "step"
    )


def _shape(master: StoredTensor | None, state: Mapping[str, Any]) -> Shape | None:
    """Of a parameter, as what is kept for it shows."""
    found = {value.shape for _, value in _tensors(state)} | ({master.shape} if master is not None else set())
    if len(found) > 1:
        raise DamagedFile(
            "", f"one parameter has state of shapes {sorted(found)}", "moments have their parameter's shape"
        )
    return next(iter(found), None)
