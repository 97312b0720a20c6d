"""Map stored parameter names to parts of canonical tensors.

A name may have any prefix (``module.``, ``_orig_mod.``, ``0.stage.model.``). A user's ``PipelineModule``
names its layers by number: the layers with a block's parameters are the blocks, in order, and the others are
the embedding, the last norm and the output layer. Imports no torch.
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
# Canonical tensors that fuse several matrices: the tensor axis cuts each matrix, so ranks do not have
# consecutive parts.
_FUSED = ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.experts.gate_up_proj")


@dataclass(frozen=True, slots=True)
class CanonicalPart:
    """The box ``offset, extent`` of canonical tensor ``name``, stored in ``shape``, which may lack the
    box's leading dims of size 1.
    """

    name: str
    whole: Shape
    offset: Shape
    extent: Shape
    shape: Shape
    alias: bool = False  # another name of a tied tensor


class ParameterNames:
    """Resolve the stored names of a model.

    Args:
        shape: Shape of the model.
        stored: Every stored name, and its shape on one rank.
        folder: The checkpoint, for errors.

    Raises:
        CheckpointError: Names the ones that are no parameter of the model.
    """

    def __init__(self, shape: ModelShape, stored: Mapping[str, Shape], folder: Path) -> None:
        table = build_name_table(shape)
        self.parts: dict[str, CanonicalPart] = {}
        for name in stored:
            found = _match_suffix(name, table)
            if found is not None:
                self.parts[name] = found
        left = {name: stored[name] for name in stored if name not in self.parts}
        if left and any(_NUMBERED.match(name) or name.startswith(TIED) for name in left):
            self.parts = _match_layers(shape, stored, table)
            left = {name: stored[name] for name in stored if name not in self.parts}
        if left:
            raise _unknown_names_error(folder, shape, left)


def build_name_table(shape: ModelShape) -> dict[str, CanonicalPart]:
    """Return the parts by every name of a family's parameters: in memory, published, tied."""
    family = families.get_family(shape.family)
    whole = {spec.name: spec.shape for spec in family.parameters(shape)}
    found = {}
    for tensor in family.hub_tensors(shape):
        for name in (tensor.name, *tensor.aliases):
            found[name] = CanonicalPart(
                tensor.canonical, whole[tensor.canonical], tensor.offset, tensor.extent, tensor.shape
            )
    for name, size in whole.items():
        found[name] = CanonicalPart(name, size, (0,) * len(size), size, size)
    for alias, name in family.tied_weights(shape).items():
        size = whole[name]
        found[alias] = CanonicalPart(name, size, (0,) * len(size), size, size, alias=True)
    return found


def _match_suffix(name: str, table: Mapping[str, CanonicalPart]) -> CanonicalPart | None:
    """Return the entry of the longest dot-separated suffix of ``name`` that is in the table."""
    parts = name.split(".")
    return next(
        (table[end] for start in range(len(parts)) if (end := ".".join(parts[start:])) in table), None
    )


def _match_layers(
    shape: ModelShape, stored: Mapping[str, Shape], table: Mapping[str, CanonicalPart]
) -> dict[str, CanonicalPart]:
    """Match the names of a pipeline of numbered layers; empty if its blocks are not the model's."""
    specs = families.get_family(shape.family).parameters(shape)
    in_block = {spec.name.split(f".{spec.layer}.", 1)[1] for spec in specs if spec.layer == 0}
    layers: dict[int, list[tuple[str, str]]] = {}
    for name in stored:
        if match := _NUMBERED.fullmatch(name):
            layers.setdefault(int(match[1]), []).append((name, match[2]))
    blocks: dict[int, dict[str, str]] = {}  # for each layer that is a block: stored name -> name in the block
    for number, names in sorted(layers.items()):
        inside = {name: end for name, rest in names if (end := _find_suffix(rest, in_block)) is not None}
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
    before, after = _non_block_parts(specs, table)
    first, last = min(blocks), max(blocks)
    for number, names in layers.items():
        if number not in blocks:
            for name, _ in names:
                part = _match_unique(
                    name, stored[name], before if number < first else after if number > last else ()
                )
                if part is not None:
                    found[name] = part
    for name, size in stored.items():
        if name.startswith(TIED) and (part := _match_unique(name, size, before)) is not None:
            found[name] = part
    return found


