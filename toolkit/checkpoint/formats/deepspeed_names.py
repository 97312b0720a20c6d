"""Which part of which canonical tensor a stored parameter is: by its name, and in a pipeline of layers by its layer's place.

A name may have anything before the family's own (``module.``, ``_orig_mod.``, ``0.stage.model.``). A user's ``PipelineModule`` names
its layers by number: those that hold a block's parameters are the blocks, in order, and what comes before and after them is the
embedding, the last norm and the output layer. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.shard import Box
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape, ParameterSpec

Shape = tuple[int, ...]
TIED = "tied_modules."
_NUMBERED = re.compile(r"(\d+)\.(.+)")
# Canonical tensors that hold several matrices in one: the tensor axis cuts each of them, and so does not cut the whole into parts that
# follow each other.
_FUSED = ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.experts.gate_up_proj")


@dataclass(frozen=True, slots=True)
class Part:
    """The box ``offset, extent`` of a canonical tensor ``name`` of shape ``whole``, stored with shape ``shape``: without the box's first
    dims where those are 1."""

    name: str
    whole: Shape
    offset: Shape
    extent: Shape
    shape: Shape
    alias: bool = False  # of a tied tensor


class Names:
    """The stored names of a model.

    Args:
        stored: every name that is to be found, and its shape on one rank.

    Raises:
        CheckpointError: naming those that are no parameter of the model.
    """

    def __init__(self, shape: ModelShape, stored: Mapping[str, Shape], folder: Path) -> None:
        table = table_of(shape)
        self.parts: dict[str, Part] = {}
        for name in stored:
            found = _by_suffix(name, table)
            if found is not None:
                self.parts[name] = found
        left = {name: stored[name] for name in stored if name not in self.parts}
        if left and any(_NUMBERED.match(name) or name.startswith(TIED) for name in left):
            self.parts = _by_layers(shape, stored, table)
            left = {name: stored[name] for name in stored if name not in self.parts}
        if left:
            raise _unknown(folder, shape, left)


def table_of(shape: ModelShape) -> dict[str, Part]:
    """By every name that the family's parameters go by: in memory, published, tied."""
    family = families.get_family(shape.family)
    whole = {spec.name: spec.shape for spec in family.parameters(shape)}
    found = {}
    for tensor in family.hub_tensors(shape):
        for name in (tensor.name, *tensor.aliases):
            found[name] = Part(
                tensor.canonical, whole[tensor.canonical], tensor.offset, tensor.extent, tensor.shape
            )
    for name, size in whole.items():
        found[name] = Part(name, size, (0,) * len(size), size, size)
    for alias, name in family.tied_weights(shape).items():
        size = whole[name]
        found[alias] = Part(name, size, (0,) * len(size), size, size, alias=True)
    return found


def _by_suffix(name: str, table: Mapping[str, Part]) -> Part | None:
    """The longest end of ``name``, from a dot on, that is in the table."""
    parts = name.split(".")
    return next(
        (table[end] for start in range(len(parts)) if (end := ".".join(parts[start:])) in table), None
    )


def _by_layers(shape: ModelShape, stored: Mapping[str, Shape], table: Mapping[str, Part]) -> dict[str, Part]:
    """Of a pipeline of layers. Empty where its blocks are not the model's."""
    specs = families.get_family(shape.family).parameters(shape)
    in_block = {spec.name.split(f".{spec.layer}.", 1)[1] for spec in specs if spec.layer == 0}
    layers: dict[int, list[tuple[str, str]]] = {}
    for name in stored:
        if match := _NUMBERED.fullmatch(name):
            layers.setdefault(int(match[1]), []).append((name, match[2]))
    blocks: dict[int, dict[str, str]] = {}  # of each layer that is a block: stored name -> name in the block
    for number, names in sorted(layers.items()):
        inside = {name: end for name, rest in names if (end := _end_in(rest, in_block)) is not None}
        if set(inside.values()) == in_block and len(inside) == len(names):
            blocks[number] = inside
    if len(blocks) != shape.num_hidden_layers:
        return {}
    prefix = next(spec.name for spec in specs if spec.layer == 0).split(".0.", 1)[0]
    found = {
        name: table[f"{prefix}.{layer}.{end}"]
        for layer, inside in enumerate(blocks.values())
        for name, end in inside.items()
    }
    before, after = _outside(specs, table)
    first, last = min(blocks), max(blocks)
    for number, names in layers.items():
        if number not in blocks:
            for name, _ in names:
                part = _fitting(
                    name, stored[name], before if number < first else after if number > last else ()
                )
                if part is not None:
                    found[name] = part
    for name, size in stored.items():
        if name.startswith(TIED) and (part := _fitting(name, size, before)) is not None:
            found[name] = part
    return found


