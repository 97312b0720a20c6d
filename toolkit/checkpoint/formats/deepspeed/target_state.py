"""What stands in the files of a DeepSpeed checkpoint besides tensors' bytes: the objects that its loader asks for, by name.

Steps are plain numbers in native files: torch's optimizers make each of them a tensor of its own while they load, DeepSpeed's count
with numbers. Settings of the optimizer must be there, because loading takes over whole groups. What may be left to the run is left out:
``clip_grad``, and the loss scaler of ZeRO 1 and 2.

Sources, in deepspeed 0.19.8: ``runtime/engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``, ``_load_checkpoint``),
``runtime/zero/stage_1_and_2.py`` and ``runtime/zero/stage3.py`` (``state_dict``, ``load_state_dict``), ``utils/tensor_fragment.py``;
``torch/optim/optimizer.py`` (``load_state_dict``). Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from toolkit.checkpoint.formats.deepspeed.target_layout import (
    FlatBuffer,
    LocalParameter,
    ModelRank,
    buffer_runs,
    padding_numel,
)
from toolkit.checkpoint.formats.pickle_writer import GlobalName, ReduceCall
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.families.base import ParameterSpec

VERSION = "0.19.8"  # whose files are written
FP32 = "fp32"  # the label of the weights that the optimizer updates, beside the names of its states

_SIZE = GlobalName("torch", "Size")
_FRAGMENT = GlobalName("deepspeed.utils.tensor_fragment", "fragment_address")
_STAGE = GlobalName("deepspeed.runtime.zero.config", "ZeroStageEnum")
_SCALER = GlobalName("deepspeed.runtime.fp16.loss_scaler", "LossScaler")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """What all files of a checkpoint agree on.

    Attributes:
        data: ZeRO's ranks.
        dtype: of the weights.
        step, samples: done so far.
        optimizer_step: as the optimizer counts.
        moments: states that are written.
        optim: settings of the optimizer, by name.
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
    """The tensors of one file, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._storages: dict[Hashable, Storage] = {}

    @property
    def storages(self) -> list[Storage]:
        return list(self._storages.values())

    def tensor(self, label: Hashable, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
        """A tensor in a storage of its own; ``label`` is for ``begins``."""
        assert label not in self._storages, f"{label} twice"
        self._storages[label] = Storage(str(len(self._storages)), dtype, prod(shape))
        return StoredTensor.whole(self._storages[label], shape)

    def begins(self, storages: Mapping[str, int]) -> dict[Hashable, int]:
        """The byte at which each begins, by label; ``storages`` is the layout's."""
        return {label: storages[storage.key] for label, storage in self._storages.items()}


# ---- files of the model


def module_state(rank: ModelRank, of: TargetSettings, records: FileTensors) -> dict[str, StoredTensor]:
    """The state dict; labels are names. Under ZeRO 3 it names the parameters and holds none of them."""
    found: dict[str, StoredTensor] = {}
    if of.stage == 3:
        nothing = records.tensor("nothing", of.dtype, (0,))
        found = {one.name: StoredTensor.whole(nothing.storage, (0,)) for one in rank.parameters}
    else:
        found = {one.name: records.tensor(one.name, of.dtype, one.box.shape) for one in rank.parameters}
    return OrderedDict(found | {alias: found[stored] for alias, stored in rank.aliases.items()})


def model_state(
    rank: ModelRank,
    of: TargetSettings,
    weights: Mapping[str, StoredTensor] | None,
    optimizer: Mapping[str, Any] | None,
    buffers: Sequence[FlatBuffer],
) -> dict[str, Any]:
    """``mp_rank_*_model_states.pt``.

    Args:
        weights: None in a pipeline, whose layers have files of their own.
        optimizer: of ``plain_optimizer``, without ZeRO.
    """
    zero = of.stage > 0
    frozen: dict[str, Any] = {
        key: OrderedDict() if of.stage >= 2 else None
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
        "lr_scheduler": scheduler_state(of.optimizer_step),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": of.step - of.optimizer_step,
        "global_steps": of.step,
        "global_samples": of.samples,
        "dp_world_size": of.data,
        "mp_world_size": of.tensor * of.pipeline,
        "checkpoint_parallel_dimensions": {"pp_degree": of.pipeline, "tp_degree": of.tensor},
        "ds_config": config_state(of),
        "ds_version": VERSION,
    }


def scheduler_state(steps: int) -> dict[str, Any]:
    """The state of a learning-rate scheduler that has been stepped ``steps`` times, for a program that has one: ``load_checkpoint`` hands
    it over without looking. Schedulers of torch count in ``last_epoch``, DeepSpeed's in ``last_batch_iteration``, and torch's LambdaLR
    (transformers' schedules) asks for the state of its functions too. What else a scheduler has stays as the program made it.

    torch's SequentialLR and CyclicLR have state that does not follow from the count; they fail on a missing key.
    """
    return {
        "last_epoch": steps,
        "_step_count": steps + 1,
        "last_batch_iteration": steps - 1,
        "lr_lambdas": [],
    }


def parameter_shapes(parameters: Iterable[LocalParameter | ParameterSpec]) -> OrderedDict[str, ReduceCall]:
    """By name: what ``param_shapes`` has of a group."""
    return OrderedDict((one.name, ReduceCall(_SIZE, (one.shape,))) for one in parameters)


