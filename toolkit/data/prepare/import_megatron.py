"""``import=PATH``: write a manifest for existing Megatron ``.bin`` and ``.idx`` files, used in place.

FOLDER/NAME.bin NAME.idx ...     unchanged
FOLDER/NAME.sums                 block checksums, with which training verifies what it reads
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
from toolkit.data.checksums import CHECKSUM_SUFFIX, ChecksumBuilder
from toolkit.data.digest import FileDigest, hash_file
from toolkit.data.manifest import (
    DataManifest,
    DataOrigin,
    TokenizerInfo,
    TokenShard,
    TokenSplit,
    write_manifest,
)
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.prepare.parts import SPLITS
from toolkit.data.prepare.report import package_versions
from toolkit.data.tokens.index import IndexFile
from toolkit.data.tokens.tokenizer import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    TOKENIZER_FOLDER,
    install_tokenizer,
)
from toolkit.data.tokens.writer import write_checksums
from toolkit.errors import InputError, Problem
from toolkit.files import sync_folder
from toolkit.progress import Progress, ProgressTask

READABLE_DTYPES = ("uint16", "int32")
CHUNK_TOKENS = 8 << 20
TEMPORARY_FOLDER = ".import"  # temporary folder next to the files for the tokenizer


def import_megatron(config: PrepareConfig, progress: Progress) -> DataManifest:
    """Read every token once, for hashes and to check it against the tokenizer.

    Raises:
        InputError: the files are incomplete, not Megatron's, or have tokens outside the tokenizer's
            vocabulary.
    """
    assert config.import_path is not None
    indexes = {SPLITS[0]: _find_indexes(config.import_path, "import")}
    if config.import_validation is not None:
        indexes[SPLITS[1]] = _find_indexes(config.import_validation, "import_validation")
    folder = indexes[SPLITS[0]][0].parent
    _check_folder(config, folder, [path for paths in indexes.values() for path in paths])
    indexes_by_split = {split: [_open_index(path) for path in paths] for split, paths in indexes.items()}
    dtype = _common_dtype([index for found in indexes_by_split.values() for index in found])
    temporary = folder / TEMPORARY_FOLDER
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            info = _tokenizer(config, temporary)
            splits, ends_documents, sums = _describe_splits(indexes_by_split, info, progress)
            manifest = _manifest(config, folder, dtype, replace(info, ends_documents=ends_documents), splits)
            for path, content in sums.items():
                write_checksums(path, content)
            _move_tokenizer(temporary, folder, info)
            files = {
                path.relative_to(folder).as_posix(): hash_file(path)
                for path in sorted((folder / TOKENIZER_FOLDER).iterdir())
            }
            manifest = replace(manifest, files=files)
            write_manifest(manifest, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        rule, remedy = (
            "a manifest and the tokenizer are written next to the files",
            "copy the files to a writable folder",
        )
        raise InputError(Problem("import", f"{folder}: {error.strerror or error}", rule, remedy)) from error
    return manifest


def _find_indexes(path: str, key: str) -> list[Path]:
    """Find the .idx files of ``path``: a folder with pairs, a pair with or without suffix, or a pattern."""
    location = Path(path).expanduser()
    if location.is_dir():
        found = sorted(location.glob("*.idx"))
    else:
        name = str(location).removesuffix(".bin").removesuffix(".idx")
        found = sorted(Path(file) for file in glob.glob(f"{name}.idx"))  # noqa: PTH207 - Path.glob takes no absolute pattern
    for file in found:
        if not file.with_suffix(".bin").is_file():
            seen = f"{file.with_suffix('.bin')}: absent"
            raise InputError(Problem(key, seen, "NAME.bin is stored next to NAME.idx", "restore the file"))
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
                    "the files of a data folder must be in one folder",
                    f"move it to {folder}",
                )
            )
    if len(set(paths)) < len(paths):
        raise InputError(
            Problem(
                "import_validation",
                f"import={config.import_path} import_validation={config.import_validation}",
                "a file belongs to one split",
                "name the training files alone: import='FOLDER/train*'",
            )
        )
    if (folder / MANIFEST_NAME).exists():
        raise InputError(
            Problem(
                "import",
                f"{folder} has a {MANIFEST_NAME}",
                "import makes a manifest for files that have none",
                f"train on it: data=prepared data.path={folder}; or remove its {MANIFEST_NAME}",
            )
        )
    if config.tokenizer.path is None:
        raise InputError(
            Problem(
                "tokenizer.path",
                "import without tokenizer.path",
                "the tokenizer that encoded the tokens is named",
                "write tokenizer.path=FOLDER, a tokenizer.json, or a hub id",
            )
        )


def _open_index(path: Path) -> IndexFile:
    index = IndexFile(path)
    index.check_contiguous()
    size = path.with_suffix(".bin").stat().st_size
    if size != index.bin_bytes:
        raise InputError(
            Problem(
                "import",
                f"{path.with_suffix('.bin')}: {size} bytes",
                f"the index declares {index.bin_bytes} bytes",
                "restore the two files",
            )
        )
    return index


def _common_dtype(indexes: Sequence[IndexFile]) -> str:
    for index in indexes:
        if index.dtype.name not in READABLE_DTYPES or index.dtype != indexes[0].dtype:
            seen = (
                f"{index.path}: tokens of {index.dtype.name}, "
                f"and {indexes[0].path.name} has {indexes[0].dtype.name}"
            )
            raise InputError(
                Problem(
                    "import",
                    seen,
                    f"all files have tokens of the same dtype, {' or '.join(READABLE_DTYPES)}",
                    "leave it out: import='FOLDER/train*'; or prepare its text again with input=",
                )
            )
    return indexes[0].dtype.name


def _tokenizer(config: PrepareConfig, temporary: Path) -> TokenizerInfo:
    assert config.tokenizer.path is not None
    return install_tokenizer(
        config.tokenizer.path,
        config.tokenizer.end_of_text,
        temporary,
        key="tokenizer.path",
        end_key="tokenizer.end_of_text",
    )


def _move_tokenizer(temporary: Path, folder: Path, info: TokenizerInfo) -> None:
    """Rename the tokenizer's folder, unless the same tokenizer is already there."""
    target = folder / TOKENIZER_FOLDER
    if not target.exists():
        (temporary / TOKENIZER_FOLDER).replace(target)
        sync_folder(folder)
        return
    if (
        not (target / TOKENIZER_FILE).is_file()
        or hash_file(target / TOKENIZER_FILE).xxh3_128 != info.hash
        or not (target / TOKENIZER_CONFIG).is_file()
    ):
        seen = f"{target} exists and contains another tokenizer"
        raise InputError(
            Problem("tokenizer.path", seen, "the tokenizer is copied to that folder", f"rename {target}")
        )


