"""``import=PATH``: a manifest for Megatron's ``.bin`` and ``.idx`` files that others made, which are trained on where they lie.

FOLDER/NAME.bin NAME.idx ...     as they are
FOLDER/NAME.sums                 hashes of blocks, by which training checks what it reads
FOLDER/tokenizer/                a copy of tokenizer.path
FOLDER/manifest.json             written last
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.config.prepare import PrepareConfig
from toolkit.data.digest import Digest, digest
from toolkit.data.manifest import NAME, DataManifest, Origin, Shard, Split, TokenizerInfo, write_manifest
from toolkit.data.prepare.parts import SPLITS
from toolkit.data.prepare.report import versions
from toolkit.data.sums import ENDING, SumsOfStream
from toolkit.data.tokens import tokenizer_copy
from toolkit.data.tokens.index import IndexFile
from toolkit.data.tokens.tokenizer import FILE, FOLDER
from toolkit.data.tokens.writer import write_sums
from toolkit.errors import InputError, Problem
from toolkit.files import sync_folder
from toolkit.progress import Progress, ProgressTask

READABLE = ("uint16", "int32")
TOKENS_AT_ONCE = 8 << 20
NEW = ".import"  # folder beside the files in which the tokenizer is made ready


def import_shards(config: PrepareConfig, progress: Progress) -> DataManifest:
    """Reads every token once, for hashes and to compare with the tokenizer.

    Raises:
        InputError: the files are not whole, are not Megatron's, or have tokens that the tokenizer has not.
    """
    assert config.import_path is not None
    indexes = {SPLITS[0]: _indexes(config.import_path, "import")}
    if config.import_validation is not None:
        indexes[SPLITS[1]] = _indexes(config.import_validation, "import_validation")
    folder = indexes[SPLITS[0]][0].parent
    _check_folder(config, folder, [path for paths in indexes.values() for path in paths])
    opened = {split: [_opened(path) for path in paths] for split, paths in indexes.items()}
    dtype = _dtype([index for found in opened.values() for index in found])
    new = folder / NEW
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            info = _tokenizer(config, new)
            splits, ends, sums = _splits(opened, info, progress)
            manifest = _manifest(config, folder, dtype, replace(info, ends_documents=ends), splits)
            for path, content in sums.items():
                write_sums(path, content)
            _place(new, folder, info)
            files = {
                path.relative_to(folder).as_posix(): digest(path)
                for path in sorted((folder / FOLDER).iterdir())
            }
            manifest = replace(manifest, files=files)
            write_manifest(manifest, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        rule, remedy = (
            "a manifest and the tokenizer are written beside the files",
            "copy the files to a folder that can be written",
        )
        raise InputError(Problem("import", f"{folder}: {error.strerror or error}", rule, remedy)) from error
    return manifest


def _indexes(path: str, key: str) -> list[Path]:
    """The .idx files that ``path`` names: a folder with pairs, a pair with or without its ending, or a pattern."""
    given = Path(path).expanduser()
    if given.is_dir():
        found = sorted(given.glob("*.idx"))
    else:
        name = str(given).removesuffix(".bin").removesuffix(".idx")
        found = sorted(Path(file) for file in glob.glob(f"{name}.idx"))  # noqa: PTH207 - Path.glob takes no absolute pattern
    for file in found:
        if not file.with_suffix(".bin").is_file():
            seen = f"{file.with_suffix('.bin')}: absent"
            raise InputError(Problem(key, seen, "tokens lie in NAME.bin beside NAME.idx", "restore the file"))
    if not found:
        rule = (
            "import names Megatron's files: a folder with NAME.bin and NAME.idx, one such pair, or a pattern"
        )
        raise InputError(Problem(key, f"{key}={path}: no .idx file", rule, f"correct the path: {key}=FOLDER"))
    return found


def _check_folder(config: PrepareConfig, folder: Path, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.parent != folder:
            raise InputError(
                Problem(
                    "import_validation",
                    f"{path} is not in {folder}",
                    "the files of a data folder lie in one folder",
                    f"bring it to {folder}",
                )
            )
    if len(set(paths)) < len(paths):
        raise InputError(
            Problem(
                "import_validation",
                f"import={config.import_path} import_validation={config.import_validation}",
                "a file is of one split",
                "name the training files alone: import='FOLDER/train*'",
            )
        )
    if (folder / NAME).exists():
        raise InputError(
            Problem(
                "import",
                f"{folder} has a {NAME}",
                "import makes a manifest for files that have none",
                f"train on it: data=prepared data.path={folder}; or remove its {NAME}",
            )
        )
    if config.tokenizer.path is None:
        raise InputError(
            Problem(
                "tokenizer.path",
                "import without tokenizer.path",
                "the tokenizer that made the tokens is named",
                "write tokenizer.path=FOLDER, a tokenizer.json, or a hub id",
            )
        )


def _opened(path: Path) -> IndexFile:
    index = IndexFile(path)
    index.check_contiguous()
    size = path.with_suffix(".bin").stat().st_size
    if size != index.bin_bytes:
        raise InputError(
            Problem(
                "import",
                f"{path.with_suffix('.bin')}: {size} bytes",
                f"by its index it has {index.bin_bytes}",
                "restore the two files",
            )
        )
    return index


def _dtype(indexes: Sequence[IndexFile]) -> str:
    for index in indexes:
        if index.dtype.name not in READABLE or index.dtype != indexes[0].dtype:
            seen = f"{index.path}: tokens of {index.dtype.name}, and {indexes[0].path.name} has {indexes[0].dtype.name}"
            raise InputError(
                Problem(
                    "import",
                    seen,
                    f"all files have tokens of one kind, {' or '.join(READABLE)}",
                    "leave it out: import='FOLDER/train*'; or prepare its text again with input=",
                )
            )
    return indexes[0].dtype.name


def _tokenizer(config: PrepareConfig, new: Path) -> TokenizerInfo:
    assert config.tokenizer.path is not None
    return tokenizer_copy.place(
        config.tokenizer.path,
        config.tokenizer.end_of_text,
        new,
        key="tokenizer.path",
        end_key="tokenizer.end_of_text",
    )


def _place(new: Path, folder: Path, info: TokenizerInfo) -> None:
    """The tokenizer's folder under its own name, in which the same tokenizer may be already."""
    target = folder / FOLDER
    if not target.exists():
        (new / FOLDER).replace(target)
        sync_folder(folder)
        return
    if (
        not (target / FILE).is_file()
        or digest(target / FILE).xxh3_128 != info.hash
        or not (target / tokenizer_copy.CONFIG).is_file()
    ):
        seen = f"{target} is there and holds another tokenizer"
        raise InputError(
            Problem("tokenizer.path", seen, "the tokenizer is copied to that folder", f"rename {target}")
        )


