"""Read Megatron-core's ``torch_dist`` checkpoints: a folder of one iteration, or one with a tracker file.

    PATH/latest_checkpointed_iteration.txt      4
    PATH/iter_0000004/.metadata                 positions of tensors (``dcp/metadata.py``)
    PATH/iter_0000004/__0_0.distcp              tensors, including those of the optimizer
    PATH/iter_0000004/common.pt                 everything else (``common.py``)
    PATH/iter_0000004/metadata.json             the format's name and version

Keys are those of the whole model (``keys.py``), so the layout that wrote them does not matter. The families'
tables map boxes of canonical tensors to rows of Megatron-core's. Of the distributed optimizer's sharding
types, ``fully_reshardable`` is supported. Imports neither torch nor Megatron-core.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import DTYPES, Catalog, DamagedFile, LazyPieces, TensorPiece
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.dcp.metadata import (
    ChunkedTensor,
    DcpMetadata,
    TensorChunk,
    check_coverage,
    load_metadata,
    open_chunk,
)
from toolkit.checkpoint.formats.megatron.args import read_model_shape
from toolkit.checkpoint.formats.megatron.common import COMMON, RESHARDABLE, CommonState, load_common
from toolkit.checkpoint.formats.megatron.keys import EXTRA, MegatronKey, parse_key
from toolkit.checkpoint.formats.stored_tensor import StoredTensor
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.planner import MAX_PROBLEMS
from toolkit.checkpoint.scalars import OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error, read_tracker
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.families.megatron import MegatronTensor, TensorCut, TensorPart, intersect_parts

NAME = "megatron"
TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
BACKEND = "torch_dist"
KEPT_CHUNKS = 512  # cached positions of chunks, because a fused projection is requested three times


def find(path: Path) -> Path | None:
    """Return the folder of the iteration that ``path`` is or that its tracker file names."""
    if (path / TRACKER).is_file():
        return read_tracker(path, TRACKER, iteration_folder)
    return path if (path / FORMAT).is_file() and (path / COMMON).is_file() else None


def iteration_folder(iteration: str) -> str:
    """Return the folder for the text of a tracker file, a number or ``release``."""
    return f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration


def open_source(folder: Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open a Megatron-core checkpoint. Raises CheckpointError if it is damaged, unsupported or of another
    model, UnknownModelError if ``model`` is required.
    """
    try:
        _check_backend(folder)
        common = load_common(folder)
        if common.sharding not in (None, RESHARDABLE):
            raise _sharding_error(folder, common.sharding or "")
        metadata = load_metadata(folder)
        _check_sharding(folder, metadata)
        shape = model or read_model_shape(common.args)
        if shape is None:
            raise unknown_model_error(folder)
        return _source(folder, common, metadata, shape)
    except DamagedFile as damage:
        raise foreign_damage_error(folder, damage) from damage


def _check_backend(folder: Path) -> None:
    path = folder / FORMAT
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except FileNotFoundError as error:
        raise DamagedFile(
            FORMAT, f"{path} is missing", f"Megatron-core's checkpoints must be in its format {BACKEND}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(
            FORMAT, f"{path} is not what Megatron-core writes ({error})", "it records the format"
        ) from error
    if backend != BACKEND:
        raise CheckpointError(
            Problem(
                str(folder),
                f"{folder} is in Megatron-core's format {backend}",
                f"only its format {BACKEND} is supported",
                f"save it with --ckpt-format {BACKEND}",
            )
        )


def _check_sharding(folder: Path, metadata: DcpMetadata) -> None:
    if any(".gbuf_idx_" in key for key in metadata.tensors):
        raise _sharding_error(folder, "dp_reshardable")
    if metadata.reshaped or any(".param_state/" in key for key in metadata.objects):
        raise _sharding_error(
            folder, "fully_sharded_model_space" if metadata.reshaped else "dp_zero_gather_scatter"
        )


def _sharding_error(folder: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        Problem(
            str(folder),
            f"{folder} has the distributed optimizer's state sharded as {kind}",
            f"only {RESHARDABLE} is supported: other types depend on the layout of the run that saved it",
            f"save once more from that run with distrib_optim_sharding_type='{RESHARDABLE}' (Megatron-LM: "
            "--dist-ckpt-optim-fully-reshardable), or without the distributed optimizer",
        )
    )


# ---- which chunk has what


@dataclass(frozen=True, slots=True)
class _ChunkPart:
    """The part of one of Megatron-core's tensors that a chunk contains.

    Attributes:
        chunk: The chunk.
        dtype: Torch's name.
        stack_index: Index of the tensor in the chunk's first dims.
        box: The part of the tensor.
    """

    chunk: TensorChunk
    dtype: str
    stack_index: tuple[int, ...]
    box: Box