def config_state(of: TargetSettings) -> dict[str, Any]:
    """What of the run's configuration decides the layout of its files."""
    return {
        "zero_optimization": {"stage": of.stage, "round_robin_gradients": False},
        "bf16": {"enabled": of.dtype == "bfloat16"},
    }


# ---- the optimizer


def plain_optimizer_state(rank: ModelRank, of: TargetSettings, records: FileTensors) -> dict[str, Any]:
    """Without ZeRO: torch's state dict, a tensor a parameter; labels are (state, name). Groups say the names of their parameters, which
    torch keeps and does not use: else nobody could know whose state is whose."""
    ordered = [one for group in rank.groups for one in group]
    numbers = {one.name: number for number, one in enumerate(ordered)}
    state = {
        numbers[one.name]: _state(
            of, {name: records.tensor((name, one.name), "float32", one.box.shape) for name in of.moments}
        )
        for one in ordered
        if of.moments
    }
    groups = [
        _group(of, group[0].decays, [numbers[one.name] for one in group])
        | {"param_names": [one.name for one in group]}
        for group in rank.groups
    ]
    return {"state": state, "param_groups": groups}


def zero12_state(
    buffers: Sequence[FlatBuffer], of: TargetSettings, rank: int, records: FileTensors
) -> dict[str, Any]:
    """``zero_pp_rank_*_optim_states.pt`` of ZeRO 1 and 2; labels are (state, number of the buffer)."""
    kept = {
        "single_partition_of_fp32_groups": [
            records.tensor((FP32, flat.number), "float32", (flat.numel - padding_numel(flat, rank),))
            for flat in buffers
        ],
        "zero_stage": ReduceCall(_STAGE, (of.stage,)),
        "group_paddings": [padding_numel(flat, rank) for flat in buffers],
        "param_alignment_paddings": [[0] * len(flat.parameters) for flat in buffers],
        "partition_count": [of.data] * len(buffers),
        "ds_version": VERSION,
        "param_slice_mappings": [
            OrderedDict((one.name, _fragment(numel, at)) for one, at, numel in _slices(flat, of, rank))
            for flat in buffers
        ],
    }
    return _file({"base_optimizer_state": _flat_optimizer(buffers, of, records), **kept}, of)


def zero3_state(buffers: Sequence[FlatBuffer], of: TargetSettings, records: FileTensors) -> dict[str, Any]:
    """The same of ZeRO 3: equal on all ranks but for the tensors."""
    scaler = ReduceCall(_SCALER, (1.0,), {"cur_scale": 1.0, "dynamic": False})
    return _file(
        {
            "zero_stage": ReduceCall(_STAGE, (3,)),
            "loss_scaler": scaler,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": of.data,
            "optimizer_state_dict": _flat_optimizer(buffers, of, records),
            "fp32_flat_groups": [
                records.tensor((FP32, flat.number), "float32", (flat.numel,)) for flat in buffers
            ],
        },
        of,
    )


def _file(state: Mapping[str, Any], of: TargetSettings) -> dict[str, Any]:
    return {"optimizer_state_dict": dict(state), "ds_config": config_state(of), "ds_version": VERSION}


def _flat_optimizer(
    buffers: Sequence[FlatBuffer], of: TargetSettings, records: FileTensors
) -> dict[str, Any]:
    """torch's state dict, a tensor a buffer."""
    state = {
        flat.number: _state(
            of, {name: records.tensor((name, flat.number), "float32", (flat.numel,)) for name in of.moments}
        )
        for flat in buffers
        if of.moments
    }
    groups: dict[int, list[FlatBuffer]] = {}
    for flat in buffers:
        groups.setdefault(flat.group, []).append(flat)
    return {
        "state": state,
        "param_groups": [
            _group(of, group[0].decays, [flat.number for flat in group]) for group in groups.values()
        ],
    }


def _state(of: TargetSettings, moments: Mapping[str, StoredTensor]) -> dict[str, Any]:
    return {"step": of.optimizer_step, **moments}


def _group(of: TargetSettings, decays: bool, numbers: list[int]) -> dict[str, Any]:
    """With what torch's AdamW and DeepSpeed's Adams look up in a group."""
    settings = {
        "lr": of.optim["lr"],
        "betas": tuple(of.optim["betas"]),
        "eps": of.optim["eps"],
        "weight_decay": of.optim["weight_decay"] if decays else 0.0,
    }
    return settings | {
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


def _slices(flat: FlatBuffer, of: TargetSettings, rank: int) -> Iterator[tuple[LocalParameter, int, int]]:
    """(parameter, element of the rank's part at which it begins, elements) of what a rank has of a buffer."""
    low, high = rank * flat.numel, (rank + 1) * flat.numel
    for index, (one, start) in enumerate(zip(flat.parameters, flat.starts, strict=True)):
        if start < high and start + one.box.numel > low:
            for run in buffer_runs(flat, index, of.stage, of.data):
                if run.rank == rank:
                    yield one, run.at, run.numel


def _fragment(numel: int, start: int) -> ReduceCall:
    return ReduceCall(_FRAGMENT, (numel, start), {"numel": numel, "start": start})
