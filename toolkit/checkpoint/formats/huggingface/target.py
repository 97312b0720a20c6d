"""Write Hugging Face's format: weights for ``transformers`` and, if requested, the state that training
resumes from.

``source.py`` describes the files. Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from toolkit import families
from toolkit.checkpoint import manifest, target_tensors
from toolkit.checkpoint.catalog import TensorPiece, byte_length
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.formats.huggingface.source import (
    CONFIG,
    INDEX,
    OPTIMIZER,
    SINGLE,
    STATE,
    STATE_FORMAT,
    STATE_VERSION,
)
from toolkit.checkpoint.model_discovery import unknown_model_error
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, CheckpointSource
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.errors import InputError, Problem
from toolkit.families.base import ModelShape
from toolkit.files import sync_folder
from toolkit.paths import UnsafePath, inside

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
SHARD_BYTES = 5 * 10**9  # per file, as in transformers
_STEM = "model"
BUFFERS = f"{_STEM}-buffers.safetensors"


@dataclass(frozen=True, slots=True)
class BufferFile:
    """Buffers of a model's state dict, which no checkpoint has, as the content of a safetensors file."""

    names: Sequence[str]
    content: bytes


def lay_out(
    source: CheckpointSource,
    config: TargetConfig,
    *,
    tokenizer: Path | None = None,
    hub_config: Mapping[str, Any] | None = None,
    buffers: BufferFile | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> CheckpointTarget:
    """Lay out a folder for ``AutoModelForCausalLM.from_pretrained``; for a model without a family, the files
    of its state dict.

    Args:
        source: The source.
        config: ``precision`` null keeps each weight's stored dtype; ``optimizer`` null writes weights only.
        tokenizer: Folder whose tokenizer files are copied; None uses the source's own if it is in this
            format.
        hub_config: ``config.json`` of a model without a family; None writes none.
        buffers: Further tensors to write.
        shard_bytes: Maximum bytes per file, unless a single tensor is larger.

    Raises:
        UnknownModelError: The model is unknown.
    """
    shape = source.shape
    if shape is None and source.namespace in {family.namespace for family in families.FAMILIES.values()}:
        raise unknown_model_error(source.folder)
    tensors = _tensors(source, config, shape)
    files, placed = _files(
        _STEM, _published(tensors, shape, WEIGHT), shard_bytes, numbered=buffers is not None
    )
    weight_map = {name: piece.file for name, piece in placed}
    total = sum(piece.end - piece.begin for _, piece in placed)
    if buffers is not None:
        weight_map |= dict.fromkeys(buffers.names, BUFFERS)
        total += len(buffers.content)
        files.append(TargetFile(BUFFERS, len(buffers.content), {0: buffers.content}))
    if len(files) > 1:
        files.append(_json_file(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map}))
    scalars: dict[str, object] = {}
    if config.optimizer:
        scalars = {name: value for name, value in source.catalog.scalars.items() if name != MODEL}
        listed: dict[str, list[str]] = {}
        for state in dict.fromkeys(key.state for key in tensors if key.state != WEIGHT):
            state_files, state_pieces = _files(
                f"{OPTIMIZER}/{state}", _published(tensors, shape, state), shard_bytes
            )
            listed[state] = [Path(file.name).name for file in state_files]
            files += state_files
            placed += state_pieces
        files.append(
            _json_file(
                STATE,
                {
                    "format": STATE_FORMAT,
                    "format_version": STATE_VERSION,
                    "states": listed,
                    "scalars": scalars,
                },
            )
        )
    if shape is not None:
        scalars = {**scalars, MODEL: asdict(shape)}
        hub_config = families.get_family(shape.family).hugging_face_config(shape)
    if hub_config is not None:
        dtypes = [info.dtype for key, info in tensors.items() if key.state == WEIGHT]
        files.append(
            _json_file(CONFIG, {**hub_config, "dtype": max(sorted(set(dtypes)), key=dtypes.count)}, free=True)
        )
    if tokenizer is None and source.format == TargetFormat.huggingface.name:
        tokenizer = source.folder if isinstance(source.folder, Path) else None
    files += _tokenizer_files(tokenizer) if tokenizer is not None else ()
    pieces: dict[TensorKey, list[TensorPiece]] = {key: [] for key in tensors}
    for _, piece in placed:
        pieces[piece.key].append(piece)
    return CheckpointTarget(
        format=TargetFormat.huggingface.name,
        namespace=source.namespace,
        step=source.step or 0,
        tensors=tensors,
        pieces=pieces,
        files=files,
        identity="\n".join(map(_identity, files)),
        manifest=manifest.FOREIGN_NAME,
        scalars=scalars,
    )


def _tensors(
    source: CheckpointSource, config: TargetConfig, shape: ModelShape | None
) -> dict[TensorKey, TensorInfo]:
    """Return the tensors to write: all weights of the family, so that those that the source lacks are
    reported.
    """
    found = target_tensors.select_target_tensors(
        source, config.precision, optimizer=bool(config.optimizer), uniform=False
    )
    if shape is None:
        return dict(sorted(found.items()))
    sizes = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
    dtype = target_tensors.choose_weights_dtype(source, config.precision)
    weights = {TensorKey(WEIGHT, name): TensorInfo(dtype, size) for name, size in sizes.items()}
    return weights | {
        key: TensorInfo(info.dtype, sizes[key.name]) for key, info in found.items() if key.name in sizes
    }


