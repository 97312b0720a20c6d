"""PyTorch's distributed checkpoints (DCP) of a plain model, read: ``.metadata`` and ``.distcp`` files.

Keys are what ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives and ``dcp.save`` flattens, under any names that the
script has put before them (``model.``, ``app.model.``, ``optim.``):

    model.NAME                      a parameter, by its name in transformers
    optim.state.NAME.exp_avg        what the optimizer keeps of it, and ``step``
    optim.param_groups.0.lr         settings of the optimizer; with flatten_optimizer_state_dict the name in place of the number

Any sharding is read: a chunk is a box. Training's own step has no place in the format: it is taken to be the optimizer's.

Sources: ``torch/distributed/checkpoint/state_dict.py``, ``_nested_dict.py``, ``filesystem.py``. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import families
from toolkit.checkpoint.catalog import DTYPES, Catalog, Damage, Made, Piece
from toolkit.checkpoint.formats import dcp_metadata, torch_zip
from toolkit.checkpoint.formats.dcp_metadata import METADATA, Metadata, Stored
from toolkit.checkpoint.formats.megatron_common import COMMON
from toolkit.checkpoint.nearby import model_unknown
from toolkit.checkpoint.planner import MOST_PROBLEMS
from toolkit.checkpoint.scalars import OPTIM, OPTIM_SETTINGS, OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import WEIGHT, TensorInfo, TensorKey
from toolkit.checkpoint.source import Source, vendors_refusal
from toolkit.errors import CheckpointError, Problem
from toolkit.families.base import ModelShape

NAME = "dcp"
COUNT = "step"
_STATE = re.compile(r"^(?:.+\.)?state\.(.+)\.([^.]+)$")
_SETTING = re.compile(rf"^(?:.+\.)?param_groups\.(.+)\.({'|'.join(OPTIM_SETTINGS)})$")


def find(path: Path) -> Path | None:
    return path if (path / METADATA).is_file() and not (path / COMMON).is_file() else None


def open_source(folder: Path, model: ModelShape | None = None) -> Source:
    """Raises CheckpointError: it is damaged, or of another model. InputError: the model must be said."""
    if model is None:
        raise model_unknown(folder)
    try:
        return _source(folder, dcp_metadata.load(folder), model)
    except Damage as damage:
        raise vendors_refusal(folder, damage) from damage


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Keys by what they are: of tensors by canonical name or alias, the optimizer's counts by name, the rest."""

    tensors: Mapping[TensorKey, str]
    counts: Mapping[str, str]
    rest: Sequence[str]


def _source(folder: Path, metadata: Metadata, shape: ModelShape) -> Source:
    family = families.get_family(shape.family)
    shapes = {spec.name: spec.shape for spec in family.parameters(shape)}
    tied = family.tied_weights(shape)
    found = _sort(folder, metadata.tensors, {*shapes, *tied})
    firsts, seconds = _by_name(found.tensors, tied)
    _check_model(folder, firsts, metadata, shapes, shape)
    for key in (*firsts.values(), *seconds.values()):
        dcp_metadata.check_whole(key, metadata.tensors[key])

    def pieces(keys: Mapping[TensorKey, str]) -> Made:
        infos = {
            key: TensorInfo(metadata.tensors[name].dtype, shapes[key.name]) for key, name in keys.items()
        }
        return Made(infos, lambda key: tuple(_pieces(folder, key, metadata.tensors[keys[key]])))

    tensors = {
        key: TensorInfo(metadata.tensors[name].dtype, shapes[key.name]) for key, name in firsts.items()
    }
    scalars = _scalars(
        folder, metadata, found.counts, {name for name, size in shapes.items() if len(size) > 1}
    )
    step = scalars.get(STEP)
    if len(tensors) > len(shapes) and step is None:
        raise Damage(
            METADATA,
            f"{folder} has the optimizer's states and no {COUNT}",
            "Adam corrects by the number of its steps",
        )
    chunks = max(len(stored.chunks) for stored in metadata.tensors.values())
    others = sorted(
        {
            key.partition(".")[0]
            for key in metadata.objects
            if not _SETTING.match(key) and ".param_groups." not in key
        }
    )
    return Source(
        format=NAME,
        catalog=Catalog(folder, tensors, pieces(firsts), scalars, pieces(seconds)),
        namespace=family.namespace,
        step=step if isinstance(step, int) else None,
        shape=shape,
        left_out=(*others, *found.rest),
        refuse=vendors_refusal,
        facts={"written by": "torch.distributed.checkpoint", "layout": f"tensors in up to {chunks} chunks"},
    )


