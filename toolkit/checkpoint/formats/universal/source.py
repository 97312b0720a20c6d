"""Read DeepSpeed's universal checkpoints: every parameter and its moments in separate files, whole.

    latest_universal                                    the folder of the newest checkpoint
    FOLDER/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt       from ZeRO 1 and 2 a dict with ``param``, from ZeRO 3 a
                                                        flat tensor
    FOLDER/zero/NAME/step.pt                            from ZeRO 1 and 2
    FOLDER/zero/optimizer_state.pt                      settings, the loss scaler, for ZeRO 3 the steps
    FOLDER/*mp_rank_*_model_states.pt                   as in ``deepspeed/files.py``

``fp32.pt`` of tensors without optimizer state (tied names, frozen parameters, buffers) comes from the model's
weights, with a tensor axis from those of the first rank only. It is not read, because the model's files have
the same values.

Source: ``deepspeed/checkpoint/ds_to_universal.py`` (``merge_tp_slices``, ``merge_zero3_slices``). Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.checkpoint.catalog import DamagedFile, resolve_file
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.deepspeed import files, zero
from toolkit.checkpoint.formats.deepspeed.catalog import build_catalog
from toolkit.checkpoint.formats.deepspeed.contents import RankParameter, Shape, WholeTensor
from toolkit.checkpoint.formats.deepspeed.files import SavedCheckpoint, SavedFile
from toolkit.checkpoint.formats.deepspeed.source import (
    build_source,
    drop_placeholders,
    optim_settings,
    read_counts,
    read_loss_scaler,
    read_weights,
)
from toolkit.checkpoint.formats.stored_tensor import StoredTensor
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.scalars import LOSS_SCALER, OPTIMIZER_STEP
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error, read_tracker
from toolkit.families.base import ModelShape

LATEST = "latest_universal"
PARAMETERS = "zero"
SETTINGS = f"{PARAMETERS}/optimizer_state.pt"
MASTER_FILE, STEP_FILE = "fp32.pt", "step.pt"
MAXIMA = "max_exp_avg_sq"  # AMSGrad's running maximum of the second moments


def find(path: Path) -> Path | None:
    """Return ``path`` or the folder that its ``latest`` or ``latest_universal`` names."""
    folders = [
        path,
        *(read_tracker(path, name) for name in (files.LATEST, LATEST) if (path / name).is_file()),
    ]
    return next(
        (folder for folder in folders if (folder / PARAMETERS).is_dir() and files.is_checkpoint(folder)), None
    )


def open_source(folder: Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open a universal checkpoint. Raises CheckpointError if it is damaged or unsupported, UnknownModelError
    if ``model`` is required.
    """
    if model is None:
        raise unknown_model_error(folder)
    try:
        models, stage3 = files.read_models(folder, allow_both=True)  # one folder may serve all ZeRO stages
        saved = SavedCheckpoint(
            folder=folder,
            models=models,
            partitions=(),
            layers={},
            tensor=_tensor_ranks(models),
            stage3=stage3,
        )
        _refuse_scrambled(saved)
        shapes = _shapes(folder, models)
        steps: list[object] = []
        tensor_ranks = [
            {name: _read_parameter(folder, name, shape, steps) for name, shape in of_rank.items()}
            for of_rank in shapes
        ]
        stages = read_weights(saved)
        for name, local in ((name, local) for of_rank in tensor_ranks for name, local in of_rank.items()):
            known = (ranks[name].model_dtype for stage in stages for ranks in stage if name in ranks)
            # the files of pipeline stages have no weights
            local.model_dtype = next(known, saved.weights_dtype)
        settings = files.load_file(folder, SETTINGS)
        _refuse_without_maxima(folder, settings, tensor_ranks)
        scalars = read_counts(saved) | _read_optimizer_scalars(folder, settings, steps)
        catalog = build_catalog(
            folder,
            model,
            [*([of_rank] for of_rank in tensor_ranks), *map(drop_placeholders, stages)],
            scalars,
        )
    except DamagedFile as damage:
        raise foreign_damage_error(folder, damage) from damage
    return build_source("universal", catalog, model, {"layout": "none: every parameter whole"}, models)


def _refuse_scrambled(saved: SavedCheckpoint) -> None:
    """Raise CheckpointError for a checkpoint that was converted from a run with ``round_robin_gradients``.

    The converter uses the recorded slices, whose order is different, so it wrote parameters that consist of
    parts of others.
    """
    settings = saved.settings.get("zero_optimization")
    if (
        isinstance(settings, Mapping)
        and settings.get("round_robin_gradients")
        and not saved.stage3
        and saved.data > 1
    ):
        raise files.unsupported_error(
            saved.folder,
            "was converted from a run with round_robin_gradients, which ds_to_universal scrambles",
            "use the checkpoint that it was converted from, which can be read",
        )