def _outside(
    specs: Sequence[ParameterSpec], table: Mapping[str, Part]
) -> tuple[list[tuple[str, Part]], list[tuple[str, Part]]]:
    """What comes before the blocks and after them, by name; a tied output layer is after them too."""
    at = next(index for index, spec in enumerate(specs) if spec.layer is not None)
    before = [(spec.name, table[spec.name]) for spec in specs[:at]]
    after = [(spec.name, table[spec.name]) for spec in specs[at:] if spec.layer is None]
    after += [(name, part) for name, part in table.items() if part.alias]
    return before, after


def _end_in(name: str, ends: Iterable[str]) -> str | None:
    return next((end for end in ends if name == end or name.endswith(f".{end}")), None)


def _fitting(name: str, size: Shape, candidates: Sequence[tuple[str, Part]]) -> Part | None:
    """The one candidate that a layer's parameter can be: by the end of its name, else by what it is and its shape, else by a shape that
    the tensor axis may have cut."""
    words = name.split(".")
    tests = (
        lambda known, part: words[-2:] == known.split(".")[-2:],
        lambda known, part: words[-1] == known.split(".")[-1] and size == part.shape,
        lambda known, part: words[-1] == known.split(".")[-1] and _cut_of(size, part.shape),
    )
    for test in tests:
        found = {part for known, part in candidates if test(known, part) and _cut_of(size, part.shape)}
        if len(found) == 1:
            return found.pop()
    return None


def _cut_of(size: Shape, whole: Shape) -> bool:
    """Equal but in one dim, which may be shorter."""
    return (
        len(size) == len(whole)
        and sum(a != b for a, b in zip(size, whole, strict=True)) <= 1
        and all(a <= b for a, b in zip(size, whole, strict=True))
    )


def boxes(part: Part, stored: str, sizes: Sequence[Shape | None], folder: Path) -> list[Box | None]:
    """What each tensor rank has of the canonical tensor. ``sizes`` are theirs; None where a rank has nothing.

    A parameter is whole on every rank, or cut along one dim into parts that follow each other in the order of ranks.

    Raises:
        CheckpointError: it is neither.
    """
    shapes = [size for size in sizes if size is not None]
    lead = len(part.extent) - len(part.shape)
    if all(size == part.shape for size in shapes):
        return [None if size is None else Box(part.offset, part.extent) for size in sizes]
    dims = {
        dim
        for size in shapes
        for dim, (here, whole) in enumerate(zip(size, part.shape, strict=False))
        if here != whole
    }
    if all(len(size) == len(part.shape) for size in shapes) and len(dims) == 1:
        (dim,) = dims
        fused = stored.endswith(_FUSED) and dim == len(part.shape) - (2 if "gate_up" in stored else 1)
        if sum(size[dim] for size in shapes) == part.shape[dim] and not fused:
            return list(_consecutive(part, sizes, dim, lead + dim))
    raise CheckpointError(
        Problem(
            str(folder),
            f"{stored} has shapes {', '.join(map(str, dict.fromkeys(shapes)))} on {len(sizes)} tensor ranks of {folder}",
            f"{part.name} of this model is {part.shape}, whole or cut along one dim",
            "give the model that the checkpoint was made of, or save it from a run without a tensor axis",
        )
    )


def _consecutive(part: Part, sizes: Sequence[Shape | None], dim: int, at: int) -> Iterator[Box | None]:
    start = part.offset[at]
    for size in sizes:
        if size is None or not size[dim]:
            yield None
            continue
        offset = tuple(start if index == at else low for index, low in enumerate(part.offset))
        extent = tuple(size[dim] if index == at else whole for index, whole in enumerate(part.extent))
        yield Box(offset, extent)
        start += size[dim]


def _unknown(folder: Path, shape: ModelShape, names: Mapping[str, Shape]) -> CheckpointError:
    listed = ", ".join(f"{name} {size}" for name, size in list(names.items())[:3])
    listed += f" and {len(names) - 3} more" if len(names) > 3 else ""
    return CheckpointError(
        Problem(
            str(folder),
            f"{folder} holds {listed}, which is no parameter of {shape.family}",
            "parameters have the names that transformers gives them, with anything before; layers of a pipeline are an embedding, blocks, a "
            "norm and an output layer",
            "give the model that the checkpoint was made of, or save it from transformers' own",
        )
    )
