"""Megatron-core's ``torch_dist`` checkpoints, laid out: opened by ``megatron.core.dist_checkpointing.load`` in any layout.

One folder serves runs with the distributed optimizer, with the one of 16 bits and with that of fp32: keys of all three lead to the same
bytes (``dcp_metadata.py``), and so do the names of either layer spec (``megatron_keys.py``). Chunks are those of ``parallel.tensor``
ranks, so that a run of that layout reads no more than it takes; other layouts read parts of chunks. What does depend on the run:

* with expert parallelism experts have an optimizer of their own, so that ``common.pt`` is written for ``parallel.expert`` above 1 or not;
* the vocabulary is written without padding: loaders pad with zeros, as in training;
* keys are stacked, as ``content_metadata`` in ``common.pt`` says, which a loader gives to ``sharded_state_dict``.

Imports neither torch nor Megatron-core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from toolkit import families
from toolkit.checkpoint import adam, manifest, states
from toolkit.checkpoint.catalog import DTYPES, Piece
from toolkit.checkpoint.formats import dcp_metadata, megatron_common, torch_zip
from toolkit.checkpoint.formats.dcp_metadata import METADATA, Blob, Chunk, Metadata, Stored
from toolkit.checkpoint.formats.megatron import BACKEND, FORMAT, NAME, TRACKER, folder_of
from toolkit.checkpoint.formats.megatron_common import COMMON
from toolkit.checkpoint.formats.megatron_keys import MASTERS, Slot, objects_of, slots_of
from toolkit.checkpoint.formats.pickles import Storage, StoredTensor
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIM
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, Source
from toolkit.checkpoint.target import Checksum, Target, TargetFile
from toolkit.config.reshard import TargetConfig
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.families.megatron import MegatronTensor, TensorCut, TensorPart, intersect_parts, local_boxes

FILE_BYTES = 4 * 2**30  # of one file, except for a single larger chunk
SCHEDULER = (
    "it has neither a state of a learning rate scheduler (opt_param_scheduler) nor Megatron-LM's arguments (args): loaders of "
    "megatron.core do not ask for them, the training loop of Megatron-LM does"
)


def lay_out(source: Source, config: TargetConfig) -> Target:
    """Raises CheckpointError: the model is not one that Megatron-core has, its layout does not fit, or the optimizer's is not known."""
    shape = source.shape
    if shape is None:
        raise CheckpointError(
            Problem(
                "target.format",
                f"{source.folder} is of no family of models",
                "Megatron-core has models of families",
                "write target.format=native, or deepspeed",
            )
        )
    wrong = [*_layout_problems(shape, config), *adam.problems(source, config, "Megatron-core")]
    if wrong:
        raise CheckpointError(*wrong)
    kept = adam.moments(source, config)
    tensors = _tensors(source, config, shape, optimizer=bool(kept))
    iteration = folder_of("release" if source.step is None else str(source.step))
    laid = _Laid(
        iteration, shape, config.parallel.tensor, config.parallel.pipeline, tensors, with_masters=bool(kept)
    )
    laid.lay_out()
    scaler = (
        source.catalog.scalars.get(LOSS_SCALER)
        if states.weights_dtype(source, config.precision) == "float16"
        else None
    )
    state = None
    if kept:
        state = megatron_common.Adam(
            step=adam.steps(source) or 0,
            settings=adam.settings(source, config),
            scaler=scaler if isinstance(scaler, Mapping) else None,
        )
    samples = source.catalog.scalars.get(CONSUMED)
    common = megatron_common.lay_out(
        f"{iteration}/{COMMON}",
        step=source.step,
        adam=state,
        apart=config.parallel.expert > 1,
        consumed_samples=samples if isinstance(samples, int) else None,
    )
    backend = {
        "sharded_backend": BACKEND,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    small = {
        f"{iteration}/{METADATA}": dcp_metadata.encode(Metadata(laid.stored(), laid.objects())),
        f"{iteration}/{FORMAT}": json.dumps(backend).encode(),
        TRACKER: b"release" if source.step is None else str(source.step).encode(),
    }
    scalars = {**source.catalog.scalars, MODEL: asdict(shape)} | (
        {OPTIM: dict(state.settings)} if state else {}
    )
    files = [
        *laid.files(),
        common,
        *(TargetFile(name, len(content), {0: content}) for name, content in small.items()),
    ]
    return Target(
        format=NAME,
        namespace=source.namespace,
        step=source.step or 0,
        tensors=tensors,
        pieces=laid.pieces,
        files=files,
        identity=f"{shape} {config.parallel} {state} {sorted((str(key), info.dtype) for key, info in tensors.items())}",
        manifest=manifest.BESIDE,
        scalars=scalars,
        notes=_notes(shape, config, state.settings) if state else (),
    )


# ---- deciding what is written


def _notes(shape: ModelShape, config: TargetConfig, settings: Mapping[str, Any]) -> tuple[str, ...]:
    groups = adam.words_of_groups(
        settings, families.get_family(shape.family).parameters(shape), "Megatron-core"
    )
    if not shape.num_local_experts:
        return groups, SCHEDULER
    which = "above 1" if config.parallel.expert > 1 else "of 1"
    return (
        groups,
        SCHEDULER,
        f"its optimizer state is for runs with expert parallelism {which}: there experts have an optimizer of their own",
    )


def _layout_problems(shape: ModelShape, config: TargetConfig) -> Iterator[Problem]:
    tensor, pipeline, expert = config.parallel.tensor, config.parallel.pipeline, config.parallel.expert
    for table in families.get_family(shape.family).megatron_tensors(shape):
        length = {
            TensorCut.rows: table.shape[0],
            TensorCut.gated: table.shape[0] // 2,
            TensorCut.columns: table.shape[-1],
        }.get(table.cut, 0)
        if length % tensor:
            yield Problem(
                "target.parallel.tensor",
                f"target.parallel.tensor={tensor}, {table.name} {table.shape}",
                f"each tensor rank has as many of its {length} {table.cut}",
                "write a divisor of it",
            )
            break
    if pipeline > shape.num_hidden_layers:
        yield Problem(
            "target.parallel.pipeline",
            f"target.parallel.pipeline={pipeline}, {shape.num_hidden_layers} layers",
            "each stage has a layer",
            f"write target.parallel.pipeline={shape.num_hidden_layers} or less",
        )
    if expert > 1 and (not shape.num_local_experts or shape.num_local_experts % expert):
        yield Problem(
            "target.parallel.expert",
            f"target.parallel.expert={expert}, {shape.num_local_experts or 'no'} experts",
            "each expert rank has as many experts",
            "write a divisor of their number, or leave it out",
        )


def _tensors(
    source: Source, config: TargetConfig, shape: ModelShape, *, optimizer: bool
) -> dict[TensorKey, TensorInfo]:
    """What is written, of the model's own tensors. A weight that the source lacks is among them, so that it is asked for by name."""
    found = states.tensors_of(source, config.precision, optimizer=optimizer)
    dtype = states.weights_dtype(source, config.precision)
    specs = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
    weights = {
        key: found.get(key, TensorInfo(dtype, size))
        for name, size in specs.items()
        for key in (TensorKey(WEIGHT, name),)
    }
    return weights | {key: info for key, info in found.items() if key.state != WEIGHT and key.name in specs}


# ---- files


@dataclass(frozen=True, slots=True)
class _Form:
    """A file of ``torch.save`` with one tensor of zeros, from byte 0 on: all of one dtype and shape are the same.

    Attributes:
        head, tail: its bytes before and after the tensor's.
        places: of the checksum of the tensor's bytes.
    """

    head: bytes
    numbytes: int
    tail: bytes
    places: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.head) + self.numbytes + len(self.tail)