def _refuse_without_maxima(
    folder: Path, settings: SavedFile, tensor_ranks: Sequence[Mapping[str, RankParameter]]
) -> None:
    """Raise CheckpointError for AMSGrad without its third state, which DeepSpeed's converter silently
    drops.
    """
    amsgrad = any(
        group.get("amsgrad")
        for group in (*zero.read_groups(settings), *(settings.content.get("param_groups") or ()))
    )
    if amsgrad and not all(MAXIMA in local.moments for of_rank in tensor_ranks for local in of_rank.values()):
        raise files.unsupported_error(
            folder,
            f"is of AMSGrad and lacks its third state, {MAXIMA}, which ds_to_universal drops",
            "use the checkpoint that it was converted from, whose states can all be read",
        )


def _tensor_ranks(models: tuple[SavedFile, ...]) -> int:
    """Return the number of tensor ranks. Files of pipeline stages have no weights; otherwise every
    model-parallel rank is a tensor rank.
    """
    return len(models) if isinstance(models[0].content.get("module"), Mapping) else 1


def _shapes(folder: Path, models: tuple[SavedFile, ...]) -> list[dict[str, Shape]]:
    """Return the shape of every parameter with optimizer state, for the first rank that has it.

    This toolkit's files do not record shapes; they are unknown (``()``) until the parameter's files are read.
    Raises DamagedFile.
    """
    found: list[dict[str, Shape]] = []
    for file in models:
        shapes = {
            name: shape for group in file.content.get("param_shapes") or () for name, shape in group.items()
        }
        found.append(
            {name: shape for name, shape in shapes.items() if not any(name in other for other in found)}
        )
    if not any(found):
        found = [{path.parent.name: () for path in sorted((folder / PARAMETERS).glob(f"*/{MASTER_FILE}"))}]
    if not any(found):
        raise DamagedFile(
            models[0].name,
            f"{models[0].name} names no parameters",
            "a universal checkpoint is converted from one of ZeRO",
        )
    return found


def _read_parameter(folder: Path, name: str, shape: Shape, steps: list[object]) -> RankParameter:
    """Read all states of a parameter and append its step count to ``steps``. ``shape`` is used if the
    tensors are flat.
    """
    parent = f"{PARAMETERS}/{name}"
    if not resolve_file(folder, f"{parent}/{MASTER_FILE}").is_file():
        raise DamagedFile(
            f"{parent}/{MASTER_FILE}",
            f"{folder / parent / MASTER_FILE} is missing",
            "every parameter has its files",
        )
    found = RankParameter(shape)
    for path in sorted((folder / parent).glob("*.pt")):
        file = f"{parent}/{path.name}"
        if path.name == STEP_FILE:
            steps.append(torch_zip.load(folder, file))
            continue
        tensor, whole = _tensor(folder, file)
        content = WholeTensor(tensor)
        if whole:
            found.shape = tensor.shape
        if path.name == MASTER_FILE:
            found.master = content
        else:
            found.moments[path.name.removesuffix(".pt")] = content
    return found


def _tensor(folder: Path, file: str) -> tuple[StoredTensor, bool]:
    """Return the tensor of a file, and whether it has the parameter's shape (otherwise it is flat)."""
    value = torch_zip.load(folder, file)
    tensor = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(tensor, StoredTensor):
        raise DamagedFile(
            file, f"{folder / file} contains no tensor", "each state of a parameter is one tensor"
        )
    return tensor, isinstance(value, Mapping)


def _read_optimizer_scalars(folder: Path, settings: SavedFile, steps: list[object]) -> dict[str, object]:
    """Return the step count and the loss scaler. Raises DamagedFile if parameters disagree."""
    found: dict[str, object] = {}
    counts = {torch_zip.read_number(folder, step) for step in (*steps, *_steps_of(settings))}
    if len(counts) > 1:
        raise DamagedFile(
            SETTINGS,
            f"the optimizer's steps are {sorted(counts)}",
            "all parameters have taken the same steps",
        )
    if counts:
        found[OPTIMIZER_STEP] = int(counts.pop())
    found.update(optim_settings(settings.content.get("param_groups") or ()))
    scaler = read_loss_scaler(settings.content)
    return {**found, LOSS_SCALER: scaler} if scaler else found


def _steps_of(settings: SavedFile) -> Iterator[object]:
    yield from zero.read_steps(settings)
    for group in settings.content.get("param_groups") or ():
        if group.get("step") is not None:
            yield group["step"]
