"""Read checkpoints of DeepSpeed's engines: ZeRO 0 to 3 in any precision, with tensor ranks, pipeline stages
or both.

``files.py`` describes the files. Not carried over: settings of parameter groups, the scheduler's state,
buffers, and what the user's program added (``client_state``). For DeepSpeed 0.19; imports neither it nor
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import Catalog, DamagedFile
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed import files, plain_optimizer, zero
from toolkit.checkpoint.formats.deepspeed.catalog import TensorRanks, build_catalog
from toolkit.checkpoint.formats.deepspeed.contents import RankParameter, Shape, WholeTensor
from toolkit.checkpoint.formats.deepspeed.files import SavedCheckpoint, SavedFile
from toolkit.checkpoint.formats.stored_tensor import StoredTensor
from toolkit.checkpoint.formats.unpickle import ForeignObject
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.scalars import (
    CONSUMED,
    LOSS_SCALER,
    OPTIM,
    OPTIM_SETTINGS,
    OPTIMIZER_STEP,
    SCALER_STATE,
    STEP,
    WEIGHTS_DTYPE,
)
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error, read_tracker
from toolkit.families.base import ModelShape

# Keys that DeepSpeed writes into a model's file; any other is the user's.
_KNOWN = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
    )
)


def find(path: Path) -> Path | None:
    """Return the folder of a tag: ``path``, or what the file ``latest`` in it names."""
    folders = [path]
    if (path / files.LATEST).is_file():
        folders.insert(0, read_tracker(path, files.LATEST))
    return next(
        (folder for folder in folders if not (folder / "zero").is_dir() and files.is_checkpoint(folder)), None
    )


def open_source(folder: Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open a DeepSpeed checkpoint. Raises CheckpointError if it is damaged or unsupported, UnknownModelError
    if ``model`` is required.
    """
    if model is None:
        raise unknown_model_error(folder)
    try:
        saved = files.read_checkpoint(folder)
        scalars = read_scalars(saved)
        catalog = build_catalog(folder, model, read_stages(saved), scalars)
    except DamagedFile as damage:
        raise foreign_damage_error(folder, damage) from damage
    return build_source("deepspeed", catalog, model, describe_layout(saved), saved.models)


def build_source(
    name: str,
    catalog: Catalog,
    model: ModelShape,
    description: Mapping[str, str],
    models: Sequence[SavedFile],
) -> CheckpointSource:
    """Build the source of either of DeepSpeed's formats."""
    step = catalog.scalars[STEP]
    assert isinstance(step, int)
    description = {"written by": f"deepspeed {models[0].content.get('ds_version')}", **description}
    return CheckpointSource(
        format=name,
        catalog=catalog,
        namespace=families.get_family(model.family).namespace,
        step=step,
        shape=model,
        description=description,
        omitted=tuple(find_omitted(models)),
        damage_error=foreign_damage_error,
    )


# ---- tensors


def read_stages(saved: SavedCheckpoint) -> list[TensorRanks]:
    """Return what each rank of each pipeline stage contains.

    A pipeline's layers come first, separate from the stages' optimizers, because their files do not record
    the stage.
    """
    buffers = _buffers(saved)
    layers = [
        {
            name: local
            for number, files_ in saved.layers.items()
            for name, local in _weights(files_[rank].content, buffers, f"{number}.")
        }
        for rank in range(saved.tensor)
    ]
    stages: list[TensorRanks] = [layers] if saved.layers else []
    for stage, ranks in enumerate(read_weights(saved)):
        for tensor, parameters in enumerate(ranks):
            number = stage * saved.tensor + tensor
            shapes = {
                name: local.shape
                for name, local in (parameters or _stage_layers(saved, layers[tensor], stage)).items()
            }
            for name, local in _read_optimizer(saved, number, shapes).items():
                known = parameters.setdefault(name, local)
                known.shape, known.master, known.moments, known.copies = (
                    local.shape,
                    local.master,
                    local.moments,
                    local.copies,
                )
                if saved.stage3:
                    known.model = None  # ZeRO 3 stores a placeholder
        first = saved.models[stage * saved.tensor].content  # only rank 0 records shared parameters
        for name, stored in (first.get("shared_params") or {}).items():
            for parameters in ranks:
                if stored in parameters:
                    parameters[name] = parameters[stored]
        stages.append(drop_placeholders(ranks))
    return stages


