"""Writing Hugging Face's format: weights that ``transformers`` opens and, if asked, what training resumes from beside them.

See ``huggingface.py`` for the files. Imports no torch.
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
from toolkit.checkpoint import manifest, nearby, states
from toolkit.checkpoint.catalog import Piece, byte_length
from toolkit.checkpoint.formats import safetensors
from toolkit.checkpoint.formats.huggingface import (
    CONFIG,
    INDEX,
    OPTIMIZER,
    SINGLE,
    STATE,
    STATE_FORMAT,
    STATE_VERSION,
)
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import MODEL, Source
from toolkit.checkpoint.target import Target, TargetFile
from toolkit.config.reshard import Format, TargetConfig
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
SHARD_BYTES = 5 * 10**9  # of one file, as transformers does it
_STEM = "model"


def lay_out(
    source: Source,
    config: TargetConfig,
    *,
    tokenizer: Path | None = None,
    hub_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Target:
    """A folder that ``AutoModelForCausalLM.from_pretrained`` opens; a model of no family becomes the files of its state dict.

    Args:
        config: ``precision`` null: each weight as it is stored. ``optimizer`` null: weights only.
        tokenizer: a folder whose tokenizer files are copied; None: the source's own, where it is in this format.
        hub_config: ``config.json`` of a model of no family; without it there is none.
        shard_bytes: a file holds no more than this, except for a single larger tensor.

    Raises:
        InputError: nobody says what model it is.
    """
    shape = source.shape
    if shape is None and source.namespace in {family.namespace for family in families.FAMILIES.values()}:
        raise nearby.model_unknown(source.folder)
    tensors = _tensors(source, config, shape)
    files, placed = _files(_STEM, _published(tensors, shape, WEIGHT), shard_bytes)
    if len(files) > 1:
        total = sum(piece.end - piece.begin for _, piece in placed)
        files.append(
            _text(
                INDEX,
                {
                    "metadata": {"total_size": total},
                    "weight_map": {name: piece.file for name, piece in placed},
                },
            )
        )
    scalars: dict[str, object] = {}
    if config.optimizer:
        scalars = {name: value for name, value in source.catalog.scalars.items() if name != MODEL}
        listed: dict[str, list[str]] = {}
        for state in dict.fromkeys(key.state for key in tensors if key.state != WEIGHT):
            of_state, more = _files(f"{OPTIMIZER}/{state}", _published(tensors, shape, state), shard_bytes)
            listed[state] = [Path(file.name).name for file in of_state]
            files += of_state
            placed += more
        files.append(
            _text(
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
            _text(CONFIG, {**hub_config, "dtype": max(sorted(set(dtypes)), key=dtypes.count)}, free=True)
        )
    if tokenizer is None and source.format == Format.huggingface.name:
        tokenizer = source.folder
    files += _tokenizer_files(tokenizer) if tokenizer is not None else ()
    pieces: dict[TensorKey, list[Piece]] = {key: [] for key in tensors}
    for _, piece in placed:
        pieces[piece.key].append(piece)
    return Target(
        format=Format.huggingface.name,
        namespace=source.namespace,
        step=source.step or 0,
        tensors=tensors,
        pieces=pieces,
        files=files,
        identity="\n".join(map(_identity, files)),
        manifest=manifest.BESIDE,
        scalars=scalars,
    )


def _tensors(source: Source, config: TargetConfig, shape: ModelShape | None) -> dict[TensorKey, TensorInfo]:
    """What the folder holds: all weights of the family, whatever the source has, so that those that it lacks are refused."""
    found = states.tensors_of(source, config.precision, optimizer=bool(config.optimizer), uniform=False)
    if shape is None:
        return dict(sorted(found.items()))
    sizes = {spec.name: spec.shape for spec in families.get_family(shape.family).parameters(shape)}
    dtype = states.weights_dtype(source, config.precision)
    weights = {TensorKey(WEIGHT, name): TensorInfo(dtype, size) for name, size in sizes.items()}
    return weights | {
        key: TensorInfo(info.dtype, sizes[key.name]) for key, info in found.items() if key.name in sizes
    }


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a file: ``box`` of the canonical tensor ``key``, under its published name and shape."""

    name: str
    shape: tuple[int, ...]
    key: TensorKey
    info: TensorInfo
    box: Box


