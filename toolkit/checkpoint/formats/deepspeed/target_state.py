"""The objects in the files of a DeepSpeed checkpoint that its loader reads, without tensors' bytes.

Step counts are plain numbers: torch's optimizers convert them to tensors while loading, and DeepSpeed's use
numbers. Optimizer settings must be present, because loading replaces whole groups. What the run may decide
itself is left out: ``clip_grad``, and the loss scaler of ZeRO 1 and 2.

Sources, in deepspeed 0.19.8: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``,
``_load_checkpoint``), ``runtime/zero/stage_1_and_2.py`` and ``runtime/zero/stage3.py`` (``state_dict``,
``load_state_dict``), ``utils/tensor_fragment.py``; ``torch/optim/optimizer.py`` (``load_state_dict``).
Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from toolkit.checkpoint.formats.deepspeed.target_layout import (
    FlatBuffer,
    ModelRank,
    TargetParameter,
    buffer_ranges,
    padding_numel,
)
from toolkit.checkpoint.formats.pickle_writer import GlobalName, ReduceCall
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.families.base import ParameterSpec

VERSION = "0.19.8"  # DeepSpeed version whose files are written
FP32 = "fp32"  # label of the weights that the optimizer updates, next to the names of its states

_SIZE = GlobalName("torch", "Size")
_FRAGMENT = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
_STAGE = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
_SCALER = GlobalName("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Settings that all files of a checkpoint share.

    Attributes:
        stage: ZeRO stage.
        data: Number of ZeRO's ranks.
        tensor, pipeline: Number of tensor ranks and of pipeline stages.
        dtype: Dtype of the weights.
        step, samples: Completed steps and consumed samples.
        optimizer_step: Step count of the optimizer.
        moments: Optimizer states that are written.
        optim: Settings of the optimizer, by name.
    """

    stage: int
    data: int
    tensor: int
    pipeline: int
    dtype: str
    step: int
    samples: int
    optimizer_step: int
    moments: tuple[str, ...]
    optim: Mapping[str, Any]


