"""Read PyTorch's distributed checkpoints (DCP) of plain models: ``.metadata`` and ``.distcp`` files.

Keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict`` as ``dcp.save`` flattens them,
with any prefix (``model.``, ``app.model.``, ``optim.``):

    model.NAME                      a parameter, by its name in transformers
    optim.state.NAME.exp_avg        an optimizer state of it, or its ``step``
    optim.param_groups.0.lr         optimizer settings; with flatten_optimizer_state_dict the name replaces
                                    the number

Any sharding is supported, since a chunk is a box. The format does not record the training step; the
optimizer's step is used.

Sources: ``torch/distributed/checkpoint/state_dict.py``, ``_nested_dict.py``, ``filesystem.py``. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import DTYPES, Catalog, DamagedFile, LazyPieces, TensorPiece
from toolkit.checkpoint.formats import torch_zip
from toolkit.checkpoint.formats.dcp.metadata import (
    METADATA,
    ChunkedTensor,
    DcpMetadata,
    check_coverage,
    load_metadata,
    open_chunk,
)
from toolkit.checkpoint.formats.megatron.common import COMMON
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.planner import MAX_PROBLEMS
from toolkit.checkpoint.scalars import OPTIM, OPTIM_SETTINGS, OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import WEIGHT, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, foreign_damage_error
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape

NAME = "dcp"
STEP_STATE = "step"
_STATE = re.compile(r"^(?:.+\.)?state\.(.+)\.([^.]+)$")
_SETTING = re.compile(rf"^(?:.+\.)?param_groups\.(.+)\.({'|'.join(OPTIM_SETTINGS)})$")


def find(path: Path) -> Path | None:
    """Return ``path`` if it is a DCP checkpoint that Megatron-core did not write."""
    return path if (path / METADATA).is_file() and not (path / COMMON).is_file() else None


def open_source(folder: Path, model: ModelShape | None = None) -> CheckpointSource:
    """Open a DCP checkpoint. Raises CheckpointError if it is damaged or of another model, UnknownModelError
    if ``model`` is required.
    """
    if model is None:
        raise unknown_model_error(folder)
    try:
        return _source(folder, load_metadata(folder), model)
    except DamagedFile as damage:
        raise foreign_damage_error(folder, damage) from damage


@dataclass(frozen=True, slots=True)
class _SortedKeys:
    """Keys of tensors by canonical name or alias, of the optimizer's counts by name, and the rest."""

    tensors: Mapping[TensorKey, str]
    counts: Mapping[str, str]
    rest: Sequence[str]


def _source(folder: Path, metadata: DcpMetadata, shape: ModelShape) -> CheckpointSource:
    family = families.get_family(shape.family)
    shapes = {spec.name: spec.shape for spec in family.parameters(shape)}
    tied_weights = family.tied_weights(shape)
    sorted_keys = _sort_keys(folder, metadata.tensors, {*shapes, *tied_weights})
    names, copy_names = _resolve_ties(sorted_keys.tensors, tied_weights)
    _check_model(folder, names, metadata, shapes, shape)
    for key in (*names.values(), *copy_names.values()):
        check_coverage(key, metadata.tensors[key])

    def pieces(keys: Mapping[TensorKey, str]) -> LazyPieces:
        infos = {
            key: TensorInfo(metadata.tensors[name].dtype, shapes[key.name]) for key, name in keys.items()
        }
        return LazyPieces(infos, lambda key: tuple(_pieces(folder, key, metadata.tensors[keys[key]])))

    tensors = {key: TensorInfo(metadata.tensors[name].dtype, shapes[key.name]) for key, name in names.items()}
    scalars = _read_scalars(
        folder, metadata, sorted_keys.counts, {name for name, size in shapes.items() if len(size) > 1}
    )
    step = scalars.get(STEP)
    if len(tensors) > len(shapes) and step is None:
        raise DamagedFile(
            METADATA,
            f"{folder} has optimizer states but no {STEP_STATE}",
            "Adam's bias correction needs the number of steps",
        )
    chunks = max(len(stored.chunks) for stored in metadata.tensors.values())
    others = sorted(
        {
            key.partition(".")[0]
            for key in metadata.objects
            if not _SETTING.match(key) and ".param_groups." not in key
        }
    )
    return CheckpointSource(
        format=NAME,
        catalog=Catalog(folder, tensors, pieces(names), scalars, pieces(copy_names)),
        namespace=family.namespace,
        step=step if isinstance(step, int) else None,
        shape=shape,
        omitted=(*others, *sorted_keys.rest),
        damage_error=foreign_damage_error,
        description={
            "written by": "torch.distributed.checkpoint",
            "layout": f"tensors in up to {chunks} chunks",
        },
    )


