"""Checkpoints that DeepSpeed's engines save: ZeRO 0 to 3 in any precision, with a tensor axis, in a pipeline, or both.

The files are those of ``deepspeed_files.py``. Not carried: learning rates and other settings of parameter groups, the scheduler's
state, buffers, what the user's program put beside (``client_state``). Of DeepSpeed 0.19; neither it nor torch is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit import families
from toolkit.checkpoint import nearby
from toolkit.checkpoint.catalog import Catalog, Damage
from toolkit.checkpoint.formats import deepspeed_files as files
from toolkit.checkpoint.formats import deepspeed_plain as plain
from toolkit.checkpoint.formats import deepspeed_zero as zero
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed_catalog import Ranks, catalog_of
from toolkit.checkpoint.formats.deepspeed_files import File, Saved
from toolkit.checkpoint.formats.deepspeed_held import Local, Shape, Whole
from toolkit.checkpoint.formats.pickles import Foreign, StoredTensor
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
from toolkit.checkpoint.source import Source, named_in, vendors_refusal
from toolkit.families.base import ModelShape

# What DeepSpeed puts into a model's file; anything else is the user's.
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
    """The folder of a tag, or the one that the file ``latest`` in ``path`` names."""
    folders = [path]
    if (path / files.LATEST).is_file():
        folders.insert(0, named_in(path, files.LATEST))
    return next(
        (folder for folder in folders if not (folder / "zero").is_dir() and files.is_checkpoint(folder)), None
    )


def open_source(folder: Path, model: ModelShape | None = None) -> Source:
    """Raises CheckpointError: it is damaged, or of a kind that cannot be read. ModelUnknown: ``model`` must be said."""
    if model is None:
        raise nearby.model_unknown(folder)
    try:
        saved = files.read(folder)
        scalars = scalars_of(saved)
        catalog = catalog_of(folder, model, stages_of(saved), scalars)
    except Damage as damage:
        raise vendors_refusal(folder, damage) from damage
    return source_of("deepspeed", catalog, model, facts_of(saved), saved.models)


def source_of(
    name: str, catalog: Catalog, model: ModelShape, facts: Mapping[str, str], models: Sequence[File]
) -> Source:
    """What both of DeepSpeed's formats say of themselves."""
    step = catalog.scalars[STEP]
    assert isinstance(step, int)
    facts = {"written by": f"deepspeed {models[0].content.get('ds_version')}", **facts}
    return Source(
        format=name,
        catalog=catalog,
        namespace=families.get_family(model.family).namespace,
        step=step,
        shape=model,
        facts=facts,
        left_out=tuple(left_out_of(models)),
        refuse=vendors_refusal,
    )


# ---- tensors


def stages_of(saved: Saved) -> list[Ranks]:
    """What every rank holds. A pipeline's layers stand apart from its stages' optimizers: their files say of no stage."""
    buffers = _buffers(saved)
    layers = [
        {
            name: local
            for number, files_ in saved.layers.items()
            for name, local in _weights(files_[rank].content, buffers, f"{number}.")
        }
        for rank in range(saved.tensor)
    ]
    stages: list[Ranks] = [layers] if saved.layers else []
    for stage, ranks in enumerate(weights_of(saved)):
        for tensor, held in enumerate(ranks):
            number = stage * saved.tensor + tensor
            shapes = {
                name: local.shape for name, local in (held or _of_stage(saved, layers[tensor], stage)).items()
            }
            for name, local in _optimizers_part(saved, number, shapes).items():
                known = held.setdefault(name, local)
                known.shape, known.master, known.moments, known.copies = (
                    local.shape,
                    local.master,
                    local.moments,
                    local.copies,
                )
                if saved.stage3:
                    known.model = None  # a placeholder
        first = saved.models[stage * saved.tensor].content  # rank 0 alone tells what is shared
        for name, stored in (first.get("shared_params") or {}).items():
            for held in ranks:
                if stored in held:
                    held[name] = held[stored]
        stages.append(without_placeholders(ranks))
    return stages