def _non_block_parts(
    specs: Sequence[ParameterSpec], table: Mapping[str, CanonicalPart]
) -> tuple[list[tuple[str, CanonicalPart]], list[tuple[str, CanonicalPart]]]:
    """Return the parts before and after the blocks, by name. A tied output layer counts as after."""
    at = next(index for index, spec in enumerate(specs) if spec.layer is not None)
    before = [(spec.name, table[spec.name]) for spec in specs[:at]]
    after = [(spec.name, table[spec.name]) for spec in specs[at:] if spec.layer is None]
    after += [(name, part) for name, part in table.items() if part.alias]
    return before, after


def _find_suffix(name: str, ends: Iterable[str]) -> str | None:
    return next((end for end in ends if name == end or name.endswith(f".{end}")), None)


def _match_unique(
    name: str, size: Shape, candidates: Sequence[tuple[str, CanonicalPart]]
) -> CanonicalPart | None:
    """Return the only candidate that a layer's parameter can be, or None.

    Candidates are tried by the last two parts of the name, then by the last part and an equal shape, then by
    the last part and a shape that the tensor axis may have cut.
    """
    parts = name.split(".")
    tests = (
        lambda known, part: parts[-2:] == known.split(".")[-2:],
        lambda known, part: parts[-1] == known.split(".")[-1] and size == part.shape,
        lambda known, part: parts[-1] == known.split(".")[-1] and _may_be_cut(size, part.shape),
    )
    for test in tests:
        found = {part for known, part in candidates if test(known, part) and _may_be_cut(size, part.shape)}
        if len(found) == 1:
            return found.pop()
    return None


def _may_be_cut(size: Shape, whole: Shape) -> bool:
    """Return whether the shapes are equal except for one dim, which may be shorter."""
    return (
        len(size) == len(whole)
        and sum(a != b for a, b in zip(size, whole, strict=True)) <= 1
        and all(a <= b for a, b in zip(size, whole, strict=True))
    )


def rank_boxes(
    part: CanonicalPart, stored: str, sizes: Sequence[Shape | None], folder: Path
) -> list[Box | None]:
    """Return each tensor rank's box of the canonical tensor. ``sizes`` are the ranks' shapes; None if a rank
    has nothing.

    A parameter is whole on every rank, or cut along one dim into consecutive parts.

    Raises:
        CheckpointError: It is neither.
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
            f"{stored} has shapes {', '.join(map(str, dict.fromkeys(shapes)))} on {len(sizes)} tensor ranks "
            f"of {folder}",
            f"{part.name} of this model is {part.shape}, whole or cut along one dim",
            "set the model options to those of the checkpoint, or save it from a run without a tensor axis",
        )
    )


def _consecutive(
    part: CanonicalPart, sizes: Sequence[Shape | None], dim: int, at: int
) -> Iterator[Box | None]:
    start = part.offset[at]
    for size in sizes:
        if size is None or not size[dim]:
            yield None
            continue
        offset = tuple(start if index == at else low for index, low in enumerate(part.offset))
        extent = tuple(size[dim] if index == at else whole for index, whole in enumerate(part.extent))
        yield Box(offset, extent)
        start += size[dim]


def _unknown_names_error(folder: Path, shape: ModelShape, names: Mapping[str, Shape]) -> CheckpointError:
    listed = ", ".join(f"{name} {size}" for name, size in list(names.items())[:3])
    listed += f" and {len(names) - 3} more" if len(names) > 3 else ""
    return CheckpointError(
        Problem(
            str(folder),
            f"{folder} contains {listed}, which is no parameter of {shape.family}",
            "parameters have the names that transformers gives them, with anything before; layers of a "
            "pipeline are an embedding, blocks, a "
            "norm and an output layer",
            "set the model options to those of the checkpoint, or save it from transformers' own",
        )
    )