def _sort_keys(folder: Path, keys: Collection[str], names: Collection[str]) -> _SortedKeys:
    """Sort the keys by what they store. Raises CheckpointError if two keys name the same tensor, or optimizer
    state is keyed by numbers.
    """
    tensors: dict[TensorKey, str] = {}
    counts: dict[str, str] = {}
    rest: list[str] = []
    for key in keys:
        state, name = WEIGHT, _strip_prefix(key, names)
        if name is None and (of_state := _STATE.match(key)):
            path, state = of_state.groups()
            if path.isdecimal():
                raise CheckpointError(
                    Problem(
                        str(folder),
                        f"{folder} has {key}: optimizer state keyed by parameter numbers",
                        "optimizer state is found by parameter names",
                        "save torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer), "
                        "whose keys have names",
                    )
                )
            name = _strip_prefix(path, names)
        if name is None:
            rest.append(key)
        elif state == STEP_STATE:
            counts[name] = key
        else:
            other = tensors.setdefault(TensorKey(state, name), key)
            if other != key:
                raise CheckpointError(
                    Problem(
                        str(folder),
                        f"{folder} has both {other} and {key}",
                        "a checkpoint contains one model",
                        "save only one of them",
                    )
                )
    return _SortedKeys(tensors, counts, rest)


def _strip_prefix(key: str, names: Collection[str]) -> str | None:
    """Return the part of ``key`` that is a name, without a prefix, or None."""
    rest = key
    while rest and rest not in names:
        rest = rest.partition(".")[2]
    return rest or None


def _resolve_ties(
    tensors: Mapping[TensorKey, str], tied: Mapping[str, str]
) -> tuple[dict[TensorKey, str], dict[TensorKey, str]]:
    """Return keys by canonical tensor, and keys of second copies under a tied name."""
    own = {key: name for key, name in tensors.items() if key.name not in tied}
    second = {}
    for key, name in tensors.items():
        if key.name in tied:
            canonical = TensorKey(key.state, tied[key.name])
            if own.setdefault(canonical, name) != name:
                second[canonical] = name
    return own, second


def _check_model(
    folder: Path,
    keys: Mapping[TensorKey, str],
    metadata: DcpMetadata,
    shapes: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
) -> None:
    """Raise CheckpointError naming the tensors that are missing or have another shape."""
    remedy = "set the model options to those of the checkpoint"
    of_model = f"of a model of family {shape.family} with these sizes"
    problems = [
        Problem("model", f"{folder} has no {name}", f"it is a tensor {of_model}", remedy)
        for name in shapes
        if TensorKey(WEIGHT, name) not in keys
    ]
    for key, name in keys.items():
        stored = metadata.tensors[name]
        if stored.shape != shapes[key.name] or stored.dtype not in DTYPES:
            problems.append(
                Problem(
                    "model",
                    f"{folder} has {name}: {stored.dtype} {stored.shape}",
                    f"{of_model} it is {shapes[key.name]}",
                    remedy,
                )
            )
    if problems:
        raise CheckpointError(*problems[:MAX_PROBLEMS])


def _pieces(folder: Path, key: TensorKey, stored: ChunkedTensor) -> Iterator[TensorPiece]:
    for chunk in stored.chunks:
        yield from torch_zip.tensor_pieces(
            open_chunk(folder, chunk, stored.dtype), key, stored.shape, chunk.box
        )


def _read_scalars(
    folder: Path, metadata: DcpMetadata, counts: Mapping[str, str], matrices: Collection[str]
) -> dict[str, object]:
    """Read the values other than tensors. Raises DamagedFile if the parameters' step counts differ."""
    steps: dict[int, str] = {}
    for name, key in counts.items():
        stored = metadata.tensors[key]
        if stored.chunks:
            steps.setdefault(
                int(torch_zip.read_number(folder, open_chunk(folder, stored.chunks[0], stored.dtype))), name
            )
    if len(steps) > 1:
        seen = " and ".join(f"{name} at step {step}" for step, name in list(steps.items())[:2])
        raise DamagedFile(METADATA, f"{folder} has {seen}", "all parameters have taken the same steps")
    found: dict[str, object] = {name: step for step in steps for name in (STEP, OPTIMIZER_STEP)}
    settings = _read_settings(folder, metadata, matrices)
    return found | {OPTIM: settings} if settings else found


def _read_settings(folder: Path, metadata: DcpMetadata, matrices: Collection[str]) -> dict[str, object]:
    """Return the optimizer's settings for parameters that decay, or an empty dict if they are incomplete."""
    groups: dict[str, dict[str, str]] = {}
    for key in metadata.objects:
        if (match := _SETTING.match(key)) is not None:
            groups.setdefault(match[1], {})[match[2]] = key
    chosen = [group for name, group in groups.items() if name.isdecimal()]
    chosen = chosen or [group for name, group in groups.items() if name in matrices][:1]
    found: list[dict[str, object]] = []
    for group in chosen:
        if len(group) == len(OPTIM_SETTINGS):
            blobs = {name: metadata.objects[group[name]] for name in OPTIM_SETTINGS}
            values = {
                name: torch_zip.load(folder, blob.file, blob.begin, blob.end) for name, blob in blobs.items()
            }
            found.append(
                {
                    name: list(value)
                    if isinstance(value, (list, tuple))
                    else torch_zip.read_number(folder, value)
                    for name, value in values.items()
                }
            )
    return max(found, key=lambda group: float(str(group["weight_decay"])), default={})