def read_weights(saved: SavedCheckpoint) -> list[list[dict[str, RankParameter]]]:
    """Return what the models' files contain, for each stage's tensor ranks; under ZeRO 3 mostly empty
    placeholders.
    """
    buffers, found = _buffers(saved), []
    for stage in range(saved.pipeline):
        ranks = []
        for number in range(stage * saved.tensor, (stage + 1) * saved.tensor):
            module = saved.models[number].content.get("module")
            weights = dict(_weights(module, buffers)) if isinstance(module, Mapping) else {}
            if saved.stage3:
                weights.update(_frozen(saved, number))
            ranks.append(weights)
        found.append(ranks)
    return found


def drop_placeholders(ranks: TensorRanks) -> TensorRanks:
    """Return only parameters with elements."""
    return [{name: local for name, local in rank.items() if math.prod(local.shape)} for rank in ranks]


def _buffers(saved: SavedCheckpoint) -> set[str]:
    return {name for file in saved.models for name in file.content.get("buffer_names") or ()}


def _weights(
    module: Mapping[str, object], buffers: set[str], prefix: str = ""
) -> Iterator[tuple[str, RankParameter]]:
    """Yield the weights of a state dict. A second name of the same tensor is skipped: it is tied, and
    stored once.
    """
    seen = set()
    for name, value in module.items():
        if not isinstance(value, StoredTensor) or prefix + name in buffers:
            continue
        position = (value.storage.begin, value.offset, value.shape)
        if value.numel and position in seen:
            continue
        seen.add(position)
        yield prefix + name, RankParameter(value.shape, model=WholeTensor(value), model_dtype=value.dtype)


def _read_optimizer(
    saved: SavedCheckpoint, number: int, shapes: Mapping[str, Shape]
) -> dict[str, RankParameter]:
    """Return the optimizer's part on one model-parallel rank. ``shapes`` are those of its weights, in the
    model's order.
    """
    model = saved.models[number]
    if saved.partitions:
        groups = model.content.get("param_shapes")
        ranks = saved.partitions[number]
        return zero.read_partitions(
            ranks, zero.shapes_from_slices(ranks, shapes) if groups is None else groups
        )
    if model.content.get("optimizer") is None:
        return {}
    return plain_optimizer.read_optimizer(saved.folder, model, shapes)


def _stage_layers(
    saved: SavedCheckpoint, layers: Mapping[str, RankParameter], stage: int
) -> Mapping[str, RankParameter]:
    """Return a stage's parameters in a pipeline without ZeRO, where no file names them.

    Stages have consecutive layers, and each stage's optimizer records its number of parameters. Raises
    CheckpointError if the numbers do not add up.
    """
    if saved.partitions:
        return layers
    counts = [plain_optimizer.count_parameters(file) for file in saved.models[:: saved.tensor]]
    if sum(counts) != len(layers):
        raise files.unsupported_error(
            saved.folder,
            "is of a pipeline without ZeRO whose optimizers have other parameter counts than its layers",
            "save it with ZeRO 1, which records names",
        )
    first = sum(counts[:stage])
    return dict(list(layers.items())[first : first + counts[stage]])


def _frozen(saved: SavedCheckpoint, number: int) -> Iterator[tuple[str, RankParameter]]:
    """ZeRO 3: yield parameters without optimizer state, whose shares are in the model's files of the data
    ranks.
    """
    content = saved.models[number].content
    shapes, fragments = content.get("frozen_param_shapes") or {}, content.get("frozen_param_fragments") or {}
    shapes = {name: shape for name, shape in shapes.items() if math.prod(shape)}
    if not shapes:
        return
    files_of_ranks = [saved.load_model_file(number, rank) for rank in range(saved.data)]
    for name, shape in shapes.items():
        if name not in fragments:
            raise DamagedFile(
                saved.models[number].name,
                f"{saved.models[number].name} has no fragment of {name}, which is frozen",
                "frozen parameters are saved too, unless DeepSpeed was configured to exclude them",
            )
        shares = [
            (file.name, (file.content.get("frozen_param_fragments") or {}).get(name))
            for file in files_of_ranks
        ]
        frozen = zero.read_frozen(shares, shape)
        yield name, RankParameter(shape, model=frozen, model_dtype=frozen.dtype)


