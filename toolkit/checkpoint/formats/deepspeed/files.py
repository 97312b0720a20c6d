"""The files of a DeepSpeed checkpoint: which ones must exist, for which ranks, and their content without
tensors' bytes.

    latest                                                  the tag: folder of the newest checkpoint
    TAG/mp_rank_MM_model_states.pt                          ZeRO 0-2: model of model-parallel rank MM (tensor
                                                            ranks of each stage in turn), counts, in stage 0
                                                            the optimizer
    TAG/zero_pp_rank_D_mp_rank_MM_model_states.pt           ZeRO 3: the same without weights, for each data
                                                            rank D
    TAG/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt    ZeRO's partitions
    TAG/layer_NN[-model_TT]-model_states.pt                 a pipeline's layers, of tensor rank TT

Sources: ``deepspeed/runtime/engine.py`` (``_get_ckpt_name``, ``_get_zero_ckpt_name``,
``_common_checkpoint_state``, ``_save_zero_checkpoint``), ``deepspeed/runtime/pipe/module.py``
(``ckpt_layer_path``). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.formats import torch_zip
from toolkit.errors import CheckpointError, Problem

LATEST = "latest"
COMPLETE_RULE = "a checkpoint has the files of all its ranks"
_MODEL = re.compile(r"(zero_pp_rank_0_)?mp_rank_\d+_model_states\.pt")
_OPTIMIZER = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_.*|expp_rank_.*")


@dataclass(frozen=True, slots=True)
class SavedFile:
    """The content of a file, with tensors as ``StoredTensor``. ``name`` is relative to the folder."""

    name: str
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint without its tensors' bytes.

    Attributes:
        folder: The folder of the tag.
        models: For each model-parallel rank, the model's file (under ZeRO 3, of data rank 0).
        partitions: For each model-parallel rank, ZeRO's file of each data rank; empty without ZeRO.
        layers: A pipeline's layers by number, each with the file of every tensor rank.
        tensor: Number of tensor ranks.
        stage3: The model's files contain no weights.
    """

    folder: Path
    models: tuple[SavedFile, ...]
    partitions: tuple[tuple[SavedFile, ...], ...]
    layers: Mapping[int, tuple[SavedFile, ...]]
    tensor: int
    stage3: bool

    @property
    def pipeline(self) -> int:
        return len(self.models) // self.tensor

    @property
    def data(self) -> int:
        """Number of ZeRO's ranks."""
        return int(self.models[0].content["dp_world_size"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """The run's DeepSpeed configuration; empty if it was not saved as a dictionary."""
        found = self.models[0].content.get("ds_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def weights_dtype(self) -> str | None:
        """Dtype of the weights according to the configuration; None if unknown."""
        named = {"bf16": "bfloat16", "fp16": "float16"}
        on = [
            dtype
            for key, dtype in named.items()
            if isinstance(self.settings.get(key), Mapping) and self.settings[key].get("enabled")
        ]
        return (on[0] if on else "float32") if self.settings else None

    def load_model_file(self, model_rank: int, data_rank: int) -> SavedFile:
        """Return the model's file of a data rank; under ZeRO 3 each has one."""
        return load_file(self.folder, _model_name(model_rank, data_rank, stage3=True))


def list_names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder is that of a tag, from file names only."""
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in list_names(folder))


def load_file(folder: Path, name: str) -> SavedFile:
    """Load one file. Raises DamagedFile if it is missing or not a dictionary of torch.save."""
    content = torch_zip.load(folder, name, named=True)
    if not isinstance(content, Mapping):
        raise DamagedFile(
            name, f"{folder / name} contains {type(content).__name__}", "DeepSpeed saves dictionaries"
        )
    return SavedFile(name, content)


def read_models(folder: Path, *, allow_both: bool = False) -> tuple[tuple[SavedFile, ...], bool]:
    """Return the model's file of each model-parallel rank, and whether they are of ZeRO 3. Raises
    DamagedFile.

    Args:
        folder: The folder of the tag.
        allow_both: Files of ZeRO 3 and of other stages may coexist, with equal content.
    """
    names = [name for name in list_names(folder) if _MODEL.fullmatch(name)]
    kinds = {name.startswith("zero") for name in names}
    if not kinds or (len(kinds) > 1 and not allow_both):
        seen = "model states of ZeRO 3 and of other stages" if kinds else "no model states"
        raise DamagedFile(
            "mp_rank_00_model_states.pt",
            f"{folder} has {seen}",
            "a folder contains one checkpoint, with all model states",
        )
    stage3 = min(kinds)
    first = load_file(folder, _model_name(0, 0, stage3))
    count = _count(first, "mp_world_size")
    return (first, *(load_file(folder, _model_name(rank, 0, stage3)) for rank in range(1, count))), stage3


def read_checkpoint(folder: Path) -> SavedCheckpoint:
    """Read the files of a checkpoint. Raises DamagedFile if one is missing or unreadable, CheckpointError if
    this kind of checkpoint is not supported.
    """
    names = list_names(folder)
    _check_supported(folder, names)
    models, stage3 = read_models(folder)
    for file in models:
        _check_no_experts(folder, file)
    data = _count(models[0], "dp_world_size")
    layers = _read_layers(folder, names)
    tensor = len(next(iter(layers.values()))) if layers else len(models)
    if len(models) % tensor:
        raise DamagedFile(
            models[0].name,
            f"{folder} has {len(models)} model-parallel ranks, its layers have {tensor} tensor ranks",
            COMPLETE_RULE,
        )
    prefixes = {match[1] for name in names if (match := _OPTIMIZER.fullmatch(name))}
    if len(prefixes) > 1:
        raise DamagedFile(
            "",
            f"{folder} has optimizer states of several runs, whose names begin with {sorted(prefixes)}",
            "a folder contains one checkpoint",
        )
    needs_partitions = stage3 or models[0].content.get("param_shapes") is not None
    partitions: tuple[tuple[SavedFile, ...], ...] = ()
    if prefixes or needs_partitions:
        prefix = prefixes.pop() if prefixes else ""
        partitions = tuple(
            tuple(
                _load_partition(folder, f"{prefix}zero_pp_rank_{rank}_mp_rank_{model:02d}_optim_states.pt")
                for rank in range(data)
            )
            for model in range(len(models))
        )
    return SavedCheckpoint(
        folder=folder, models=models, partitions=partitions, layers=layers, tensor=tensor, stage3=stage3
    )


def _load_partition(folder: Path, name: str) -> SavedFile:
    content = load_file(folder, name).content.get("optimizer_state_dict")
    if not isinstance(content, Mapping):
        raise DamagedFile(
            name, f"{folder / name} has no optimizer_state_dict", "ZeRO's file contains the optimizer's state"
        )
    return SavedFile(name, content)


def _read_layers(folder: Path, names: Sequence[str]) -> dict[int, tuple[SavedFile, ...]]:
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if match := _LAYER.fullmatch(name):
            found.setdefault(int(match[1]), {})[int(match[2] or 0)] = name
    ranks = max((max(of_layer) for of_layer in found.values()), default=0) + 1
    for of_layer in found.values():
        for rank in range(ranks):
            if rank not in of_layer:
                missing = next(iter(of_layer.values())).replace(
                    f"-model_{max(of_layer):02d}", f"-model_{rank:02d}"
                )
                raise DamagedFile(missing, f"{folder / missing} is missing", COMPLETE_RULE)
    return {
        number: tuple(load_file(folder, found[number][rank]) for rank in range(ranks))
        for number in sorted(found)
    }


def _model_name(model_rank: int, data_rank: int, stage3: bool) -> str:
    return f"{f'zero_pp_rank_{data_rank}_' if stage3 else ''}mp_rank_{model_rank:02d}_model_states.pt"


def _count(file: SavedFile, key: str) -> int:
    found = file.content.get(key)
    if not isinstance(found, int) or found < 1:
        raise DamagedFile(
            file.name, f"{file.name} has {key}={found}", "a model's file records the number of ranks"
        )
    return found


def _check_supported(folder: Path, names: Sequence[str]) -> None:
    if "offloaded_tensors" in names:
        raise unsupported_error(
            folder,
            "has its optimizer's state on NVMe, in files of each rank's swapper",
            "save it from a run whose optimizer is not offloaded to NVMe",
        )
    experts = next((name for name in names if _EXPERT.fullmatch(name)), None)
    if experts is not None:
        raise _experts_error(folder, experts)


def _check_no_experts(folder: Path, file: SavedFile) -> None:
    if file.content.get("ds_autoep_layers") or any(file.content.get("num_experts") or ()):
        raise _experts_error(folder, file.name)


def _experts_error(folder: Path, name: str) -> CheckpointError:
    return unsupported_error(
        folder,
        f"has a model with DeepSpeed's own experts ({name})",
        "train it with this toolkit's parallel.expert, whose checkpoints can be read in any layout",
    )


def unsupported_error(folder: Path, what: str, remedy: str) -> CheckpointError:
    """Return the error for an intact checkpoint of a kind that this reader does not support."""
    return CheckpointError(
        Problem(str(folder), f"{folder} {what}", "such checkpoints of DeepSpeed cannot be read", remedy)
    )