class FileTensors:
    """The tensors of one file, in the order in which they are requested."""

    def __init__(self) -> None:
        self._storages: dict[Hashable, Storage] = {}

    @property
    def storages(self) -> list[Storage]:
        return list(self._storages.values())

    def tensor(self, label: Hashable, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
        """Create a tensor in its own storage. ``label`` identifies it in ``begins``."""
        assert label not in self._storages, f"{label} twice"
        self._storages[label] = Storage(str(len(self._storages)), dtype, prod(shape))
        return StoredTensor.whole(self._storages[label], shape)

    def begins(self, storages: Mapping[str, int]) -> dict[Hashable, int]:
        """Return the first byte of each tensor, by label. ``storages`` is that of the archive's layout."""
        return {label: storages[storage.key] for label, storage in self._storages.items()}


# ---- files of the model


def module_state(rank: ModelRank, settings: TargetSettings, records: FileTensors) -> dict[str, StoredTensor]:
    """Return the state dict, with names as labels. Under ZeRO 3 it has the parameters' names with empty
    tensors.
    """
    found: dict[str, StoredTensor] = {}
    if settings.stage == 3:
        nothing = records.tensor("nothing", settings.dtype, (0,))
        found = {parameter.name: StoredTensor.whole(nothing.storage, (0,)) for parameter in rank.parameters}
    else:
        found = {
            parameter.name: records.tensor(parameter.name, settings.dtype, parameter.box.shape)
            for parameter in rank.parameters
        }
    return OrderedDict(found | {alias: found[stored] for alias, stored in rank.aliases.items()})


def model_state(
    rank: ModelRank,
    settings: TargetSettings,
    weights: Mapping[str, StoredTensor] | None,
    optimizer: Mapping[str, Any] | None,
    buffers: Sequence[FlatBuffer],
) -> dict[str, Any]:
    """Return the content of ``mp_rank_*_model_states.pt``.

    Args:
        rank: The model rank.
        settings: Settings that all files share.
        weights: None for a pipeline, whose layers have separate files.
        optimizer: ``plain_optimizer_state`` without ZeRO, otherwise None.
        buffers: The rank's flat buffers.
    """
    zero = settings.stage > 0
    frozen: dict[str, Any] = {
        key: OrderedDict() if settings.stage >= 2 else None
        for key in ("frozen_param_shapes", "frozen_param_fragments")
    }
    return {
        "module": weights,
        "buffer_names": [],
        "optimizer": optimizer,
        "param_shapes": [parameter_shapes(flat.parameters) for flat in buffers] if zero else None,
        "frozen_param_shapes": frozen["frozen_param_shapes"],
        "shared_params": dict(rank.aliases) if zero else None,
        "frozen_param_fragments": frozen["frozen_param_fragments"],
        "lr_scheduler": scheduler_state(settings.optimizer_step),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": settings.step - settings.optimizer_step,
        "global_steps": settings.step,
        "global_samples": settings.samples,
        "dp_world_size": settings.data,
        "mp_world_size": settings.tensor * settings.pipeline,
        "checkpoint_parallel_dimensions": {"pp_degree": settings.pipeline, "tp_degree": settings.tensor},
        "ds_config": config_state(settings),
        "ds_version": VERSION,
    }


def scheduler_state(steps: int) -> dict[str, Any]:
    """Return the state of a learning-rate scheduler after ``steps`` steps, which ``load_checkpoint`` passes
    on unchecked.

    Torch's schedulers count in ``last_epoch``, DeepSpeed's in ``last_batch_iteration``, and torch's LambdaLR
    (transformers' schedules) also needs the state of its functions. Other state keeps the program's values.
    Torch's SequentialLR and CyclicLR have state that does not follow from the count; they fail on a missing
    key.
    """
    return {
        "last_epoch": steps,
        "_step_count": steps + 1,
        "last_batch_iteration": steps - 1,
        "lr_lambdas": [],
    }


def parameter_shapes(parameters: Iterable[TargetParameter | ParameterSpec]) -> OrderedDict[str, ReduceCall]:
    """Return one group's entry of ``param_shapes``."""
    return OrderedDict((parameter.name, ReduceCall(_SIZE, (parameter.shape,))) for parameter in parameters)


def config_state(settings: TargetSettings) -> dict[str, Any]:
    """Return the part of the run's configuration that determines the layout of its files."""
    return {
        "zero_optimization": {"stage": settings.stage, "round_robin_gradients": False},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
    }


# ---- the optimizer


def plain_optimizer_state(rank: ModelRank, settings: TargetSettings, records: FileTensors) -> dict[str, Any]:
    """Return torch's state dict of a run without ZeRO, with one tensor per parameter labelled (state, name).

    Groups record the names of their parameters, which torch preserves and ignores; without them, state could
    not be matched to parameters.
    """
    ordered = [parameter for group in rank.groups for parameter in group]
    numbers = {parameter.name: number for number, parameter in enumerate(ordered)}
    state = {
        numbers[parameter.name]: _state(
            settings,
            {
                name: records.tensor((name, parameter.name), "float32", parameter.box.shape)
                for name in settings.moments
            },
        )
        for parameter in ordered
        if settings.moments
    }
    groups = [
        _group(settings, group[0].decays, [numbers[parameter.name] for parameter in group])
        | {"param_names": [parameter.name for parameter in group]}
        for group in rank.groups
    ]
    return {"state": state, "param_groups": groups}


def zero12_state(
    buffers: Sequence[FlatBuffer], settings: TargetSettings, rank: int, records: FileTensors
) -> dict[str, Any]:
    """Return the content of ``zero_pp_rank_*_optim_states.pt`` for ZeRO 1 and 2; labels are (state, number
    of the buffer).
    """
    state = {
        "single_partition_of_fp32_groups": [
            records.tensor((FP32, flat.number), "float32", (flat.numel - padding_numel(flat, rank),))
            for flat in buffers
        ],
        "zero_stage": ReduceCall(_STAGE, (settings.stage,)),
        "group_paddings": [padding_numel(flat, rank) for flat in buffers],
        "param_alignment_paddings": [[0] * len(flat.parameters) for flat in buffers],
        "partition_count": [settings.data] * len(buffers),
        "ds_version": VERSION,
        "param_slice_mappings": [
            OrderedDict(
                (parameter.name, _fragment(numel, at))
                for parameter, at, numel in _slices(flat, settings, rank)
            )
            for flat in buffers
        ],
    }
    return _optimizer_file(
        {"base_optimizer_state": _flat_optimizer(buffers, settings, records), **state}, settings
    )


def zero3_state(
    buffers: Sequence[FlatBuffer], settings: TargetSettings, records: FileTensors
) -> dict[str, Any]:
    """Return the state of ZeRO 3; it is equal on all ranks except for the tensors."""
    scaler = ReduceCall(_SCALER, (1.0,), {"cur_scale": 1.0, "dynamic": False})
    return _optimizer_file(
        {
            "zero_stage": ReduceCall(_STAGE, (3,)),
            "loss_scaler": scaler,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": settings.data,
            "optimizer_state_dict": _flat_optimizer(buffers, settings, records),
            "fp32_flat_groups": [
                records.tensor((FP32, flat.number), "float32", (flat.numel,)) for flat in buffers
            ],
        },
        settings,
    )


def _optimizer_file(state: Mapping[str, Any], settings: TargetSettings) -> dict[str, Any]:
    return {"optimizer_state_dict": dict(state), "ds_config": config_state(settings), "ds_version": VERSION}


def _flat_optimizer(
    buffers: Sequence[FlatBuffer], settings: TargetSettings, records: FileTensors
) -> dict[str, Any]:
    """Return torch's state dict, with one tensor per buffer."""
    state = {
        flat.number: _state(
            settings,
            {
                name: records.tensor((name, flat.number), "float32", (flat.numel,))
                for name in settings.moments
            },
        )
        for flat in buffers
        if settings.moments
    }
    groups: dict[int, list[FlatBuffer]] = {}
    for flat in buffers:
        groups.setdefault(flat.group, []).append(flat)
    return {
        "state": state,
        "param_groups": [
            _group(settings, group[0].decays, [flat.number for flat in group]) for group in groups.values()
        ],
    }


def _state(settings: TargetSettings, moments: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {"step": settings.optimizer_step, **moments}


def _group(settings: TargetSettings, decays: bool, numbers: list[int]) -> dict[str, Any]:
    """Return a group with the keys that torch's AdamW and DeepSpeed's Adams look up."""
    values = {
        "lr": settings.optim["lr"],
        "betas": tuple(settings.optim["betas"]),
        "eps": settings.optim["eps"],
        "weight_decay": settings.optim["weight_decay"] if decays else 0.0,
    }
    return values | {
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "params": numbers,
    }


def _slices(
    flat: FlatBuffer, settings: TargetSettings, rank: int
) -> Iterator[tuple[TargetParameter, int, int]]:
    """Yield (parameter, first element in the rank's part, number of elements) of a buffer for one rank."""
    low, high = rank * flat.numel, (rank + 1) * flat.numel
    for index, (parameter, start) in enumerate(zip(flat.parameters, flat.starts, strict=True)):
        if start < high and start + parameter.box.numel > low:
            for stored in buffer_ranges(flat, index, settings.stage, settings.data):
                if stored.rank == rank:
                    yield parameter, stored.buffer_start, stored.numel


def _fragment(numel: int, start: int) -> ReduceCall:
    return ReduceCall(_FRAGMENT, (numel, start), {"numel": numel, "start": start})
