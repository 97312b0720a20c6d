"""Checkpoints that DeepSpeed 0.19 opens itself, with ``engine.load_checkpoint(PATH)``, at the stage and layout that they are written for.

    PATH/latest                                                        the tag: global_step4
    PATH/global_step4/mp_rank_00_model_states.pt                       weights; without ZeRO the optimizer's state too
    PATH/global_step4/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt what one of ZeRO's ranks has of the optimizer
    PATH/global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt        ZeRO 3, in place of mp_rank_00_...: names, no weights
    PATH/global_step4/layer_00-model_states.pt                         a stage of a pipeline: its weights

They fit an engine that this toolkit builds for the model (see ``deepspeed_layout.py``), with DeepSpeed's own defaults. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from toolkit import families
from toolkit.checkpoint import adam, manifest, states
from toolkit.checkpoint.catalog import Made, Piece, byte_length
from toolkit.checkpoint.formats import deepspeed_layout, deepspeed_states, torch_zip
from toolkit.checkpoint.formats.deepspeed_geometry import pieces_of_runs
from toolkit.checkpoint.formats.deepspeed_layout import SUB_GROUP, Flat, ModelRank, Parameter
from toolkit.checkpoint.formats.deepspeed_states import FP32, Records, Written
from toolkit.checkpoint.nearby import model_unknown
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIM, WEIGHTS_DTYPE
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, Source
from toolkit.checkpoint.target import Target, TargetFile
from toolkit.config.reshard import TargetConfig
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape
from toolkit.plan.deepspeed import tensor_dim

NAME = "deepspeed"
SCHEDULER = (
    "a learning-rate scheduler of the program continues at the checkpoint's step: DeepSpeed's own, and of torch those whose "
    "state is a count, LambdaLR (transformers' schedules), StepLR and CosineAnnealingLR among them. For SequentialLR, CyclicLR "
    "and schedulers that wrap others call load_checkpoint with load_lr_scheduler_states=False and set it yourself"
)


def lay_out(source: Source, config: TargetConfig, *, sub_group: int = SUB_GROUP) -> Target:
    """The files of ``config.zero`` over ``config.parallel``.

    Args:
        sub_group: ``zero_optimization.sub_group_size`` of the run that opens them.

    Raises:
        InputError: the source does not say what model it is of.
        CheckpointError: DeepSpeed, or this writer, cannot have it so; the optimizer's settings are not known.
    """
    if source.shape is None:
        raise model_unknown(source.folder)
    of = _written(source, source.shape, config)
    ranks = deepspeed_layout.model_ranks(source.shape, config.parallel)
    laid = _Laid(
        of,
        f"global_step{of.step}",
        {
            rank.number: deepspeed_layout.flats(rank, of.stage, of.data, sub_group) if of.stage else ()
            for rank in ranks
        },
    )
    for rank in ranks:
        laid.model_files(rank)
        if of.stage:
            laid.optimizer_files(rank)
    tag = f"global_step{of.step}".encode()
    tensors = _tensors(source.shape, of)
    scalars = {key: value for key, value in source.catalog.scalars.items() if key != LOSS_SCALER}
    return Target(
        format=NAME,
        namespace=source.namespace,
        step=of.step,
        tensors=tensors,
        pieces=Made(tensors, laid.pieces),
        copies=Made(tensors, laid.copies),
        files=[*laid.files, TargetFile("latest", len(tag), {0: tag})],
        manifest=manifest.BESIDE,
        scalars=scalars | {MODEL: asdict(source.shape), OPTIM: dict(of.optim), WEIGHTS_DTYPE: of.dtype},
        identity=f"{of} {source.shape} {config.parallel} {sub_group}",
        notes=(
            adam.words_of_groups(
                of.optim, families.get_family(source.shape.family).parameters(source.shape), "DeepSpeed"
            ),
            SCHEDULER,
        ),
    )


# ---- deciding what is written


def _written(source: Source, shape: ModelShape, config: TargetConfig) -> Written:
    """Raises CheckpointError naming everything that stands against it."""
    stage, parallel = int(config.zero.name.removeprefix("stage")), config.parallel
    dtype = states.weights_dtype(source, config.precision)
    kept = adam.moments(source, config)
    # Groups with their settings are there without moments too: a run that opens it makes moments of its own.
    of_adam = adam.problems if kept else adam.settings_problems
    wrong = [*_layout_problems(shape, config, stage, dtype), *of_adam(source, config, "DeepSpeed")]
    if wrong:
        raise CheckpointError(*wrong)
    step, samples = source.step or 0, source.catalog.scalars.get(CONSUMED)
    counted = adam.steps(source) if kept else step
    assert counted is not None
    return Written(
        stage=stage,
        data=parallel.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        dtype=dtype,
        step=step,
        samples=samples if isinstance(samples, int) else 0,
        optimizer_step=counted,
        moments=kept,
        optim=adam.settings(source, config),
    )


def _layout_problems(shape: ModelShape, config: TargetConfig, stage: int, dtype: str) -> Iterator[Problem]:
    """What the toolkit's engines refuse too (``plan/rules_engine.py``, ``plan/rules_axes.py``), and what is not written yet."""
    parallel, zero = config.parallel, f"target.zero={config.zero.name}"
    if parallel.expert > 1:
        yield Problem(
            "target.parallel.expert",
            f"target.parallel.expert={parallel.expert}",
            "files of an expert axis are not written",
            "write target.parallel.expert=1, or train from the source itself: resume=PATH",
        )
    if parallel.tensor > 1 and parallel.pipeline > 1:
        yield Problem(
            "target.parallel.tensor",
            f"target.parallel.tensor={parallel.tensor} with target.parallel.pipeline={parallel.pipeline}",
            "under DeepSpeed the toolkit has one axis beside data at a time",
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
            "files of fp16, with its loss scaler, are not written",
            "write target.precision=bf16 or fp32, or train from the source itself: resume=PATH",
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
            "a tensor rank of DeepSpeed has whole key-value heads",
            "write a divisor of their number",
        )
    for spec in families.get_family(shape.family).parameters(shape):
        dim = tensor_dim(spec.name)
        if dim is None and spec.layer is not None and spec.decays:
            yield Problem(
                "target.parallel.tensor",
                f"{seen} with a model of family {shape.family}",
                f"DeepSpeed's tensor axis cuts linear layers, and {spec.name} is none",
                "write target.parallel.tensor=1",
            )
            return
        if dim is not None and spec.shape[dim] % ranks:
            yield Problem(
                "target.parallel.tensor",
                f"{seen}, {spec.name} {list(spec.shape)}",
                f"tensor ranks have equal parts of dim {dim}",
                "write a number that divides it",
            )
            return