@dataclass(frozen=True, slots=True)
class _PublishedTensor:
    """One tensor of a file: ``box`` of the canonical tensor ``key``, under its published name and shape."""

    name: str
    shape: tuple[int, ...]
    key: TensorKey
    info: TensorInfo
    box: Box


def _published(
    tensors: Mapping[TensorKey, TensorInfo], shape: ModelShape | None, state: str
) -> Iterator[_PublishedTensor]:
    if shape is None:
        for key, info in tensors.items():
            if key.state == state:
                yield _PublishedTensor(key.name, info.shape, key, info, Box.whole(info.shape))
        return
    for hub in families.get_family(shape.family).hub_tensors(shape):
        key = TensorKey(state, hub.canonical)
        if key in tensors:
            yield _PublishedTensor(hub.name, hub.shape, key, tensors[key], Box(hub.offset, hub.extent))


def _files(
    stem: str, tensors: Iterator[_PublishedTensor], shard_bytes: int, *, numbered: bool = False
) -> tuple[list[TargetFile], list[tuple[str, TensorPiece]]]:
    """Return ``stem.safetensors``, or as many files as needed, and the piece of each tensor by its
    published name.
    """
    groups: list[list[_PublishedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = byte_length(tensor.info.dtype, tensor.shape)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    files: list[TargetFile] = []
    placed: list[tuple[str, TensorPiece]] = []
    for number, group in enumerate(groups, 1):
        name = (
            f"{stem}.safetensors"
            if len(groups) == 1 and not numbered
            else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        of_group = {tensor.name: tensor for tensor in group}
        header, slots = safetensors.encode_header(
            [(tensor.name, tensor.info.dtype, tensor.shape) for tensor in group], {"format": "pt"}
        )
        for slot in slots:
            tensor = of_group[slot.name]
            placed.append(
                (
                    slot.name,
                    TensorPiece(
                        tensor.key, slot.dtype, tensor.info.shape, tensor.box, name, slot.begin, slot.end
                    ),
                )
            )
        files.append(TargetFile(name, slots[-1].end if slots else len(header), {0: header}))
    return files, placed


def _json_file(name: str, content: Mapping[str, Any], *, free: bool = False) -> TargetFile:
    data = (json.dumps(content, indent=2) + "\n").encode()
    return TargetFile(name, len(data), {0: data}, free=free)


def _tokenizer_files(folder: Path) -> Iterator[TargetFile]:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            data = _resolve_inside(folder, name).read_bytes()
            yield TargetFile(name, len(data), {0: data}, free=True)


def _resolve_inside(folder: Path, name: str) -> Path:
    try:
        return inside(folder, name)
    except UnsafePath as error:
        raise InputError(
            Problem(
                str(folder),
                f"{folder}: {error}",
                "the files of a tokenizer must be in its folder",
                "replace the link by the file itself",
            )
        ) from error


def _identity(file: TargetFile) -> str:
    return f"{file.name} {file.numbytes} {xxhash.xxh3_128_hexdigest(file.fixed[0])}"


# ---- export at the end of a run


def export(
    source: CheckpointSource,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    config: Mapping[str, Any] | None = None,
    buffers: BufferFile | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Export the weights of ``source`` to a folder for ``AutoModelForCausalLM.from_pretrained``, without
    examining their values.

    Args:
        source: The source. For a model without a family, the whole state dict is written.
        folder: Folder to create; an earlier export there is replaced.
        dtype: Torch's name (``bfloat16``); None keeps the stored dtypes.
        tokenizer, buffers, shard_bytes: As in ``lay_out``.
        config: ``config.json`` of a model without a family, if its class is transformers' own; None writes
            none.

    Returns:
        ``folder``, which appears complete or not at all.

    Raises:
        CheckpointError: The source lacks a weight or is damaged.
        InputError: The dtype is unknown, or ``folder`` contains something other than an export.
    """
    folder = Path(folder)
    precision = next(
        (precision for precision, name in target_tensors.DTYPE_OF_PRECISION.items() if name == dtype), None
    )
    if dtype is not None and precision is None:
        raise InputError(
            Problem(
                "dtype",
                f"dtype={dtype}",
                "weights are exported as floating point",
                "write bfloat16, float16 or float32",
            )
        )
    _check_replaceable(folder)
    target = lay_out(
        source,
        TargetConfig(format=TargetFormat.huggingface, precision=precision),
        tokenizer=tokenizer,
        hub_config=config,
        buffers=buffers,
        shard_bytes=shard_bytes,
    )
    temporary, old = folder.with_name(f".{folder.name}.made"), folder.with_name(f".{folder.name}.replaced")
    for left in (temporary, old):  # left by a killed attempt
        if left.exists():
            shutil.rmtree(left)
    conversion = Conversion(source, target, temporary, examine=False)
    try:
        conversion.run()
    except BaseException:
        shutil.rmtree(conversion.temporary, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
    if old.exists():
        shutil.rmtree(old)
    return folder


def _check_replaceable(folder: Path) -> None:
    known: Sequence[str] = (CONFIG, SINGLE, INDEX, manifest.FOREIGN_NAME, *TOKENIZER_FILES)
    present = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    foreign = [
        name
        for name in present
        if name not in known and not (name.startswith(f"{_STEM}-") and name.endswith(".safetensors"))
    ]
    if foreign or (folder.exists() and not folder.is_dir()):
        raise InputError(
            Problem(
                str(folder),
                f"{folder} contains {', '.join(foreign[:3]) or 'a file'}",
                "an export replaces only an earlier export",
                "export to a new folder",
            )
        )
