"""Write checkpoints that DeepSpeed 0.19 loads itself with ``engine.load_checkpoint(PATH)``, at the stage and
layout of the target.

    PATH/latest                                             the tag: global_step4
    PATH/global_step4/
        mp_rank_00_model_states.pt                          weights; without ZeRO the optimizer's state too
        [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    the optimizer's part of one of ZeRO's ranks
        zero_pp_rank_0_mp_rank_00_model_states.pt           ZeRO 3, replaces mp_rank_00_...: names, no weights
        layer_00-model_states.pt                            weights of a pipeline stage

They fit an engine that this toolkit builds for the model (see ``target_layout.py``), with DeepSpeed's
defaults. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from toolkit import families
from toolkit.checkpoint import adam, manifest, target_tensors
from toolkit.checkpoint.catalog import LazyPieces, TensorPiece, byte_length
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed import target_layout, target_state
from toolkit.checkpoint.formats.deepspeed.geometry import range_pieces
from toolkit.checkpoint.formats.deepspeed.target_layout import (
    DEFAULT_SUB_GROUP_SIZE,
    FlatBuffer,
    ModelRank,
    TargetParameter,
)
from toolkit.checkpoint.formats.deepspeed.target_state import FP32, FileTensors, TargetSettings
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIM, WEIGHTS_DTYPE
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, CheckpointSource
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.config.reshard import TargetConfig
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.plan.deepspeed import tensor_parallel_dim

NAME = "deepspeed"
SCHEDULER = (
    "a learning-rate scheduler of the program continues at the checkpoint's step: DeepSpeed's own, and of "
    "torch those whose "
    "state is a count, LambdaLR (transformers' schedules), StepLR and CosineAnnealingLR among them. For "
    "SequentialLR, CyclicLR "
    "and schedulers that wrap others, call load_checkpoint with load_lr_scheduler_states=False and set the "
    "state yourself"
)


def lay_out(
    source: CheckpointSource, config: TargetConfig, *, sub_group: int = DEFAULT_SUB_GROUP_SIZE
) -> CheckpointTarget:
    """Lay out the files of ``config.zero`` over ``config.parallel``.

    Args:
        source: The source.
        config: Layout, precision and optimizer settings of the target.
        sub_group: ``zero_optimization.sub_group_size`` of the run that will load them.

    Raises:
        UnknownModelError: The source does not describe its model.
        CheckpointError: DeepSpeed or this writer does not support the layout, or optimizer settings are
            unknown.
    """
    if source.shape is None:
        raise unknown_model_error(source.folder)
    settings = _choose_settings(source, source.shape, config)
    ranks = target_layout.build_model_ranks(source.shape, config.parallel)
    layout = _TargetFiles(
        settings,
        f"global_step{settings.step}",
        {
            rank.number: target_layout.build_flat_buffers(rank, settings.stage, settings.data, sub_group)
            if settings.stage
            else ()
            for rank in ranks
        },
    )
    for rank in ranks:
        layout.add_model_files(rank)
        if settings.stage:
            layout.add_optimizer_files(rank)
    tag = f"global_step{settings.step}".encode()
    tensors = _tensors(source.shape, settings)
    scalars = {key: value for key, value in source.catalog.scalars.items() if key != LOSS_SCALER}
    return CheckpointTarget(
        format=NAME,
        namespace=source.namespace,
        step=settings.step,
        tensors=tensors,
        pieces=LazyPieces(tensors, layout.pieces),
        copies=LazyPieces(tensors, layout.copies),
        files=[*layout.files, TargetFile("latest", len(tag), {0: tag})],
        manifest=manifest.FOREIGN_NAME,
        scalars=scalars
        | {MODEL: asdict(source.shape), OPTIM: dict(settings.optim), WEIGHTS_DTYPE: settings.dtype},
        identity=f"{settings} {source.shape} {config.parallel} {sub_group}",
        notes=(
            adam.describe_parameter_groups(
                settings.optim, families.get_family(source.shape.family).parameters(source.shape), "DeepSpeed"
            ),
            SCHEDULER,
        ),
    )


# ---- deciding what is written


def _choose_settings(source: CheckpointSource, shape: ModelShape, config: TargetConfig) -> TargetSettings:
    """Choose the settings of the target. Raises CheckpointError naming everything that prevents the
    conversion.
    """
    stage, parallel = int(config.zero.name.removeprefix("stage")), config.parallel
    dtype = target_tensors.choose_weights_dtype(source, config.precision)
    moments = adam.moment_states(source, config)
    # Groups have settings even without moments: a run that loads the files creates its own moments.
    find_adam_problems = adam.find_problems if moments else adam.find_settings_problems
    problems = [
        *_layout_problems(shape, config, stage, dtype),
        *find_adam_problems(source, config, "DeepSpeed"),
    ]
    if problems:
        raise CheckpointError(*problems)
    step, samples = source.step or 0, source.catalog.scalars.get(CONSUMED)
    counted = adam.step_count(source) if moments else step
    assert counted is not None
    return TargetSettings(
        stage=stage,
        data=parallel.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        dtype=dtype,
        step=step,
        samples=samples if isinstance(samples, int) else 0,
        optimizer_step=counted,
        moments=moments,
        optim=adam.settings(source, config),
    )


def _layout_problems(shape: ModelShape, config: TargetConfig, stage: int, dtype: str) -> Iterator[Problem]:
    """Yield what the toolkit's engines also reject (``plan/rules_engine.py``, ``plan/rules_axes.py``), and
    what is not supported.
    """
    parallel, zero = config.parallel, f"target.zero={config.zero.name}"
    if parallel.expert > 1:
        yield Problem(
            "target.parallel.expert",
            f"target.parallel.expert={parallel.expert}",
            "files for expert parallelism are not supported",
            "write target.parallel.expert=1, or resume from the source directly: resume=PATH",
        )
    if parallel.tensor > 1 and parallel.pipeline > 1:
        yield Problem(
            "target.parallel.tensor",
            f"target.parallel.tensor={parallel.tensor} with target.parallel.pipeline={parallel.pipeline}",
            "under DeepSpeed the toolkit combines data parallelism with one other axis",
            "write one of them as 1, or target.format=megatron",
        )
    if parallel.pipeline > 1 and stage > 1:
        yield Problem(
            "target.zero",
            f"{zero} with target.parallel.pipeline={parallel.pipeline}",
            "a pipeline of DeepSpeed has ZeRO 0 or 1",
            "write target.zero=stage1",
        )
    if parallel.pipeline > shape.num_hidden_layers:
        yield Problem(
            "target.parallel.pipeline",
            f"target.parallel.pipeline={parallel.pipeline}, {shape.num_hidden_layers} layers",
            "each stage has a layer",
            f"write target.parallel.pipeline={shape.num_hidden_layers} or less",
        )
    if dtype == "float16":
        yield Problem(
            "target.precision",
            f"weights in {dtype}",
            "fp16 files, with their loss scaler, are not supported",
            "write target.precision=bf16 or fp32, or resume from the source directly: resume=PATH",
        )
    elif dtype != "float32" and stage == 0:
        yield Problem(
            "target.zero",
            f"{zero} with weights in {dtype}",
            "in 16 bits DeepSpeed's stage 0 takes a hidden optimizer step",
            "write target.zero=stage1, which computes what stage 0 should",
        )
    if parallel.tensor > 1:
        yield from _tensor_problems(shape, parallel.tensor)


def _tensor_problems(shape: ModelShape, ranks: int) -> Iterator[Problem]:
    seen = f"target.parallel.tensor={ranks}"
    if shape.num_key_value_heads % ranks:
        yield Problem(
            "target.parallel.tensor",
            f"{seen}, {shape.num_key_value_heads} key-value heads",
            "each tensor rank of DeepSpeed has whole key-value heads",
            "write a divisor of their number",
        )
    for spec in families.get_family(shape.family).parameters(shape):
        dim = tensor_parallel_dim(spec.name)
        if dim is None and spec.layer is not None and spec.decays:
            yield Problem(
                "target.parallel.tensor",
                f"{seen} with a model of family {shape.family}",
                f"DeepSpeed's tensor axis cuts linear layers, and {spec.name} is not in one",
                "write target.parallel.tensor=1",
            )
            return
        if dim is not None and spec.shape[dim] % ranks:
            yield Problem(
                "target.parallel.tensor",
                f"{seen}, {spec.name} {list(spec.shape)}",
                f"tensor ranks must have equal parts of dim {dim}",
                "write a number that divides it",
            )
            return


def _tensors(shape: ModelShape, settings: TargetSettings) -> dict[TensorKey, TensorInfo]:
    """Return the target's tensors. Under ZeRO 3 in 16 bits the files contain the masters only."""
    parameters = families.get_family(shape.family).parameters(shape)
    wide = settings.dtype == "float32"
    states = [] if settings.stage == 3 and not wide else [(WEIGHT, settings.dtype)]
    if not wide:
        states.append((MASTER, "float32"))
    states += [(state, "float32") for state in settings.moments]
    return {
        TensorKey(state, spec.name): TensorInfo(dtype, spec.shape)
        for state, dtype in states
        for spec in parameters
    }