# (state, Megatron-core's name) -> key -> parts. Several keys may have copies of the same values.
_PartsByTensor = dict[tuple[str, str], dict[str, list[_ChunkPart]]]


def _locate_parts(
    folder: Path, metadata: DcpMetadata, shape: ModelShape, tables: Mapping[str, MegatronTensor]
) -> tuple[_PartsByTensor, list[str]]:
    """Return the position of every tensor, and keys of states without a counterpart here.

    Raises:
        DamagedFile: A tensor is incomplete. CheckpointError: Names tensors that are not the model's, or have
            other shapes.
    """
    parts_by_tensor: _PartsByTensor = {}
    omitted, problems = [], []
    keys = {name: parse_key(name) for name in metadata.tensors}
    for name, key in sorted(keys.items(), key=lambda item: item[1] is None or item[1].weight != item[0]):
        stored = metadata.tensors[name]
        if key is None:
            omitted.append(name)
            continue
        tensor = tables.get(key.name.format(layer=0, expert=0))
        if tensor is None or stored.dtype not in DTYPES or not _fits(key, stored, tensor, shape):
            problems.append(_shape_problem(folder, name, stored, key, tensor, shape))
            continue
        check_coverage(name, stored)
        state = key.state
        own = metadata.tensors.get(key.weight)
        if state == MASTER and own is not None and own.dtype == stored.dtype:
            # An fp32 weight is its own master; Megatron-core's distributed optimizer saves it twice.
            state = WEIGHT
        rows = tensor.shape[0] // 2 if key.half else 0
        for chunk in stored.chunks:
            for member, stack_index, box in key.members(chunk.box):
                if rows:
                    box = Box((box.offset[0] + rows, *box.offset[1:]), box.shape)
                parts_by_tensor.setdefault((state, member), {}).setdefault(key.source, []).append(
                    _ChunkPart(chunk, stored.dtype, stack_index, box)
                )
    if problems:
        raise CheckpointError(*problems[:MAX_PROBLEMS])
    return parts_by_tensor, omitted


def _fits(key: MegatronKey, stored: ChunkedTensor, tensor: MegatronTensor, shape: ModelShape) -> bool:
    wanted = key.whole_shape(tensor.shape, shape)
    if tensor.cut is TensorCut.vocabulary:  # padding rows may follow
        return (
            len(stored.shape) == len(wanted)
            and stored.shape[0] >= wanted[0]
            and stored.shape[1:] == wanted[1:]
        )
    return stored.shape == wanted


def _shape_problem(
    folder: Path,
    name: str,
    stored: ChunkedTensor,
    key: MegatronKey,
    tensor: MegatronTensor | None,
    shape: ModelShape,
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
        "set the model options to those of the checkpoint",
    )


class _Pieces:
    """Create pieces of canonical tensors on access, because the position of a chunk's tensor is in the
    chunk's own header.
    """

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        tables: Mapping[str, MegatronTensor],
        parts_by_tensor: _PartsByTensor,
    ) -> None:
        self._folder, self._tables = folder, tables
        self._stored = {key: _distinct(by_key) for key, by_key in parts_by_tensor.items()}
        self._open = lru_cache(maxsize=KEPT_CHUNKS)(self._open_chunk)
        self.shapes = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
        self.owners: dict[str, list[str]] = {name: [] for name in self.shapes}
        for tensor in tables.values():
            for canonical in dict.fromkeys(part.canonical for part in tensor.parts):
                self.owners[canonical].append(tensor.name)

    def tensors(self, states: Sequence[str]) -> dict[TensorKey, TensorInfo]:
        """Return the canonical tensors with these states. Raises CheckpointError if a tensor's parts are
        incomplete or have several dtypes.
        """
        infos: dict[TensorKey, TensorInfo] = {}
        for state in states:
            for name, shape in self.shapes.items():
                dtypes = {
                    chunk_part.dtype
                    for owner in self.owners[name]
                    for of_key in self._stored.get((state, owner), ())
                    for chunk_part in of_key
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
                            "a checkpoint must have every tensor of the model, each in one dtype",
                            "describe the model that the checkpoint was made of",
                        )
                    )
                infos[TensorKey(state, name)] = TensorInfo(dtypes.pop(), shape)
        return infos

    def has_copies(self, key: TensorKey) -> bool:
        return any(len(self._stored[key.state, owner]) > 1 for owner in self.owners[key.name])

    def pieces(self, key: TensorKey) -> tuple[TensorPiece, ...]:
        return tuple(piece for owner in self.owners[key.name] for piece in self._owner_pieces(key, owner, 0))

    def copies(self, key: TensorKey) -> tuple[TensorPiece, ...]:
        return tuple(
            piece
            for owner in self.owners[key.name]
            for number in range(1, len(self._stored[key.state, owner]))
            for piece in self._owner_pieces(key, owner, number)
        )

    def _owner_pieces(self, key: TensorKey, owner: str, number: int) -> Iterator[TensorPiece]:
        """Yield the pieces of ``key`` in one of Megatron-core's tensors, from its ``number``-th copy."""
        for chunk_part in self._stored[key.state, owner][number]:
            tensor = _member(self._open(chunk_part.chunk, chunk_part.dtype), chunk_part.stack_index)
            for part in intersect_parts(
                self._tables[owner].parts, chunk_part.box.offset, chunk_part.box.shape
            ):
                if part.canonical == key.name:
                    box = Box(part.offset, part.extent)
                    yield from torch_zip.tensor_pieces(_view(tensor, part), key, self.shapes[key.name], box)

    def _open_chunk(self, chunk: TensorChunk, dtype: str) -> StoredTensor:
        return open_chunk(self._folder, chunk, dtype)