def weights_of(saved: Saved) -> list[list[dict[str, Local]]]:
    """What the models' files hold, of each pipeline stage's tensor ranks; under ZeRO 3 mostly placeholders without elements."""
    buffers, found = _buffers(saved), []
    for stage in range(saved.pipeline):
        ranks = []
        for number in range(stage * saved.tensor, (stage + 1) * saved.tensor):
            module = saved.models[number].content.get("module")
            held = dict(_weights(module, buffers)) if isinstance(module, Mapping) else {}
            if saved.stage3:
                held.update(_frozen(saved, number))
            ranks.append(held)
        found.append(ranks)
    return found


def without_placeholders(ranks: Ranks) -> Ranks:
    """Only parameters of which a rank has something."""
    return [{name: local for name, local in held.items() if math.prod(local.shape)} for held in ranks]


def _buffers(saved: Saved) -> set[str]:
    return {name for file in saved.models for name in file.content.get("buffer_names") or ()}


def _weights(
    module: Mapping[str, object], buffers: set[str], prefix: str = ""
) -> Iterator[tuple[str, Local]]:
    """Of a state dict. A name whose tensor another one has already is left out: it is tied, and stored once."""
    seen = set()
    for name, value in module.items():
        if not isinstance(value, StoredTensor) or prefix + name in buffers:
            continue
        at = (value.storage.begin, value.offset, value.shape)
        if value.numel and at in seen:
            continue
        seen.add(at)
        yield prefix + name, Local(value.shape, model=Whole(value), model_dtype=value.dtype)


def _optimizers_part(saved: Saved, number: int, shapes: Mapping[str, Shape]) -> dict[str, Local]:
    """Of one model-parallel rank. ``shapes``: its weights', in the model's order."""
    model = saved.models[number]
    if saved.partitions:
        groups = model.content.get("param_shapes")
        ranks = saved.partitions[number]
        return zero.of_partitions(ranks, zero.shapes_by_slices(ranks, shapes) if groups is None else groups)
    if model.content.get("optimizer") is None:
        return {}
    return plain.of_model_file(saved.folder, model, shapes)


def _of_stage(saved: Saved, layers: Mapping[str, Local], stage: int) -> Mapping[str, Local]:
    """A stage's parameters in a pipeline without ZeRO, where no file names them: stages hold consecutive layers, and each stage's
    optimizer says how many parameters it has. Raises CheckpointError where that does not come out."""
    if saved.partitions:
        return layers
    counts = [plain.parameters_in(file) for file in saved.models[:: saved.tensor]]
    if sum(counts) != len(layers):
        raise files.unreadable(
            saved.folder,
            "is of a pipeline without ZeRO whose optimizers have other parameters than its layers",
            "save it with ZeRO 1, which records names",
        )
    first = sum(counts[:stage])
    return dict(list(layers.items())[first : first + counts[stage]])


def _frozen(saved: Saved, number: int) -> Iterator[tuple[str, Local]]:
    """ZeRO 3: parameters that no optimizer holds lie in shares in the model's file of each data rank."""
    content = saved.models[number].content
    shapes, fragments = content.get("frozen_param_shapes") or {}, content.get("frozen_param_fragments") or {}
    shapes = {name: shape for name, shape in shapes.items() if math.prod(shape)}
    if not shapes:
        return
    every = [saved.model_of(number, rank) for rank in range(saved.data)]
    for name, shape in shapes.items():
        if name not in fragments:
            raise Damage(
                saved.models[number].name,
                f"{saved.models[number].name} has no fragment of {name}, which is frozen",
                "frozen parameters are saved too, unless DeepSpeed was told to leave them out",
            )
        shares = [(file.name, (file.content.get("frozen_param_fragments") or {}).get(name)) for file in every]
        frozen = zero.frozen_shares(shares, shape)
        yield name, Local(shape, model=frozen, model_dtype=frozen.dtype)


# ---- everything else