def _splits(
    opened: dict[str, list[IndexFile]], info: TokenizerInfo, progress: Progress
) -> tuple[dict[str, Split], bool, dict[Path, bytes]]:
    """The splits, whether end-of-text is the last token of every document and stands nowhere else, and the sums of each .bin file."""
    ends, splits, sums = True, {}, {}
    total = sum(index.bin_bytes for indexes in opened.values() for index in indexes)
    with progress.task("reading tokens", total=total, unit="B") as task:
        for split, indexes in opened.items():
            shards = []
            for index in indexes:
                shard, ended, content = _shard(index, info, task)
                shards.append(shard)
                sums[index.path.with_suffix(".bin")] = content
                ends = ends and ended
            splits[split] = Split(tuple(shards))
    if not splits[SPLITS[0]].tokens:
        raise InputError(
            Problem(
                "import",
                f"{opened[SPLITS[0]][0].path}: no tokens",
                "there are tokens to train on",
                "name other files",
            )
        )
    return splits, ends, sums


def _shard(index: IndexFile, info: TokenizerInfo, task: ProgressTask) -> tuple[Shard, bool, bytes]:
    path = index.path.with_suffix(".bin")
    tokens: npt.NDArray[np.integer] = (
        np.memmap(path, dtype=index.dtype, mode="r") if index.bin_bytes else np.empty(0, index.dtype)
    )
    hasher, sums, ending = xxhash.xxh3_128(), SumsOfStream(), 0
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        some = np.asarray(tokens[start : start + TOKENS_AT_ONCE])
        hasher.update(some.data)
        sums.update(some.data)
        least, most = int(some.min()), int(some.max())
        if least < 0 or most >= info.size:
            seen = f"{path}: token {least if least < 0 else most}, a tokenizer of {info.size} tokens"
            raise InputError(
                Problem(
                    "tokenizer.path",
                    seen,
                    "every token is one of the tokenizer's",
                    "name the tokenizer that made the files: tokenizer.path=FOLDER",
                )
            )
        ending += int(np.count_nonzero(some == info.end_of_text))
        task.advance(some.nbytes, note=path.name)
    places = np.zeros(len(index.lengths) + 1, dtype=np.int64)
    np.cumsum(index.lengths, out=places[1:])
    last = places[index.documents[1:]] - 1  # each document's last token
    lengths = np.diff(places[index.documents])
    whole = (
        bool((lengths > 0).all()) and ending == len(last) and bool((tokens[last] == info.end_of_text).all())
    )
    content = sums.content()
    shard = Shard(
        index.path.stem,
        len(index.documents) - 1,
        len(tokens),
        Digest(index.bin_bytes, hasher.hexdigest()),
        digest(index.path),
        _checked_sums(path, content),
    )
    return shard, whole, content


def _checked_sums(path: Path, content: bytes) -> Digest:
    """Of the sums of ``path``, which are written later. Raises InputError if another file has their name."""
    there = path.with_suffix(ENDING)
    if there.exists() and there.read_bytes() != content:
        raise InputError(
            Problem(
                "import",
                f"{there} is there",
                f"the sums of {path.name} are written to that name",
                f"rename {there}",
            )
        )
    return Digest(len(content), xxhash.xxh3_128_hexdigest(content))


def _manifest(
    config: PrepareConfig, folder: Path, dtype: str, info: TokenizerInfo, splits: dict[str, Split]
) -> DataManifest:
    shards = [shard for split in splits.values() for shard in split.shards]
    hashes = xxhash.xxh3_128_hexdigest("".join(split.data_hash for split in splits.values()).encode())
    size = sum(shard.bin.bytes for shard in shards)
    origin = Origin(
        f"Megatron files made elsewhere, import={config.import_path}",
        config.licence,
        len(shards),
        size,
        hashes,
    )
    return DataManifest(
        folder=folder, dtype=dtype, origin=origin, tokenizer=info, splits=splits, versions=versions()
    )
