"""Megatron-core's ``torch_dist`` checkpoints, read: a folder of one iteration, or one with a tracker file above it.

    PATH/latest_checkpointed_iteration.txt      4
    PATH/iter_0000004/.metadata                 what lies where (``dcp_metadata.py``)
    PATH/iter_0000004/__0_0.distcp              tensors, those of the optimizer too
    PATH/iter_0000004/common.pt                 everything else (``megatron_common.py``)
    PATH/iter_0000004/metadata.json             the format's name and version

Keys are those of the whole model (``megatron_keys.py``), so that the layout that wrote them does not matter. The families' tables say
which boxes of canonical tensors lie in which rows of Megatron-core's. Of the distributed optimizer the ``fully_reshardable`` kind is
read; the others are refused by name. Imports neither torch nor Megatron-core.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import DTYPES, Catalog, Damage, Made, Piece
from toolkit.checkpoint.formats import dcp_metadata, megatron_args, megatron_common, torch_zip
from toolkit.checkpoint.formats.dcp_metadata import Chunk, Metadata, Stored
from toolkit.checkpoint.formats.megatron_common import COMMON, RESHARDABLE, Common
from toolkit.checkpoint.formats.megatron_keys import EXTRA, Key, parse
from toolkit.checkpoint.formats.pickles import StoredTensor
from toolkit.checkpoint.nearby import model_unknown
from toolkit.checkpoint.planner import MOST_PROBLEMS
from toolkit.checkpoint.scalars import OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import Source, named_in, vendors_refusal
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.families.megatron import MegatronTensor, TensorCut, TensorPart, intersect_parts

NAME = "megatron"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
BACKEND = "torch_dist"
KEPT_CHUNKS = 512  # whose place in their file is remembered: a fused projection is asked for three times


def find(path: Path) -> Path | None:
    if (path / TRACKER).is_file():
        return named_in(path, TRACKER, folder_of)
    return path if (path / FORMAT).is_file() and (path / COMMON).is_file() else None


def folder_of(iteration: str) -> str:
    """What a tracker file means: a number, or ``release``."""
    return f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration


def open_source(folder: Path, model: ModelShape | None = None) -> Source:
    """Raises CheckpointError: it is damaged, of a kind that is not read, or of another model. InputError: the model must be said."""
    try:
        _check_backend(folder)
        common = megatron_common.load(folder)
        if common.sharding not in (None, RESHARDABLE):
            raise _sharded(folder, common.sharding or "")
        metadata = dcp_metadata.load(folder)
        _check_sharding(folder, metadata)
        shape = model or megatron_args.model_of(common.args)
        if shape is None:
            raise model_unknown(folder)
        return _source(folder, common, metadata, shape)
    except Damage as damage:
        raise vendors_refusal(folder, damage) from damage


def _check_backend(folder: Path) -> None:
    path = folder / FORMAT
    try:
        found = json.loads(path.read_bytes())["sharded_backend"]
    except FileNotFoundError as error:
        raise Damage(
            FORMAT, f"{path} is missing", f"Megatron-core's checkpoints are read in its format {BACKEND}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Damage(
            FORMAT, f"{path} is not what Megatron-core writes ({error})", "it names the format"
        ) from error
    if found != BACKEND:
        raise CheckpointError(
            Problem(
                str(folder),
                f"{folder} is in Megatron-core's format {found}",
                f"its format {BACKEND} is read",
                f"save it with --ckpt-format {BACKEND}",
            )
        )


def _check_sharding(folder: Path, metadata: Metadata) -> None:
    if any(".gbuf_idx_" in key for key in metadata.tensors):
        raise _sharded(folder, "dp_reshardable")
    if metadata.reshaped or any(".param_state/" in key for key in metadata.objects):
        raise _sharded(folder, "fully_sharded_model_space" if metadata.reshaped else "dp_zero_gather_scatter")


def _sharded(folder: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        Problem(
            str(folder),
            f"{folder} has the distributed optimizer's state sharded as {kind}",
            f"it is read where it was saved as {RESHARDABLE}: other kinds depend on the layout of the run that saved it",
            f"let that run save once more with distrib_optim_sharding_type='{RESHARDABLE}' (Megatron-LM: "
            "--dist-ckpt-optim-fully-reshardable), or without the distributed optimizer",
        )
    )


# ---- which chunk has what


@dataclass(frozen=True, slots=True)
class _Held:
    """What a chunk has of one of Megatron-core's tensors.

    Attributes:
        place: of that tensor among the chunk's first dims.
        box: in that tensor.
    """

    chunk: Chunk
    dtype: str
    place: tuple[int, ...]
    box: Box


# (state, Megatron-core's name) -> by the key that it stands under. Several keys: the same values several times.
_Places = dict[tuple[str, str], dict[str, list[_Held]]]


def _places(
    folder: Path, metadata: Metadata, shape: ModelShape, tables: Mapping[str, MegatronTensor]
) -> tuple[_Places, list[str]]:
    """Where everything lies, and keys of state that has no meaning here.

    Raises:
        Damage: a tensor is not whole. CheckpointError: naming tensors that are not the model's, or of other shapes.
    """
    places: _Places = {}
    left_out, problems = [], []
    keys = {name: parse(name) for name in metadata.tensors}
    for name, key in sorted(
        keys.items(), key=lambda item: item[1] is None or item[1].weight != item[0]
    ):  # the model's own come first
        stored = metadata.tensors[name]
        if key is None:
            left_out.append(name)
            continue
        tensor = tables.get(key.name.format(layer=0, expert=0))
        if tensor is None or stored.dtype not in DTYPES or not _fits(key, stored, tensor, shape):
            problems.append(_unfitting(folder, name, stored, key, tensor, shape))
            continue
        dcp_metadata.check_whole(name, stored)
        state = key.state
        own = metadata.tensors.get(key.weight)
        if state == MASTER and own is not None and own.dtype == stored.dtype:
            state = WEIGHT  # in fp32 the weight is its own master; Megatron-core's distributed optimizer saves it twice
        rows = tensor.shape[0] // 2 if key.half else 0
        for chunk in stored.chunks:
            for member, place, box in key.members(chunk.box):
                if rows:
                    box = Box((box.offset[0] + rows, *box.offset[1:]), box.shape)
                places.setdefault((state, member), {}).setdefault(key.source, []).append(
                    _Held(chunk, stored.dtype, place, box)
                )
    if problems:
        raise CheckpointError(*problems[:MOST_PROBLEMS])
    return places, left_out


def _fits(key: Key, stored: Stored, tensor: MegatronTensor, shape: ModelShape) -> bool:
    wanted = key.whole_shape(tensor.shape, shape)
    if tensor.cut is TensorCut.vocabulary:  # rows of padding follow
        return (
            len(stored.shape) == len(wanted)
            and stored.shape[0] >= wanted[0]
            and stored.shape[1:] == wanted[1:]
        )
    return stored.shape == wanted


def _unfitting(
    folder: Path, name: str, stored: Stored, key: Key, tensor: MegatronTensor | None, shape: ModelShape
) -> Problem:
    of_model = f"a model of family {shape.family} with these sizes"
    if tensor is None:
        rule = f"{of_model} has no such tensor"
    elif stored.dtype not in DTYPES:
        rule = f"tensors are of {', '.join(DTYPES)}"
    else:
        rule = f"{of_model} has it as {key.whole_shape(tensor.shape, shape)}"
    return Problem(
        "model",
        f"{folder} has {name}: {stored.dtype} {stored.shape}",
        rule,
        "describe the model that the checkpoint was made of",
    )


class _Pieces:
    """Pieces of canonical tensors, made when they are asked for: a chunk's tensor begins where its own header says."""

    def __init__(
        self, folder: Path, shape: ModelShape, tables: Mapping[str, MegatronTensor], places: _Places
    ) -> None:
        self._folder, self._tables = folder, tables
        self._stored = {place: _distinct(by_key) for place, by_key in places.items()}
        self._open = lru_cache(maxsize=KEPT_CHUNKS)(self._open_chunk)
        self.shapes = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
        self.owners: dict[str, list[str]] = {name: [] for name in self.shapes}
        for tensor in tables.values():
            for canonical in dict.fromkeys(part.canonical for part in tensor.parts):
                self.owners[canonical].append(tensor.name)

    def tensors(self, states: Sequence[str]) -> dict[TensorKey, TensorInfo]:
        """Raises CheckpointError: what a tensor is made of is not all there, or in several dtypes."""
        found: dict[TensorKey, TensorInfo] = {}
        for state in states:
            for name, shape in self.shapes.items():
                dtypes = {
                    held.dtype
                    for owner in self.owners[name]
                    for of_key in self._stored.get((state, owner), ())
                    for held in of_key
                }
                absent = [owner for owner in self.owners[name] if (state, owner) not in self._stored]
                if absent == self.owners[name] and state != WEIGHT:
                    continue  # frozen
                if absent or len(dtypes) > 1:
                    seen = (
                        f"no {state} of {', '.join(absent[:3])}"
                        if absent
                        else f"{state} of {name} in {', '.join(sorted(dtypes))}"
                    )
                    raise CheckpointError(
                        Problem(
                            "model",
                            f"{self._folder} has {seen}",
                            "a checkpoint has every tensor of the model, each in one dtype",
                            "describe the model that the checkpoint was made of",
                        )
                    )
                found[TensorKey(state, name)] = TensorInfo(dtypes.pop(), shape)
        return found

    def copied(self, key: TensorKey) -> bool:
        return any(len(self._stored[key.state, owner]) > 1 for owner in self.owners[key.name])

    def pieces(self, key: TensorKey) -> tuple[Piece, ...]:
        return tuple(piece for owner in self.owners[key.name] for piece in self._of(key, owner, 0))

    def copies(self, key: TensorKey) -> tuple[Piece, ...]:
        return tuple(
            piece
            for owner in self.owners[key.name]
            for number in range(1, len(self._stored[key.state, owner]))
            for piece in self._of(key, owner, number)
        )

    def _of(self, key: TensorKey, owner: str, number: int) -> Iterator[Piece]:
        """What is there of ``key`` in a tensor of Megatron-core's, the ``number``-th time that it is stored."""
        for held in self._stored[key.state, owner][number]:
            tensor = _member(self._open(held.chunk, held.dtype), held.place)
            for part in intersect_parts(self._tables[owner].parts, held.box.offset, held.box.shape):
                if part.canonical == key.name:
                    box = Box(part.offset, part.extent)
                    yield from torch_zip.pieces_of(_view(tensor, part), key, self.shapes[key.name], box)

    def _open_chunk(self, chunk: Chunk, dtype: str) -> StoredTensor:
        return dcp_metadata.open_chunk(self._folder, chunk, dtype)