def _tensors(shape: ModelShape, of: Written) -> dict[TensorKey, TensorInfo]:
    """Under ZeRO 3 in 16 bits the files hold the masters alone."""
    parameters = families.get_family(shape.family).parameters(shape)
    wide = of.dtype == "float32"
    held = [] if of.stage == 3 and not wide else [(WEIGHT, of.dtype)]
    if not wide:
        held.append((MASTER, "float32"))
    held += [(state, "float32") for state in of.moments]
    return {
        TensorKey(state, spec.name): TensorInfo(dtype, spec.shape)
        for state, dtype in held
        for spec in parameters
    }


# ---- files and the places in them


@dataclass
class _Laid:
    """The files of a checkpoint, and where each tensor lies in them: whole, or in pieces of flat buffers."""

    of: Written
    folder: str
    flats: dict[int, tuple[Flat, ...]]  # by model rank
    files: list[TargetFile] = field(default_factory=list)
    _whole: dict[TensorKey, list[tuple[Parameter, str, int]]] = field(default_factory=dict)  # file and byte
    _in_flats: dict[str, list[tuple[int, Flat, int]]] = field(
        default_factory=dict
    )  # model rank, buffer, number in it; by canonical name
    _begins: dict[tuple[int, str, int], list[tuple[str, int]]] = field(
        default_factory=dict
    )  # rank, label, buffer -> by ZeRO's rank

    def model_files(self, rank: ModelRank) -> None:
        """Those of the weights."""
        of, records = self.of, Records()
        name = f"{self.folder}/mp_rank_{rank.number:02d}_model_states.pt"
        weights = None if of.pipeline > 1 else deepspeed_states.module(rank, of, records)
        optimizer = None if of.stage else deepspeed_states.plain_optimizer(rank, of, records)
        state = deepspeed_states.model_state(rank, of, weights, optimizer, self.flats[rank.number])
        begins = self._add(name if of.stage < 3 else self._zero_name(0, rank.number, "model"), state, records)
        if of.stage == 3:
            self.files += [
                replace(self.files[-1], name=self._zero_name(number, rank.number, "model"))
                for number in range(1, of.data)
            ]
            return
        if optimizer is not None:
            for one in rank.parameters:
                for moment in of.moments:
                    self._whole.setdefault(TensorKey(moment, one.canonical), []).append(
                        (one, name, begins[moment, one.name])
                    )
        if of.pipeline > 1:
            records, name = Records(), f"{self.folder}/layer_{rank.number:02d}-model_states.pt"
            layer = OrderedDict(
                (one.name.removeprefix(f"{rank.number}."), tensor)
                for one, tensor in zip(
                    rank.parameters, deepspeed_states.module(rank, of, records).values(), strict=True
                )
            )
            begins = self._add(name, layer, records)
        for one in rank.parameters:
            self._whole.setdefault(TensorKey(WEIGHT, one.canonical), []).append((one, name, begins[one.name]))

    def optimizer_files(self, rank: ModelRank) -> None:
        """One for each of ZeRO's ranks."""
        of, buffers = self.of, self.flats[rank.number]
        for flat in buffers:
            for index, one in enumerate(flat.parameters):
                self._in_flats.setdefault(one.canonical, []).append((rank.number, flat, index))
        for number in range(of.data):
            name, records = self._zero_name(number, rank.number, "optim"), Records()
            value = (
                deepspeed_states.zero12(buffers, of, number, records)
                if of.stage < 3
                else deepspeed_states.zero3(buffers, of, records)
            )
            # As torch.save does of a path: files of two ranks that change places are found by it.
            begins = self._add(name, value, records, root=PurePosixPath(name).stem)
            for (label, buffer), begin in begins.items():
                self._begins.setdefault((rank.number, label, buffer), []).append((name, begin))

    def _zero_name(self, number: int, rank: int, kind: str) -> str:
        prefix = "bf16_" if kind == "optim" and self.of.dtype == "bfloat16" else ""
        return f"{self.folder}/{prefix}zero_pp_rank_{number}_mp_rank_{rank:02d}_{kind}_states.pt"

    def _add(self, name: str, value: Any, records: Records, root: str = torch_zip.ROOT) -> dict[Any, int]:
        layout = torch_zip.lay_out(name, value, records.storages, root)
        self.files.append(layout.file)
        return records.begins(layout.storages)

    def pieces(self, key: TensorKey) -> tuple[Piece, ...]:
        """Each element once."""
        return tuple(piece for first, make in self._places(key) if first for piece in make())

    def copies(self, key: TensorKey) -> tuple[Piece, ...]:
        """What is written again: on further tensor ranks or stages, and fp32 weights in the module beside those of the optimizer."""
        return tuple(piece for first, make in self._places(key) if not first for piece in make())

    def _places(self, key: TensorKey) -> Iterator[tuple[bool, Callable[[], tuple[Piece, ...]]]]:
        """Whatever makes the pieces of a box of the tensor, and whether it is the first that does of this box."""
        seen: set[Box] = set()
        of = self.of
        for one, file, begin in self._whole.get(key, ()):
            yield (
                one.box not in seen,
                partial(_whole_piece, key, of.dtype if key.state == WEIGHT else "float32", one, file, begin),
            )
            seen.add(one.box)
        updated = WEIGHT if of.dtype == "float32" else MASTER
        label = FP32 if key.state == updated else key.state
        for rank, flat, index in self._in_flats.get(key.name, ()):
            where = self._begins.get((rank, label, flat.number))
            if where is not None:
                one = flat.parameters[index]
                yield one.box not in seen, partial(_flat_pieces, key, flat, index, of, where)
                seen.add(one.box)


def _whole_piece(key: TensorKey, dtype: str, one: Parameter, file: str, begin: int) -> tuple[Piece, ...]:
    return (Piece(key, dtype, one.whole, one.box, file, begin, begin + byte_length(dtype, one.box.shape)),)


def _flat_pieces(
    key: TensorKey, flat: Flat, index: int, of: Written, where: Sequence[tuple[str, int]]
) -> tuple[Piece, ...]:
    one, runs = flat.parameters[index], deepspeed_layout.runs(flat, index, of.stage, of.data)
    return pieces_of_runs(key, "float32", one.whole, one.box, runs, lambda rank: (*where[rank], None))
