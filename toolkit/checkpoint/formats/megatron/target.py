"""Write Megatron-core's ``torch_dist`` checkpoints, which ``megatron.core.dist_checkpointing.load`` loads in
any layout.

One folder serves runs with the distributed optimizer, the 16-bit optimizer and the fp32 optimizer: keys of
all three lead to the same bytes (``dcp/metadata.py``), as do the names of either layer spec (``keys.py``).
Chunks are those of ``parallel.tensor`` ranks, so that a run of that layout reads only its own bytes; other
layouts read parts of chunks. These parts depend on the run:

* With expert parallelism, experts have a separate optimizer, so ``common.pt`` depends on whether
``parallel.expert`` is above 1.
* The vocabulary is written without padding: loaders pad with zeros, as in training.
* Keys are stacked, as ``content_metadata`` in ``common.pt`` records, which a loader passes to
``sharded_state_dict``.

Imports neither torch nor Megatron-core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from toolkit import families
from toolkit.checkpoint import adam, manifest, target_tensors
from toolkit.checkpoint.catalog import DTYPES, TensorPiece
from toolkit.checkpoint.formats.dcp.metadata import (
    METADATA,
    Blob,
    ChunkedTensor,
    DcpMetadata,
    TensorChunk,
    encode_metadata,
)
from toolkit.checkpoint.formats.megatron.common import COMMON, AdamState, lay_out_common
from toolkit.checkpoint.formats.megatron.keys import MASTERS, KeySlot, key_slots, object_keys
from toolkit.checkpoint.formats.megatron.rank_files import RankFiles
from toolkit.checkpoint.formats.megatron.source import BACKEND, FORMAT, NAME, TRACKER, iteration_folder
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIM
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, CheckpointSource
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.config.reshard import TargetConfig
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.families.megatron import MegatronTensor, TensorCut, TensorPart, intersect_parts, local_boxes

SCHEDULER = (
    "it has neither the state of a learning rate scheduler (opt_param_scheduler) nor Megatron-LM's "
    "arguments (args): loaders of "
    "megatron.core do not need them, but the training loop of Megatron-LM does"
)


def lay_out(source: CheckpointSource, config: TargetConfig) -> CheckpointTarget:
    """Plan the files of the target. Raises CheckpointError if Megatron-core lacks the model, the layout does
    not fit, or optimizer settings are unknown.
    """
    shape = source.shape
    if shape is None:
        raise CheckpointError(
            Problem(
                "target.format",
                f"{source.folder} belongs to no model family",
                "Megatron-core checkpoints require a model family",
                "write target.format=native, or deepspeed",
            )
        )
    problems = [*_layout_problems(shape, config), *adam.find_problems(source, config, "Megatron-core")]
    if problems:
        raise CheckpointError(*problems)
    moments = adam.moment_states(source, config)
    tensors = _tensors(source, config, shape, optimizer=bool(moments))
    iteration = iteration_folder("release" if source.step is None else str(source.step))
    layout = _TargetFiles(
        iteration,
        shape,
        config.parallel.tensor,
        config.parallel.pipeline,
        tensors,
        with_masters=bool(moments),
    )
    layout.lay_out()
    scaler = (
        source.catalog.scalars.get(LOSS_SCALER)
        if target_tensors.choose_weights_dtype(source, config.precision) == "float16"
        else None
    )
    state = None
    if moments:
        state = AdamState(
            step=adam.step_count(source) or 0,
            settings=adam.settings(source, config),
            scaler=scaler if isinstance(scaler, Mapping) else None,
        )
    samples = source.catalog.scalars.get(CONSUMED)
    common = lay_out_common(
        f"{iteration}/{COMMON}",
        step=source.step,
        adam=state,
        separate_experts=config.parallel.expert > 1,
        consumed_samples=samples if isinstance(samples, int) else None,
    )
    backend = {
        "sharded_backend": BACKEND,
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    small = {
        f"{iteration}/{METADATA}": encode_metadata(DcpMetadata(layout.stored(), layout.objects())),
        f"{iteration}/{FORMAT}": json.dumps(backend).encode(),
        TRACKER: b"release" if source.step is None else str(source.step).encode(),
    }
    scalars = {**source.catalog.scalars, MODEL: asdict(shape)} | (
        {OPTIM: dict(state.settings)} if state else {}
    )
    files = [
        *layout.files(),
        common,
        *(TargetFile(name, len(content), {0: content}) for name, content in small.items()),
    ]
    return CheckpointTarget(
        format=NAME,
        namespace=source.namespace,
        step=source.step or 0,
        tensors=tensors,
        pieces=layout.pieces,
        files=files,
        identity=f"{shape} {config.parallel} {state} "
        f"{sorted((str(key), info.dtype) for key, info in tensors.items())}",
        manifest=manifest.FOREIGN_NAME,
        scalars=scalars,
        notes=_notes(shape, config, state.settings) if state else (),
    )


# ---- deciding what is written


def _notes(shape: ModelShape, config: TargetConfig, settings: Mapping[str, Any]) -> tuple[str, ...]:
    groups = adam.describe_parameter_groups(
        settings, families.get_family(shape.family).parameters(shape), "Megatron-core"
    )
    if not shape.num_local_experts:
        return groups, SCHEDULER
    which = "above 1" if config.parallel.expert > 1 else "of 1"
    return (
        groups,
        SCHEDULER,
        f"its optimizer state is for runs with expert parallelism {which}, because above 1 experts have a "
        "separate optimizer",
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
                f"tensor ranks must have equal parts of its {length} {table.cut}",
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
            "expert ranks must have equal numbers of experts",
            "write a divisor of their number, or leave it out",
        )


def _tensors(
    source: CheckpointSource, config: TargetConfig, shape: ModelShape, *, optimizer: bool
) -> dict[TensorKey, TensorInfo]:
    """Return the tensors to write. Weights that the source lacks are included, so that they are reported
    by name.
    """
    found = target_tensors.select_target_tensors(source, config.precision, optimizer=optimizer)
    dtype = target_tensors.choose_weights_dtype(source, config.precision)
    specs = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
    weights = {
        key: found.get(key, TensorInfo(dtype, size))
        for name, size in specs.items()
        for key in (TensorKey(WEIGHT, name),)
    }
    return weights | {key: info for key, info in found.items() if key.state != WEIGHT and key.name in specs}


# ---- files


class _TargetFiles:
    """Assign every chunk of every tensor to a file.

    Args:
        folder: Folder of the iteration.
        shape: Shape of the model.
        tensor, pipeline: Number of tensor ranks and of pipeline stages.
        tensors: Tensors to write.
        with_masters: Also write keys of the optimizer's fp32 weights, which in fp32 are the model's own.
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
        self._files = [RankFiles(folder, rank) for rank in range(tensor * pipeline)]
        self._chunks: dict[str, list[TensorChunk]] = {}
        self._key_info: dict[str, tuple[str, tuple[int, ...]]] = {}  # key -> dtype, shape
        self._empty_object: Blob | None = None
        self.pieces: dict[TensorKey, list[TensorPiece]] = {key: [] for key in tensors}

    def lay_out(self) -> None:
        for table in self._tables:
            for rank in range(1 if table.cut is TensorCut.whole else self._ranks):
                for box in self._boxes(table, rank):
                    self._add_chunk(table, self._files[self._stage(table) * self._ranks + rank], box)
        self._empty_object = self._files[0].add_object([None])
        for files in self._files:
            files.close()

    def files(self) -> list[TargetFile]:
        return [file for files in self._files for file in files.done]

    def stored(self) -> dict[str, ChunkedTensor]:
        return {
            key: ChunkedTensor(dtype, shape, tuple(self._chunks[key]))
            for key, (dtype, shape) in self._key_info.items()
        }

    def objects(self) -> dict[str, Blob]:
        assert self._empty_object is not None, "call lay_out first"
        return dict.fromkeys(object_keys(self._tables, self._shape), self._empty_object)

    def _stage(self, table: MegatronTensor) -> int:
        if table.layer is not None:
            return table.layer * self._stages // self._shape.num_hidden_layers
        return 0 if table.name.startswith("embedding.") else self._stages - 1

    def _boxes(self, table: MegatronTensor, rank: int) -> Iterator[Box]:
        """Yield the parts of ``table`` on a tensor rank, without padding."""
        rows = table.shape[0]
        padded = -(-rows // self._ranks) * self._ranks if table.cut is TensorCut.vocabulary else rows
        for offset, extent in local_boxes(table, rank, self._ranks, padded):
            height = min(extent[0], rows - offset[0])
            if height > 0:
                yield Box(offset, (height, *extent[1:]))

    def _add_chunk(self, table: MegatronTensor, files: RankFiles, box: Box) -> None:
        slots = key_slots(table, self._shape)
        whole = Box((*slots[0].index, *box.offset), (*(1 for _ in slots[0].index), *box.shape))
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
                self._key_info[key] = (info.dtype, (*slots[0].counts, *table.shape))
                self._chunks.setdefault(key, []).append(TensorChunk(whole, blob))

    def _piece(
        self, state: str, dtype: str, part: TensorPart, box: Box, file: str, begin: int
    ) -> TensorPiece:
        assert part.shape[1:] == box.shape[1:], f"{part.canonical} is not whole rows"
        itemsize, row = DTYPES[dtype].itemsize, math.prod(box.shape[1:])
        first = begin + part.at[0] * row * itemsize
        return TensorPiece(
            TensorKey(state, part.canonical),
            dtype,
            self._sizes[part.canonical],
            Box(part.offset, part.extent),
            file,
            first,
            first + math.prod(part.shape) * itemsize,
            transposed=part.transposed,
        )

    def _keys(self, state: str, dtype: str, slots: Sequence[KeySlot]) -> Iterator[str]:
        for slot in slots:
            names = [state]
            if state == WEIGHT:
                yield slot.key
                names = list(MASTERS) if self._with_masters and dtype == "float32" else []
            elif state == MASTER:
                names = list(MASTERS)
            yield from (f"optimizer.state.{name}.{slot.key}" for name in names)