def _distinct(by_key: Mapping[str, list[_Held]]) -> list[list[_Held]]:
    """What stands under several keys, once for each time that it is stored: keys may name the same bytes."""
    found: dict[frozenset[tuple[Chunk, tuple[int, ...]]], list[_Held]] = {}
    for held in by_key.values():
        found.setdefault(frozenset((one.chunk, one.place) for one in held), held)
    return list(found.values())


def _member(tensor: StoredTensor, place: tuple[int, ...]) -> StoredTensor:
    """One of those that are stacked along the first dims."""
    offset = tensor.offset + sum(index * stride for index, stride in zip(place, tensor.strides, strict=False))
    return StoredTensor(tensor.storage, offset, tensor.shape[len(place) :], tensor.strides[len(place) :])


def _view(tensor: StoredTensor, part: TensorPart) -> StoredTensor:
    """``part``, whose ``at`` counts from the tensor's corner, in the canonical tensor's order of dims."""
    offset = tensor.offset + sum(
        index * stride for index, stride in zip(part.at, tensor.strides, strict=True)
    )
    shape, strides = (
        (part.shape[::-1], tensor.strides[::-1]) if part.transposed else (part.shape, tensor.strides)
    )
    lead = part.dropped
    return StoredTensor(tensor.storage, offset, (1,) * lead + shape, (0,) * lead + strides)


