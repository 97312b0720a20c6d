"""``inspect=PATH``: verify every byte of a data folder, and describe it.

Memory: about twenty bytes per document of the largest split, and the index of one shard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.config.prepare import PrepareConfig
from toolkit.data.digest import FileDigest
from toolkit.data.manifest import DataManifest, TokenSplit, describe_manifest, read_manifest
from toolkit.data.manifest_file import read_kind
from toolkit.data.prepare import report
from toolkit.data.prepare.plan import format_value
from toolkit.data.records.reader import RECORDS_KIND, describe_records, verify_records
from toolkit.data.tokens.documents import compute_waste
from toolkit.data.tokens.index import HEADER
from toolkit.data.tokens.token_array import verify_tokens
from toolkit.data.tokens.tokenizer import read_tokenizer
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress
from toolkit.remote.storage import DataFolder, open_folder

READ_CHUNK_BYTES = 16 << 20
SHOWN_TOKENS = 48
SHOWN_SOURCES = 5
DOMAINS, SEGMENTS, MIN_CELL_COUNT = 8, 64, 8

Lengths = npt.NDArray[np.int32]


def inspect(config: PrepareConfig, progress: Progress) -> list[str]:
    """Return lines to print. Raises InputError naming the first file that does not match the manifest."""
    assert config.inspect is not None
    if read_kind(config.inspect) == RECORDS_KIND:
        records = verify_records(config.inspect, progress)
        return [f"data       {records.folder}: every file matches the manifest", *describe_records(records)]
    manifest = verify_folder(config.inspect, progress)
    folder = open_folder(str(manifest.url or manifest.folder))
    lines = [f"data       {manifest.location}: every file matches the manifest", *describe_manifest(manifest)]
    if manifest.recipe:
        lines.append(
            "recipe     "
            + " ".join(
                f"{key}={format_value(value)}" for key, value in manifest.recipe.items() if value is not None
            )
        )
        lines.append(
            "versions   " + " ".join(f"{name} {version}" for name, version in manifest.versions.items())
        )
    if report.REPORT in manifest.files:
        lines += report.describe_report(folder.read_bytes(report.REPORT))
    if report.SOURCES in manifest.files:
        lines += _sources(json.loads(folder.read_bytes(report.SOURCES)))
    lines += _splits(manifest, folder, config.sequence_length)
    return [*lines, *_samples(manifest, folder, config.samples)]


def verify_folder(path: str, progress: Progress) -> DataManifest:
    """Read and verify every byte of the local or remote folder ``path``."""
    manifest = read_manifest(path)
    if manifest.url is None:
        return verify_tokens(path, progress)
    folder = open_folder(manifest.url)
    files = dict(manifest.files)
    for split in manifest.splits.values():
        files |= split.files
    with progress.task(
        "verifying data", total=sum(expected.bytes for expected in files.values()), unit="B"
    ) as task:
        for (name, expected), size in zip(files.items(), folder.sizes(list(files)), strict=True):
            hasher = xxhash.xxh3_128()
            for start in range(0, size, READ_CHUNK_BYTES):
                content = folder.read_range(name, start, min(size, start + READ_CHUNK_BYTES))
                hasher.update(content)
                task.advance(len(content), note=name)
            seen = FileDigest(size, hasher.hexdigest())
            if seen != expected:
                rule = f"the manifest has {expected.bytes} bytes, xxh3 {expected.xxh3_128}"
                message = f"{manifest.location}/{name}: {seen.bytes} bytes, xxh3 {seen.xxh3_128}"
                raise InputError(
                    Problem("inspect", message, rule, "restore the file, or prepare the data again")
                )
    return manifest


def _sources(sources: list[Mapping[str, Any]]) -> list[str]:
    largest = sorted(sources, key=lambda source: -source["bytes"])[:SHOWN_SOURCES]
    lines = []
    for number, source in enumerate(largest):
        documents = f"{source['documents']:,} documents, " if "documents" in source else ""
        label = "sources    " if not number else "           "
        lines.append(f"{label}{source['name']}: {documents}{source['bytes']:,} bytes of {source['format']}")
    return (
        [*lines, f"           and {len(sources) - len(largest):,} more"]
        if len(sources) > len(largest)
        else lines
    )


# -- document lengths


def _splits(manifest: DataManifest, folder: DataFolder, sequence_length: int) -> list[str]:
    lines = []
    for name, split in manifest.splits.items():
        lengths = read_document_lengths(folder, split)
        if not len(lengths):
            continue
        median, quantile = (int(value) for value in np.quantile(lengths, (0.5, 0.99)))
        lines.append(
            f"{name:<10} lengths: median {median:,}, 99% up to {quantile:,}, "
            f"longest {int(lengths.max()):,} tokens"
        )
        window_waste = compute_waste(lengths, sequence_length)
        lines.append(
            f"           in windows of {sequence_length:,}: {window_waste.cut:.1%} of documents are cut "
            f"({window_waste.longer:.1%} are longer), {window_waste.lost:.1%} of tokens do not see their "
            "document's beginning"
        )
        quality = shuffle_quality(lengths)
        message = (
            "too few documents"
            if quality is None
            else f"chi2/df {quality:.2f} of lengths over positions (1: well shuffled)"
        )
        lines.append(f"           shuffle: {message}")
    return lines


def read_document_lengths(folder: DataFolder, split: TokenSplit) -> Lengths:
    """Return the tokens of each document, in order; a document may consist of several sequences."""
    lengths = [np.empty(0, dtype=np.int32)]
    for shard in split.shards:
        content = memoryview(folder.read_bytes(f"{shard.name}.idx"))
        _, _, _, sequences, ends = HEADER.unpack(content[: HEADER.size])
        tokens = np.zeros(sequences + 1, dtype=np.int64)
        np.cumsum(np.frombuffer(content, "<i4", sequences, HEADER.size), out=tokens[1:])
        lengths.append(
            np.diff(tokens[np.frombuffer(content, "<i8", ends, HEADER.size + 12 * sequences)]).astype(
                np.int32
            )
        )
    return np.concatenate(lengths)


def shuffle_quality(lengths: Lengths) -> float | None:
    """Return chi2/df for counts of DOMAINS ranges of length in up to SEGMENTS segments of the data.

    About 1 if length and position are independent; far above 1 if files or sources of one kind are adjacent.
    Differences that do not affect lengths are not detected. None if there are too few documents.
    """
    if not len(lengths):
        return None
    edges = np.unique(np.quantile(lengths, np.arange(1, DOMAINS) / DOMAINS))
    length_range = np.searchsorted(edges, lengths, side="right")
    shares = np.bincount(length_range, minlength=len(edges) + 1) / len(lengths)
    segments = min(SEGMENTS, int(len(lengths) * shares[shares > 0].min() / MIN_CELL_COUNT))
    domains = int((shares > 0).sum())
    if segments < 2 or domains < 2:
        return None
    segment = np.arange(len(lengths)) * segments // len(lengths)
    counts = np.bincount(segment * len(shares) + length_range, minlength=segments * len(shares)).reshape(
        segments, -1
    )[:, shares > 0]
    expected = counts.sum(axis=1, keepdims=True) * shares[shares > 0]
    return float(((counts - expected) ** 2 / expected).sum() / ((segments - 1) * (domains - 1)))


@dataclass(frozen=True, slots=True)
class _DocumentLocation:
    shard: str
    start: int  # first token
    tokens: int


def _samples(manifest: DataManifest, folder: DataFolder, count: int) -> list[str]:
    """Decode the beginnings of ``count`` documents spread evenly over the training split."""
    if not count or "train" not in manifest.splits:
        return []
    tokenizer, split, lines = read_tokenizer(manifest.tokenizer_folder), manifest.split("train"), []
    dtype = np.dtype(manifest.dtype)
    for number in sorted({(2 * index + 1) * split.documents // (2 * count) for index in range(count)}):
        document = _locate_document(folder, split, number)
        end = document.start + min(document.tokens, SHOWN_TOKENS)
        content = (
            folder.read_range(f"{document.shard}.bin", document.start * dtype.itemsize, end * dtype.itemsize)
            if document.tokens
            else b""
        )
        text = tokenizer.decode(np.frombuffer(content, dtype).tolist(), skip_special_tokens=False)
        ellipsis = " ..." if document.tokens > SHOWN_TOKENS else ""
        lines.append(
            f"sample     document {number:,} of {document.tokens:,} tokens: "
            f"{json.dumps(text, ensure_ascii=False)}{ellipsis}"
        )
    return lines


def _locate_document(folder: DataFolder, split: TokenSplit, number: int) -> _DocumentLocation:
    for shard in split.shards:
        if number < shard.documents:
            lengths = read_document_lengths(folder, TokenSplit((shard,)))
            return _DocumentLocation(
                shard.name, int(lengths[:number].sum(dtype=np.int64)), int(lengths[number])
            )
        number -= shard.documents
    raise AssertionError(f"document {number} behind the last one")