@cache
def _form(dtype: str, shape: tuple[int, ...]) -> _Form:
    storage = Storage("0", dtype, math.prod(shape))
    layout = torch_zip.lay_out("", StoredTensor.whole(storage, shape), [storage])
    begin, numbytes = layout.storages["0"], storage.numel * DTYPES[dtype].itemsize
    parts = sorted(layout.file.fixed.items())
    head, tail = (
        b"".join(content for at, content in parts if (at < begin) is before) for before in (True, False)
    )
    assert (len(head), begin + numbytes + len(tail)) == (begin, layout.file.numbytes), (
        "fixed bytes follow each other"
    )
    return _Form(
        head, numbytes, tail, tuple(place for check in layout.file.checksums for place in check.places)
    )


@dataclass(slots=True)
class _Files:
    """The files of one rank, filled one after the other. Blobs have names within ``folder``, as ``.metadata`` has."""

    folder: str
    rank: int
    done: list[TargetFile] = field(default_factory=list)
    _fixed: dict[int, bytes] = field(default_factory=dict)
    _checks: list[Checksum] = field(default_factory=list)
    _end: int = 0

    def add(self, dtype: str, shape: tuple[int, ...]) -> tuple[Blob, int]:
        """Room for a tensor, and the byte at which its elements begin."""
        form = _form(dtype, shape)
        if self._end and self._end + form.length > FILE_BYTES:
            self.close()
        begin = -(-self._end // torch_zip.ALIGNMENT) * torch_zip.ALIGNMENT
        data = begin + len(form.head)
        self._fixed[begin] = form.head
        self._fixed[data + form.numbytes] = form.tail
        if form.places:
            self._checks.append(
                Checksum(data, data + form.numbytes, tuple(begin + place for place in form.places))
            )
        self._end = begin + form.length
        return Blob(self._name, begin, self._end), data

    def add_object(self, value: object) -> Blob:
        layout = torch_zip.lay_out(self._name, value, [], begin=self._end)
        begin, self._end = self._end, layout.file.numbytes
        self._fixed |= layout.file.fixed
        return Blob(self._name, begin, self._end)

    def close(self) -> None:
        if self._end:
            self.done.append(
                TargetFile(f"{self.folder}/{self._name}", self._end, self._fixed, tuple(self._checks))
            )
        self._fixed, self._checks, self._end = {}, [], 0

    @property
    def _name(self) -> str:
        return f"__{self.rank}_{len(self.done)}.distcp"


class _Laid:
    """Every chunk of every tensor in its place.

    Args:
        with_masters: keys of the optimizer's fp32 weights too, which are the model's own in fp32.
    """

    def __init__(
        self,
        folder: str,
        shape: ModelShape,
        tensor: int,
        pipeline: int,
        tensors: Mapping[TensorKey, TensorInfo],
        *,
        with_masters: bool,
    ) -> None:
        self._shape, self._ranks, self._stages = shape, tensor, pipeline
        self._tables = families.get_family(shape.family).megatron_tensors(shape)
        self._tensors, self._with_masters = tensors, with_masters
        self._states = tuple(dict.fromkeys(key.state for key in tensors))
        self._sizes = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
        self._files = [_Files(folder, rank) for rank in range(tensor * pipeline)]
        self._chunks: dict[str, list[Chunk]] = {}
        self._about: dict[str, tuple[str, tuple[int, ...]]] = {}  # key -> dtype, shape
        self._nothing: Blob | None = None
        self.pieces: dict[TensorKey, list[Piece]] = {key: [] for key in tensors}

    def lay_out(self) -> None:
        for table in self._tables:
            for rank in range(1 if table.cut is TensorCut.whole else self._ranks):
                for box in self._boxes(table, rank):
                    self._chunk(table, self._files[self._stage(table) * self._ranks + rank], box)
        self._nothing = self._files[0].add_object([None])
        for files in self._files:
            files.close()

    def files(self) -> list[TargetFile]:
        return [file for files in self._files for file in files.done]

    def stored(self) -> dict[str, Stored]:
        return {
            key: Stored(dtype, shape, tuple(self._chunks[key])) for key, (dtype, shape) in self._about.items()
        }

    def objects(self) -> dict[str, Blob]:
        assert self._nothing is not None, "asked for after lay_out"
        return dict.fromkeys(objects_of(self._tables, self._shape), self._nothing)

    def _stage(self, table: MegatronTensor) -> int:
        if table.layer is not None:
            return table.layer * self._stages // self._shape.num_hidden_layers
        return 0 if table.name.startswith("embedding.") else self._stages - 1

    def _boxes(self, table: MegatronTensor, rank: int) -> Iterator[Box]:
        """What a tensor rank has of it, without padding."""
        rows = table.shape[0]
        padded = -(-rows // self._ranks) * self._ranks if table.cut is TensorCut.vocabulary else rows
        for offset, extent in local_boxes(table, rank, self._ranks, padded):
            height = min(extent[0], rows - offset[0])
            if height > 0:
                yield Box(offset, (height, *extent[1:]))

    def _chunk(self, table: MegatronTensor, files: _Files, box: Box) -> None:
        slots = slots_of(table, self._shape)
        whole = Box((*slots[0].place, *box.offset), (*(1 for _ in slots[0].place), *box.shape))
        parts = intersect_parts(table.parts, box.offset, box.shape)
        for state in self._states:
            info = self._tensors.get(TensorKey(state, parts[0].canonical))
            if info is None:  # frozen
                continue
            blob, begin = files.add(info.dtype, whole.shape)
            file = f"{files.folder}/{blob.file}"
            for part in parts:
                self.pieces[TensorKey(state, part.canonical)].append(
                    self._piece(state, info.dtype, part, box, file, begin)
                )
            for key in self._keys(state, info.dtype, slots):
                self._about[key] = (info.dtype, (*slots[0].counts, *table.shape))
                self._chunks.setdefault(key, []).append(Chunk(whole, blob))

    def _piece(self, state: str, dtype: str, part: TensorPart, box: Box, file: str, begin: int) -> Piece:
        assert part.shape[1:] == box.shape[1:], f"{part.canonical} is not whole rows"
        itemsize, row = DTYPES[dtype].itemsize, math.prod(box.shape[1:])
        first = begin + part.at[0] * row * itemsize
        return Piece(
            TensorKey(state, part.canonical),
            dtype,
            self._sizes[part.canonical],
            Box(part.offset, part.extent),
            file,
            first,
            first + math.prod(part.shape) * itemsize,
            transposed=part.transposed,
        )

    def _keys(self, state: str, dtype: str, slots: Sequence[Slot]) -> Iterator[str]:
        for slot in slots:
            names = [state]
            if state == WEIGHT:
                yield slot.key
                names = list(MASTERS) if self._with_masters and dtype == "float32" else []
            elif state == MASTER:
                names = list(MASTERS)
            yield from (f"optimizer.state.{name}.{slot.key}" for name in names)