def _distinct(by_key: Mapping[str, list[_ChunkPart]]) -> list[list[_ChunkPart]]:
    """Return each distinct copy once, because several keys may name the same bytes."""
    distinct: dict[frozenset[tuple[TensorChunk, tuple[int, ...]]], list[_ChunkPart]] = {}
    for chunk_parts in by_key.values():
        distinct.setdefault(frozenset((part.chunk, part.stack_index) for part in chunk_parts), chunk_parts)
    return list(distinct.values())


def _member(tensor: StoredTensor, stack_index: tuple[int, ...]) -> StoredTensor:
    """Return one tensor of a stack."""
    offset = tensor.offset + sum(
        index * stride for index, stride in zip(stack_index, tensor.strides, strict=False)
    )
    return StoredTensor(
        tensor.storage, offset, tensor.shape[len(stack_index) :], tensor.strides[len(stack_index) :]
    )


def _view(tensor: StoredTensor, part: TensorPart) -> StoredTensor:
    """Return ``part``, whose ``at`` is relative to the tensor's corner, with the canonical tensor's order
    of dims.
    """
    offset = tensor.offset + sum(
        index * stride for index, stride in zip(part.at, tensor.strides, strict=True)
    )
    shape, strides = (
        (part.shape[::-1], tensor.strides[::-1]) if part.transposed else (part.shape, tensor.strides)
    )
    lead = part.dropped
    return StoredTensor(tensor.storage, offset, (1,) * lead + shape, (0,) * lead + strides)


# ---- the source


def _source(folder: Path, common: CommonState, metadata: DcpMetadata, shape: ModelShape) -> CheckpointSource:
    tables = {tensor.name: tensor for tensor in families.get_family(shape.family).megatron_tensors(shape)}
    parts_by_tensor, unknown_keys = _locate_parts(folder, metadata, shape, tables)
    pieces = _Pieces(folder, shape, tables, parts_by_tensor)
    tensors = pieces.tensors(list(dict.fromkeys([WEIGHT, *(state for state, _ in parts_by_tensor)])))
    moments = {key.state for key in tensors} & {EXP_AVG, EXP_AVG_SQ}
    if moments and OPTIMIZER_STEP not in common.scalars:
        raise DamagedFile(
            COMMON,
            f"{folder / COMMON} does not record the optimizer's number of steps",
            "Adam's bias correction needs the number of steps",
        )
    scalars = dict(common.scalars) if common.step is None else {STEP: common.step, **common.scalars}
    copied = {key: info for key, info in tensors.items() if pieces.has_copies(key)}
    objects = sorted({key.partition("/")[0] for key in metadata.objects if EXTRA not in key})
    return CheckpointSource(
        format=NAME,
        catalog=Catalog(
            folder, tensors, LazyPieces(tensors, pieces.pieces), scalars, LazyPieces(copied, pieces.copies)
        ),
        namespace=families.get_family(shape.family).namespace,
        step=common.step,
        shape=shape,
        description=_description(metadata),
        omitted=(*common.omitted, *objects, *unknown_keys),
        damage_error=foreign_damage_error,
    )


def _description(metadata: DcpMetadata) -> dict[str, str]:
    keys = [key for name in metadata.tensors if (key := parse_key(name)) is not None]
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
        + (", separate gate and up projections" if halved else ""),
        "optimizer": optimizer,
    }