def _published(
    tensors: Mapping[TensorKey, TensorInfo], shape: ModelShape | None, state: str
) -> Iterator[_Tensor]:
    if shape is None:
        for key, info in tensors.items():
            if key.state == state:
                yield _Tensor(key.name, info.shape, key, info, Box.whole(info.shape))
        return
    for hub in families.get_family(shape.family).hub_tensors(shape):
        key = TensorKey(state, hub.canonical)
        if key in tensors:
            yield _Tensor(hub.name, hub.shape, key, tensors[key], Box(hub.offset, hub.extent))


def _files(
    stem: str, tensors: Iterator[_Tensor], shard_bytes: int
) -> tuple[list[TargetFile], list[tuple[str, Piece]]]:
    """``stem.safetensors``, or as many files as are needed; and the piece of each tensor, by its published name."""
    groups: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = byte_length(tensor.info.dtype, tensor.shape)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    files: list[TargetFile] = []
    placed: list[tuple[str, Piece]] = []
    for number, group in enumerate(groups, 1):
        name = (
            f"{stem}.safetensors"
            if len(groups) == 1
            else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        of_group = {tensor.name: tensor for tensor in group}
        header, slots = safetensors.encode(
            [(tensor.name, tensor.info.dtype, tensor.shape) for tensor in group], {"format": "pt"}
        )
        for slot in slots:
            tensor = of_group[slot.name]
            placed.append(
                (
                    slot.name,
                    Piece(tensor.key, slot.dtype, tensor.info.shape, tensor.box, name, slot.begin, slot.end),
                )
            )
        files.append(TargetFile(name, slots[-1].end if slots else len(header), {0: header}))
    return files, placed


def _text(name: str, content: Mapping[str, Any], *, free: bool = False) -> TargetFile:
    data = (json.dumps(content, indent=2) + "\n").encode()
    return TargetFile(name, len(data), {0: data}, free=free)


def _tokenizer_files(folder: Path) -> Iterator[TargetFile]:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            data = _inside(folder, name).read_bytes()
            yield TargetFile(name, len(data), {0: data}, free=True)


def _inside(folder: Path, name: str) -> Path:
    try:
        return inside(folder, name)
    except UnsafePath as error:
        raise InputError(
            Problem(
                str(folder),
                f"{folder}: {error}",
                "the files of a tokenizer lie in its folder",
                "put the file itself there in place of the link",
            )
        ) from error


def _identity(file: TargetFile) -> str:
    return f"{file.name} {file.numbytes} {xxhash.xxh3_128_hexdigest(file.fixed[0])}"


# ---- at the end of a run


def export(
    source: Source,
    folder: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """The weights of ``source`` as a folder that ``AutoModelForCausalLM.from_pretrained`` opens. They are written as they are, whatever
    they are: the training is done.

    Args:
        source: of a model of no family, all of the state dict is written.
        dtype: torch's name (``bfloat16``); None: as the weights are stored.
        tokenizer, shard_bytes: as of ``lay_out``.
        config: of ``model.target``, where its module is transformers' own; without it there is no ``config.json``.

    Returns:
        ``folder``, which appears whole or not at all; an earlier export there is replaced.

    Raises:
        CheckpointError: the source lacks a weight, or is damaged.
        InputError: an unknown dtype, or ``folder`` holds something that is not an export.
    """
    folder = Path(folder)
    precision = next((precision for precision, name in states.DTYPES.items() if name == dtype), None)
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
        TargetConfig(format=Format.huggingface, precision=precision),
        tokenizer=tokenizer,
        hub_config=config,
        shard_bytes=shard_bytes,
    )
    made, old = folder.with_name(f".{folder.name}.made"), folder.with_name(f".{folder.name}.replaced")
    for left in (made, old):  # by a killed attempt
        if left.exists():
            shutil.rmtree(left)
    conversion = Conversion(
        source.catalog, target, made, origin=source.origin(), refuse=source.refuse, examine=False
    )
    try:
        conversion.run()
    except BaseException:
        shutil.rmtree(conversion.temporary, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    sync_folder(folder.parent)
    if old.exists():
        shutil.rmtree(old)
    return folder


def _check_replaceable(folder: Path) -> None:
    known: Sequence[str] = (CONFIG, SINGLE, INDEX, manifest.BESIDE, *TOKENIZER_FILES)
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
                f"{folder} holds {', '.join(foreign[:3]) or 'a file'}",
                "an export replaces an earlier export only",
                "export to a new folder",
            )
        )