def _sort(folder: Path, keys: Collection[str], names: Collection[str]) -> _Sorted:
    """Raises CheckpointError: two keys mean one tensor, or the optimizer's state has numbers for names."""
    tensors: dict[TensorKey, str] = {}
    counts: dict[str, str] = {}
    rest: list[str] = []
    for key in keys:
        state, name = WEIGHT, _named(key, names)
        if name is None and (of_state := _STATE.match(key)):
            path, state = of_state.groups()
            if path.isdecimal():
                raise CheckpointError(
                    Problem(
                        str(folder),
                        f"{folder} has {key}: the optimizer's state by numbers of parameters",
                        "state is found by names of parameters",
                        "save torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer), whose keys have names",
                    )
                )
            name = _named(path, names)
        if name is None:
            rest.append(key)
        elif state == COUNT:
            counts[name] = key
        else:
            other = tensors.setdefault(TensorKey(state, name), key)
            if other != key:
                raise CheckpointError(
                    Problem(
                        str(folder),
                        f"{folder} has both {other} and {key}",
                        "a checkpoint holds one model",
                        "save the one to be read alone",
                    )
                )
    return _Sorted(tensors, counts, rest)


def _named(key: str, names: Collection[str]) -> str | None:
    """What of ``key`` is a name, after others that stand before it."""
    rest = key
    while rest and rest not in names:
        rest = rest.partition(".")[2]
    return rest or None


def _by_name(
    tensors: Mapping[TensorKey, str], tied: Mapping[str, str]
) -> tuple[dict[TensorKey, str], dict[TensorKey, str]]:
    """Keys by canonical tensor, and of what is there a second time under a tied name. One that is there under that name only is it."""
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
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
) -> None:
    """Raises CheckpointError naming what is missing or of another shape."""
    remedy = "describe the model that the checkpoint was made of"
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
        raise CheckpointError(*problems[:MOST_PROBLEMS])


def _pieces(folder: Path, key: TensorKey, stored: Stored) -> Iterator[Piece]:
    for chunk in stored.chunks:
        yield from torch_zip.pieces_of(
            dcp_metadata.open_chunk(folder, chunk, stored.dtype), key, stored.shape, chunk.box
        )


def _scalars(
    folder: Path, metadata: Metadata, counts: Mapping[str, str], matrices: Collection[str]
) -> dict[str, object]:
    """Raises Damage: the optimizer's counts differ."""
    steps: dict[int, str] = {}
    for name, key in counts.items():
        stored = metadata.tensors[key]
        if stored.chunks:
            steps.setdefault(
                int(
                    torch_zip.number(folder, dcp_metadata.open_chunk(folder, stored.chunks[0], stored.dtype))
                ),
                name,
            )
    if len(steps) > 1:
        seen = " and ".join(f"{name} at step {step}" for step, name in list(steps.items())[:2])
        raise Damage(METADATA, f"{folder} has {seen}", "all parameters have taken the same steps")
    found: dict[str, object] = {name: step for step in steps for name in (STEP, OPTIMIZER_STEP)}
    settings = _settings(folder, metadata, matrices)
    return found | {OPTIM: settings} if settings else found


def _settings(folder: Path, metadata: Metadata, matrices: Collection[str]) -> dict[str, object]:
    """Of the optimizer, those of the parameters that decay; empty where they are not all there."""
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
                    name: list(value) if isinstance(value, (list, tuple)) else torch_zip.number(folder, value)
                    for name, value in values.items()
                }
            )
    return max(found, key=lambda group: float(str(group["weight_decay"])), default={})