# ---- everything else


def read_scalars(saved: SavedCheckpoint) -> dict[str, object]:
    """Return the scalars that training resumes from. Raises DamagedFile if ranks or parameters disagree."""
    found = read_counts(saved)
    counts = {
        torch_zip.read_number(saved.folder, step)
        for ranks in saved.partitions
        for rank in ranks
        for step in zero.read_steps(rank)
    }
    if not saved.partitions:
        counts = {
            torch_zip.read_number(saved.folder, step)
            for file in saved.models
            for step in plain_optimizer.read_steps(file)
        }
    if len(counts) > 1:
        raise DamagedFile(
            saved.models[0].name,
            f"the optimizer's steps are {sorted(counts)}",
            "all parameters have taken the same steps",
        )
    if counts:
        found[OPTIMIZER_STEP] = int(counts.pop())
    groups = (
        zero.read_groups(saved.partitions[0][0])
        if saved.partitions
        else plain_optimizer.read_groups(saved.models[0])
    )
    found.update(optim_settings(groups))
    scaler = read_loss_scaler(
        saved.partitions[0][0].content if saved.partitions else saved.models[0].content.get("optimizer") or {}
    )
    return {**found, LOSS_SCALER: scaler} if scaler else found


def optim_settings(groups: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return Adam's settings from its parameter groups; empty for other optimizers."""
    if not groups or not all(name in groups[0] for name in OPTIM_SETTINGS):
        return {}
    decay = max(float(str(group["weight_decay"])) for group in groups)
    return {OPTIM: {**{name: _plain(groups[0][name]) for name in OPTIM_SETTINGS}, "weight_decay": decay}}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def read_counts(saved: SavedCheckpoint) -> dict[str, object]:
    """Return step, samples and the weights' dtype from the models' files."""
    found: dict[str, object] = {STEP: _common_count(saved.models, "global_steps")}
    if saved.tensor == 1:  # with tensor ranks DeepSpeed counts each rank's samples separately
        found[CONSUMED] = _common_count(saved.models, "global_samples")
    if saved.weights_dtype is not None:
        found[WEIGHTS_DTYPE] = saved.weights_dtype
    return found


def read_loss_scaler(optimizer: Mapping[str, object]) -> dict[str, object] | None:
    """Return fp16's loss scaler if it is dynamic. Without ZeRO there is no hysteresis: the scale falls at
    the first overflow.
    """
    if not optimizer.get("dynamic_loss_scale"):
        return None
    scaler = optimizer.get("loss_scaler")
    values = scaler.fields if isinstance(scaler, ForeignObject) else optimizer
    return {name: values.get(name, 1 if name == "cur_hysteresis" else None) for name in SCALER_STATE}


def _common_count(models: Sequence[SavedFile], key: str) -> int:
    values = {file.content.get(key) for file in models}
    value = values.pop()
    # with context parallelism DeepSpeed counts samples as floats
    if values or not isinstance(value, (int, float)) or value != int(value):
        raise DamagedFile(
            models[0].name,
            f"{key} is {sorted(map(str, {value, *values}))} in the models' files",
            "all files are of one step",
        )
    return int(value)


def describe_layout(saved: SavedCheckpoint) -> dict[str, str]:
    settings = saved.settings.get("zero_optimization")
    stage = settings.get("stage", 0) if isinstance(settings, Mapping) else 3 if saved.stage3 else "unknown"
    sizes = {"data": saved.data, "tensor": saved.tensor, "pipeline": saved.pipeline}
    return {"layout": f"ZeRO {stage}, " + ", ".join(f"{axis} {size}" for axis, size in sizes.items())}


def find_omitted(models: Sequence[SavedFile]) -> Iterator[str]:
    yield "settings of parameter groups (learning rate, decay)"
    content = models[0].content
    for key, label in (
        ("lr_scheduler", "the scheduler's state"),
        ("data_sampler", "the data sampler's state"),
        ("random_ltd", "random layer token drop"),
        ("buffer_names", "buffers of the model"),
    ):
        if content.get(key):
            yield label
    own = sorted(str(key) for key in content.keys() - _KNOWN)
    if own:
        yield f"what the program added: {', '.join(own)}"