# ---- the source


def _source(folder: Path, common: Common, metadata: Metadata, shape: ModelShape) -> Source:
    tables = {tensor.name: tensor for tensor in families.get_family(shape.family).megatron_tensors(shape)}
    places, strange = _places(folder, metadata, shape, tables)
    made = _Pieces(folder, shape, tables, places)
    tensors = made.tensors(list(dict.fromkeys([WEIGHT, *(state for state, _ in places)])))
    moments = {key.state for key in tensors} & {EXP_AVG, EXP_AVG_SQ}
    if moments and OPTIMIZER_STEP not in common.scalars:
        raise Damage(
            COMMON,
            f"{folder / COMMON} does not say how many steps the optimizer has taken",
            "Adam corrects by the number of its steps",
        )
    scalars = dict(common.scalars) if common.step is None else {STEP: common.step, **common.scalars}
    twice = {key: info for key, info in tensors.items() if made.copied(key)}
    objects = sorted({key.partition("/")[0] for key in metadata.objects if EXTRA not in key})
    return Source(
        format=NAME,
        catalog=Catalog(folder, tensors, Made(tensors, made.pieces), scalars, Made(twice, made.copies)),
        namespace=families.get_family(shape.family).namespace,
        step=common.step,
        shape=shape,
        facts=_facts(metadata),
        left_out=(*common.left_out, *objects, *strange),
        refuse=vendors_refusal,
    )


def _facts(metadata: Metadata) -> dict[str, str]:
    keys = [key for name in metadata.tensors if (key := parse(name)) is not None]
    stacked = any(key.stacked for key in keys)
    halved = any(key.half is not None for key in keys)
    projection = next(
        (
            stored
            for name, stored in metadata.tensors.items()
            if name.endswith("self_attention.linear_qkv.weight")
        ),
        None,
    )
    ranks = len({chunk.box.offset[-2] for chunk in projection.chunks}) if projection is not None else 1
    states = [name.split(".")[2] for name in metadata.tensors if name.startswith("optimizer.state.")]
    kinds = {"param": "distributed", "fp32_param": "of 16 bits"}
    optimizer = " or ".join(kind for state, kind in kinds.items() if state in states) or (
        "of fp32" if states else "none"
    )
    return {
        "written by": "Megatron-core, torch_dist",
        "layout": f"tensor {ranks}",
        "keys": ("stacked" if stacked else "one by one")
        + (", gate and up projection apart" if halved else ""),
        "optimizer": optimizer,
    }