def _describe_splits(
    indexes_by_split: dict[str, list[IndexFile]], info: TokenizerInfo, progress: Progress
) -> tuple[dict[str, TokenSplit], bool, dict[Path, bytes]]:
    """Return the splits, whether end-of-text ends every document and nothing else, and .sums contents."""
    ends_documents, splits, sums = True, {}, {}
    total = sum(index.bin_bytes for indexes in indexes_by_split.values() for index in indexes)
    with progress.task("reading tokens", total=total, unit="B") as task:
        for split, indexes in indexes_by_split.items():
            shards = []
            for index in indexes:
                shard, shard_ends, content = _describe_shard(index, info, task)
                shards.append(shard)
                sums[index.path.with_suffix(".bin")] = content
                ends_documents = ends_documents and shard_ends
            splits[split] = TokenSplit(tuple(shards))
    if not splits[SPLITS[0]].tokens:
        raise InputError(
            Problem(
                "import",
                f"{indexes_by_split[SPLITS[0]][0].path}: no tokens",
                "the files contain tokens to train on",
                "name other files",
            )
        )
    return splits, ends_documents, sums


def _describe_shard(
    index: IndexFile, info: TokenizerInfo, task: ProgressTask
) -> tuple[TokenShard, bool, bytes]:
    path = index.path.with_suffix(".bin")
    tokens: npt.NDArray[np.integer] = (
        np.memmap(path, dtype=index.dtype, mode="r") if index.bin_bytes else np.empty(0, index.dtype)
    )
    hasher, sums, end_of_text_count = xxhash.xxh3_128(), ChecksumBuilder(), 0
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS])
        hasher.update(chunk.data)
        sums.update(chunk.data)
        minimum, maximum = int(chunk.min()), int(chunk.max())
        if minimum < 0 or maximum >= info.size:
            seen = f"{path}: token {minimum if minimum < 0 else maximum}, a tokenizer of {info.size} tokens"
            raise InputError(
                Problem(
                    "tokenizer.path",
                    seen,
                    "every token must be one of the tokenizer's",
                    "name the tokenizer that encoded the files: tokenizer.path=FOLDER",
                )
            )
        end_of_text_count += int(np.count_nonzero(chunk == info.end_of_text))
        task.advance(chunk.nbytes, note=path.name)
    token_offsets = np.zeros(len(index.lengths) + 1, dtype=np.int64)
    np.cumsum(index.lengths, out=token_offsets[1:])
    last = token_offsets[index.documents[1:]] - 1  # each document's last token
    lengths = np.diff(token_offsets[index.documents])
    is_terminated = (
        bool((lengths > 0).all())
        and end_of_text_count == len(last)
        and bool((tokens[last] == info.end_of_text).all())
    )
    content = sums.content()
    shard = TokenShard(
        index.path.stem,
        len(index.documents) - 1,
        len(tokens),
        FileDigest(index.bin_bytes, hasher.hexdigest()),
        hash_file(index.path),
        _checked_sums(path, content),
    )
    return shard, is_terminated, content


def _checked_sums(path: Path, content: bytes) -> FileDigest:
    """Describe the checksums of ``path``, to be written later.

    Raises InputError if another file has their name.
    """
    existing = path.with_suffix(CHECKSUM_SUFFIX)
    if existing.exists() and existing.read_bytes() != content:
        raise InputError(
            Problem(
                "import",
                f"{existing} exists and differs",
                f"the checksums of {path.name} are written to that name",
                f"rename {existing}",
            )
        )
    return FileDigest(len(content), xxhash.xxh3_128_hexdigest(content))


def _manifest(
    config: PrepareConfig, folder: Path, dtype: str, info: TokenizerInfo, splits: dict[str, TokenSplit]
) -> DataManifest:
    shards = [shard for split in splits.values() for shard in split.shards]
    hashes = xxhash.xxh3_128_hexdigest("".join(split.data_hash for split in splits.values()).encode())
    size = sum(shard.bin.bytes for shard in shards)
    origin = DataOrigin(
        f"Megatron files made elsewhere, import={config.import_path}",
        config.licence,
        len(shards),
        size,
        hashes,
    )
    return DataManifest(
        folder=folder, dtype=dtype, origin=origin, tokenizer=info, splits=splits, versions=package_versions()
    )