def scalars_of(saved: Saved) -> dict[str, object]:
    """What training resumes from besides tensors. Raises Damage where ranks or parameters disagree."""
    found = counts_of(saved)
    counts = {
        torch_zip.number(saved.folder, step)
        for ranks in saved.partitions
        for rank in ranks
        for step in zero.steps_of(rank)
    }
    if not saved.partitions:
        counts = {
            torch_zip.number(saved.folder, step) for file in saved.models for step in plain.steps_of(file)
        }
    if len(counts) > 1:
        raise Damage(
            saved.models[0].name,
            f"the optimizer's steps are {sorted(counts)}",
            "all parameters have taken the same steps",
        )
    if counts:
        found[OPTIMIZER_STEP] = int(counts.pop())
    groups = (
        zero.settings_of(saved.partitions[0][0]) if saved.partitions else plain.settings_of(saved.models[0])
    )
    found.update(optim_of(groups))
    scaler = loss_scaler_of(
        saved.partitions[0][0].content if saved.partitions else saved.models[0].content.get("optimizer") or {}
    )
    return {**found, LOSS_SCALER: scaler} if scaler else found


def optim_of(groups: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What an Adam was told, of its parameter groups; nothing of other optimizers."""
    if not groups or not all(name in groups[0] for name in OPTIM_SETTINGS):
        return {}
    decay = max(float(str(group["weight_decay"])) for group in groups)
    return {OPTIM: {**{name: _plain(groups[0][name]) for name in OPTIM_SETTINGS}, "weight_decay": decay}}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def counts_of(saved: Saved) -> dict[str, object]:
    """Steps, samples and the weights' dtype, as the models' files have them."""
    found: dict[str, object] = {STEP: _agreed(saved.models, "global_steps")}
    if saved.tensor == 1:  # with a tensor axis DeepSpeed counts its ranks' samples as different ones
        found[CONSUMED] = _agreed(saved.models, "global_samples")
    if saved.weights_dtype is not None:
        found[WEIGHTS_DTYPE] = saved.weights_dtype
    return found


def loss_scaler_of(optimizer: Mapping[str, object]) -> dict[str, object] | None:
    """fp16's, where it is dynamic. Without ZeRO there is no hysteresis: the scale falls at the first overflow."""
    if not optimizer.get("dynamic_loss_scale"):
        return None
    scaler = optimizer.get("loss_scaler")
    values = scaler.fields if isinstance(scaler, Foreign) else optimizer
    return {name: values.get(name, 1 if name == "cur_hysteresis" else None) for name in SCALER_STATE}


def _agreed(models: Sequence[File], key: str) -> int:
    values = {file.content.get(key) for file in models}
    value = values.pop()
    if (
        values or not isinstance(value, (int, float)) or value != int(value)
    ):  # with a context axis DeepSpeed counts samples in floats
        raise Damage(
            models[0].name,
            f"{key} is {sorted(map(str, {value, *values}))} in the models' files",
            "all files are of one step",
        )
    return int(value)


def facts_of(saved: Saved) -> dict[str, str]:
    settings = saved.settings.get("zero_optimization")
    stage = settings.get("stage", 0) if isinstance(settings, Mapping) else 3 if saved.stage3 else "unknown"
    sizes = {"data": saved.data, "tensor": saved.tensor, "pipeline": saved.pipeline}
    return {"layout": f"ZeRO {stage}, " + ", ".join(f"{axis} {size}" for axis, size in sizes.items())}


def left_out_of(models: Sequence[File]) -> Iterator[str]:
    yield "settings of parameter groups (learning rate, decay)"
    content = models[0].content
    for key, words in (
        ("lr_scheduler", "the scheduler's state"),
        ("data_sampler", "the data sampler's state"),
        ("random_ltd", "random layer token drop"),
        ("buffer_names", "buffers of the model"),
    ):
        if content.get(key):
            yield words
    own = sorted(str(key) for key in content.keys() - _KNOWN)
    if own:
        yield f"what the program saved beside: {', '.join(own)}"
