"""Weights in the format that ``transformers`` and everything around it read: ``config.json`` and safetensors.

Reading makes a catalog of the folder, with the family's map from published names to canonical ones; export streams the
weights out again, window by window, so that memory does not grow with the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import families
from toolkit.checkpoint.catalog import DTYPES, Catalog, Damage, Piece, byte_length
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.formats.safetensors import Slot
from toolkit.checkpoint.reader import windows
from toolkit.checkpoint.shard import WEIGHT, Box, Reader, TensorInfo, TensorKey
from toolkit.checkpoint.source import Source
from toolkit.errors import CheckpointError, InputError, Problem
from toolkit.families.base import HubTensor, ModelShape
from toolkit.files import sync_folder, write_whole

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                   "tokenizer.model", "chat_template.jinja", "generation_config.json")
SHARD_BYTES = 5 * 10**9  # of one file, as transformers does it
_STEM = "model-"

Slots = Mapping[str, tuple[str, Slot]]  # published name -> file, and place in it


# ---- reading


def find(path: Path) -> Path | None:
    return path if (path / CONFIG).is_file() else None


def open_source(folder: Path, model: ModelShape | None = None) -> Source:
    """The weights of a published or exported folder, in their stored dtypes. ``config.json`` says what the model is.

    Raises:
        CheckpointError: a file or tensor is missing or is not what ``config.json`` says.
        InputError: a family, or a variant of one, that the toolkit does not know.
    """
    config = _read_json(folder / CONFIG)
    family = families.FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(Problem(str(folder / CONFIG), f"model_type={config.get('model_type')} in {folder / CONFIG}",
                                 f"a folder is of a family that the toolkit knows: {', '.join(families.FAMILIES)}",
                                 "give the model as model.target=my.package.Model"))
    try:
        slots = _slots(folder)
    except Damage as damage:
        raise _refuse(folder, damage) from damage
    shape = family.settle(family.from_hugging_face_config(config))
    sizes = {spec.name: spec.shape for spec in family.parameters(shape)}
    pieces: dict[TensorKey, tuple[Piece, ...]] = {}
    for piece in _pieces(folder, family.hub(shape), sizes, slots):
        pieces[piece.key] = (*pieces.get(piece.key, ()), piece)
    tensors = {key: TensorInfo(of_key[0].dtype, of_key[0].global_shape) for key, of_key in pieces.items()}
    return Source(format="huggingface", catalog=Catalog(folder, tensors, pieces), namespace=family.namespace, step=None, shape=shape,
                  refuse=_refuse)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _refuse(path.parent, Damage(path.name, f"{path} is missing", "a Hugging Face folder has it")) from None
    except ValueError as error:
        raise _refuse(path.parent, Damage(path.name, f"{path} is not JSON ({error})", "a Hugging Face folder has it as JSON")) from error
    if not isinstance(content, dict):
        raise _refuse(path.parent, Damage(path.name, f"{path} is not a JSON object", "a Hugging Face folder has it as an object"))
    return content


def _slots(folder: Path) -> Slots:
    """``model.safetensors`` wins over an index, as in transformers."""
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        index = _read_json(folder / INDEX)
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
            raise Damage(INDEX, f"{folder / INDEX} has no weight_map of files beside it", "an index names the file of each tensor")
        files = sorted(set(names.values()))
    else:
        raise Damage(SINGLE, f"{folder} has neither {SINGLE} nor {INDEX}", "weights are read from safetensors files")
    return {slot.name: (file, slot) for file in files for slot in safetensors.decode(folder / file)[0]}


def _pieces(folder: Path, hub: Sequence[HubTensor], sizes: Mapping[str, tuple[int, ...]], slots: Slots) -> list[Piece]:
    """Raises CheckpointError naming every tensor that is missing or of another shape."""
    problems, pieces = [], []
    dtypes: dict[str, str] = {}
    for tensor in hub:
        found = next((slots[name] for name in (tensor.name, *tensor.aliases) if name in slots), None)
        if found is None:
            problems.append(Problem(str(folder), f"{folder} has no tensor {tensor.name}", "a folder has every tensor of its config.json",
                                    "download or export it again, or correct config.json"))
            continue
        file, slot = found
        dtype = dtypes.setdefault(tensor.canonical, slot.dtype)
        if slot.shape != tensor.shape or slot.dtype != dtype:
            problems.append(Problem(str(folder / file), f"{tensor.name} is {slot.dtype} {slot.shape} in {folder / file}",
                                    f"config.json makes it {dtype} {tensor.shape}", "correct config.json or take the folder's own"))
            continue
        pieces.append(Piece(TensorKey(WEIGHT, tensor.canonical), slot.dtype, sizes[tensor.canonical], Box(tensor.offset, tensor.extent),
                            file, slot.begin, slot.end))
    if problems:
        raise CheckpointError(*problems[:8])
    return pieces


def _refuse(folder: Path, damage: Damage) -> CheckpointError:
    remedy = "download or export the folder again; other formats become safetensors with transformers' save_pretrained"
    return CheckpointError(Problem(str(folder / damage.file), damage.seen, damage.rule, remedy))


# ---- writing


@dataclass(frozen=True, slots=True)
class _Export:
    """One tensor of the folder: ``box`` of a canonical one, under its published name and shape."""

    name: str
    shape: tuple[int, ...]
    key: TensorKey
    global_shape: tuple[int, ...]
    box: Box


def export(reader: Reader, shape: ModelShape | None, folder: str | Path, *, dtype: str | None = None, tokenizer: Path | None = None,
           config: Mapping[str, Any] | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the weights as a folder that ``AutoModelForCausalLM.from_pretrained`` opens.

    Args:
        reader: of a checkpoint; the weights are read from master weights where ``dtype`` is wider than what is stored.
        shape: None for ``model.target``: one ``model.safetensors`` of the state dict.
        dtype: torch's name (``bfloat16``); None: as the weights are stored.
        tokenizer: a folder whose tokenizer files are copied.
        config: of ``model.target``, where its module is transformers' own; without it there is no ``config.json``.
        shard_bytes: a file holds no more than this, except for a single larger tensor.

    Returns:
        ``folder``, which appears whole or not at all; an earlier export there is replaced.

    Raises:
        CheckpointError: the reader lacks a weight.
        InputError: an unknown dtype, or ``folder`` holds something that is not an export.
    """
    folder = Path(folder)
    if dtype is not None and not (dtype in DTYPES and DTYPES[dtype].is_float):
        raise InputError(Problem("dtype", f"dtype={dtype}", "weights are exported as floating point", "write bfloat16, float16 or float32"))
    _check_replaceable(folder)
    tensors = _to_export(reader, shape)
    dtypes = {item.name: dtype or _stored_dtype(reader, item.key) for item in tensors}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        _write_weights(temporary, tensors, dtypes, reader, shard_bytes)
        if shape is not None:
            config = families.get(shape.family).hugging_face_config(shape)
        if config is not None:
            write_whole(temporary / CONFIG, json.dumps({**config, "dtype": dtype or _commonest(dtypes)}, indent=2) + "\n")
        for name in TOKENIZER_FILES if tokenizer is not None else ():
            assert tokenizer is not None
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, temporary / name)
        sync_folder(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.replace(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return folder


def _check_replaceable(folder: Path) -> None:
    known = {CONFIG, SINGLE, INDEX, *TOKENIZER_FILES}
    present = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    foreign = [name for name in present if name not in known and not (name.startswith(_STEM) and name.endswith(".safetensors"))]
    if foreign or (folder.exists() and not folder.is_dir()):
        raise InputError(Problem(str(folder), f"{folder} holds {', '.join(foreign[:3]) or 'a file'}",
                                 "an export replaces an earlier export only", "export to a new folder"))


def _to_export(reader: Reader, shape: ModelShape | None) -> list[_Export]:
    if shape is None:
        whole = {key: reader.tensors[key].shape for key in sorted(reader.tensors) if key.state == WEIGHT}
        return [_Export(key.name, size, key, size, Box.whole(size)) for key, size in whole.items()]
    family = families.get(shape.family)
    sizes = {spec.name: spec.shape for spec in family.parameters(shape)}
    return [_Export(hub.name, hub.shape, TensorKey(WEIGHT, hub.canonical), sizes[hub.canonical], Box(hub.offset, hub.extent))
            for hub in family.hub(shape)]


def _stored_dtype(reader: Reader, key: TensorKey) -> str:
    return reader.tensors[key].dtype if key in reader.tensors else "float32"


def _commonest(dtypes: Mapping[str, str]) -> str:
    return max(sorted(set(dtypes.values())), key=list(dtypes.values()).count)


def _write_weights(folder: Path, tensors: Sequence[_Export], dtypes: Mapping[str, str], reader: Reader, shard_bytes: int) -> None:
    groups = _groups(tensors, dtypes, shard_bytes)
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"{_STEM}{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name, group in zip(names, groups, strict=True):
        _write_file(folder / name, group, dtypes, reader)
    if count > 1:
        total = sum(byte_length(dtypes[item.name], item.shape) for item in tensors)
        weight_map = {item.name: name for name, group in zip(names, groups, strict=True) for item in group}
        write_whole(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _groups(tensors: Sequence[_Export], dtypes: Mapping[str, str], shard_bytes: int) -> list[list[_Export]]:
    groups: list[list[_Export]] = [[]]
    filled = 0
    for item in tensors:
        size = byte_length(dtypes[item.name], item.shape)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def _write_file(path: Path, tensors: Sequence[_Export], dtypes: Mapping[str, str], reader: Reader) -> None:
    by_name = {item.name: item for item in tensors}
    header, slots = safetensors.encode([(item.name, dtypes[item.name], item.shape) for item in tensors], {"format": "pt"})
    with path.open("wb") as file:
        file.write(header)
        for slot in slots:
            item = by_name[slot.name]
            for window in windows(reader, item.key, item.global_shape, item.box, slot.dtype):
                file.write(window.view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