# ---- files and the places in them


@dataclass
class _TargetFiles:
    """The files of a checkpoint, and the position of each tensor: whole, or in pieces of flat buffers."""

    settings: TargetSettings
    folder: str
    flats: dict[int, tuple[FlatBuffer, ...]]  # buffers by model rank
    files: list[TargetFile] = field(default_factory=list)
    # file and first byte
    _whole: dict[TensorKey, list[tuple[TargetParameter, str, int]]] = field(default_factory=dict)
    # canonical name -> model rank, buffer, index in it
    _in_flats: dict[str, list[tuple[int, FlatBuffer, int]]] = field(default_factory=dict)
    # (model rank, label, buffer) -> position for each of ZeRO's ranks
    _begins: dict[tuple[int, str, int], list[tuple[str, int]]] = field(default_factory=dict)

    def add_model_files(self, rank: ModelRank) -> None:
        """Add the files with the weights."""
        settings, records = self.settings, FileTensors()
        name = f"{self.folder}/mp_rank_{rank.number:02d}_model_states.pt"
        weights = None if settings.pipeline > 1 else target_state.module_state(rank, settings, records)
        optimizer = None if settings.stage else target_state.plain_optimizer_state(rank, settings, records)
        state = target_state.model_state(rank, settings, weights, optimizer, self.flats[rank.number])
        begins = self._add(
            name if settings.stage < 3 else self._zero_name(0, rank.number, "model"), state, records
        )
        if settings.stage == 3:
            self.files += [
                replace(self.files[-1], name=self._zero_name(number, rank.number, "model"))
                for number in range(1, settings.data)
            ]
            return
        if optimizer is not None:
            for parameter in rank.parameters:
                for moment in settings.moments:
                    self._whole.setdefault(TensorKey(moment, parameter.canonical), []).append(
                        (parameter, name, begins[moment, parameter.name])
                    )
        if settings.pipeline > 1:
            records, name = FileTensors(), f"{self.folder}/layer_{rank.number:02d}-model_states.pt"
            layer = OrderedDict(
                (parameter.name.removeprefix(f"{rank.number}."), tensor)
                for parameter, tensor in zip(
                    rank.parameters, target_state.module_state(rank, settings, records).values(), strict=True
                )
            )
            begins = self._add(name, layer, records)
        for parameter in rank.parameters:
            self._whole.setdefault(TensorKey(WEIGHT, parameter.canonical), []).append(
                (parameter, name, begins[parameter.name])
            )

    def add_optimizer_files(self, rank: ModelRank) -> None:
        """Add one file for each of ZeRO's ranks."""
        settings, buffers = self.settings, self.flats[rank.number]
        for flat in buffers:
            for index, parameter in enumerate(flat.parameters):
                self._in_flats.setdefault(parameter.canonical, []).append((rank.number, flat, index))
        for number in range(settings.data):
            name, records = self._zero_name(number, rank.number, "optim"), FileTensors()
            value = (
                target_state.zero12_state(buffers, settings, number, records)
                if settings.stage < 3
                else target_state.zero3_state(buffers, settings, records)
            )
            # torch.save names the records after the path, which reveals files of two ranks that were
            # exchanged.
            begins = self._add(name, value, records, root=PurePosixPath(name).stem)
            for (label, buffer), begin in begins.items():
                self._begins.setdefault((rank.number, label, buffer), []).append((name, begin))

    def _zero_name(self, number: int, rank: int, kind: str) -> str:
        prefix = "bf16_" if kind == "optim" and self.settings.dtype == "bfloat16" else ""
        return f"{self.folder}/{prefix}zero_pp_rank_{number}_mp_rank_{rank:02d}_{kind}_states.pt"

    def _add(self, name: str, value: Any, records: FileTensors, root: str = torch_zip.ROOT) -> dict[Any, int]:
        layout = torch_zip.lay_out(name, value, records.storages, root)
        self.files.append(layout.file)
        return records.begins(layout.storages)

    def pieces(self, key: TensorKey) -> tuple[TensorPiece, ...]:
        """Return each element once."""
        return tuple(piece for first, make in self._piece_makers(key) if first for piece in make())

    def copies(self, key: TensorKey) -> tuple[TensorPiece, ...]:
        """Return what is written again: on further tensor ranks or stages, and fp32 weights in both module
        and optimizer.
        """
        return tuple(piece for first, make in self._piece_makers(key) if not first for piece in make())

    def _piece_makers(self, key: TensorKey) -> Iterator[tuple[bool, Callable[[], tuple[TensorPiece, ...]]]]:
        """Yield functions that create the pieces of a box of the tensor, each with whether it is the first
        for its box.
        """
        seen: set[Box] = set()
        settings = self.settings
        for parameter, file, begin in self._whole.get(key, ()):
            yield (
                parameter.box not in seen,
                partial(
                    _whole_piece,
                    key,
                    settings.dtype if key.state == WEIGHT else "float32",
                    parameter,
                    file,
                    begin,
                ),
            )
            seen.add(parameter.box)
        updated = WEIGHT if settings.dtype == "float32" else MASTER
        label = FP32 if key.state == updated else key.state
        for rank, flat, index in self._in_flats.get(key.name, ()):
            where = self._begins.get((rank, label, flat.number))
            if where is not None:
                parameter = flat.parameters[index]
                yield parameter.box not in seen, partial(_flat_pieces, key, flat, index, settings, where)
                seen.add(parameter.box)


def _whole_piece(
    key: TensorKey, dtype: str, parameter: TargetParameter, file: str, begin: int
) -> tuple[TensorPiece, ...]:
    return (
        TensorPiece(
            key,
            dtype,
            parameter.whole,
            parameter.box,
            file,
            begin,
            begin + byte_length(dtype, parameter.box.shape),
        ),
    )


def _flat_pieces(
    key: TensorKey, flat: FlatBuffer, index: int, settings: TargetSettings, buffers: Sequence[tuple[str, int]]
) -> tuple[TensorPiece, ...]:
    parameter = flat.parameters[index]
    ranges = target_layout.buffer_ranges(flat, index, settings.stage, settings.data)
    return range_pieces(
        key, "float32", parameter.whole, parameter.box, ranges, lambda rank: (*buffers[rank], None)
    )
