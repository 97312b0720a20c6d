"""``inspect=PATH``: verify every byte of a data folder, and tell what it is.

Memory: some twenty bytes a document of the largest split, and the index of one shard.
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
from toolkit.data.digest import Digest
from toolkit.data.manifest import DataManifest, Split, describe, kind_of, read_manifest
from toolkit.data.prepare import report
from toolkit.data.prepare.plan import as_typed
from toolkit.data.records import reader as records
from toolkit.data.remote.storage import Folder, open_folder
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.documents import waste
from toolkit.data.tokens.index import HEADER
from toolkit.data.tokens.token_array import verify
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

READ_AT_ONCE = 16 << 20
SHOWN_TOKENS = 48
SHOWN_SOURCES = 5
DOMAINS, SEGMENTS, LEAST_IN_A_CELL = 8, 64, 8

Lengths = npt.NDArray[np.int32]


def inspect(config: PrepareConfig, progress: Progress) -> list[str]:
    """Lines for people. Raises InputError naming the first file that is not what the manifest says."""
    assert config.inspect is not None
    if kind_of(config.inspect) == records.KIND:
        found = records.verify_records(config.inspect, progress)
        return [f"data       {found.folder}: every file is what the manifest says", *records.describe(found)]
    manifest = verified(config.inspect, progress)
    folder = open_folder(str(manifest.url or manifest.folder))
    lines = [f"data       {manifest.place}: every file is what the manifest says", *describe(manifest)]
    if manifest.recipe:
        lines.append(
            "recipe     "
            + " ".join(
                f"{key}={as_typed(value)}" for key, value in manifest.recipe.items() if value is not None
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


def verified(path: str, progress: Progress) -> DataManifest:
    """Every byte of the folder ``path`` is read and compared, wherever it lies."""
    manifest = read_manifest(path)
    if manifest.url is None:
        return verify(path, progress)
    folder = open_folder(manifest.url)
    files = dict(manifest.files)
    for split in manifest.splits.values():
        files |= split.files
    with progress.task(
        "verifying data", total=sum(expected.bytes for expected in files.values()), unit="B"
    ) as task:
        for (name, expected), size in zip(files.items(), folder.sizes(list(files)), strict=True):
            hasher = xxhash.xxh3_128()
            for start in range(0, size, READ_AT_ONCE):
                content = folder.read_range(name, start, min(size, start + READ_AT_ONCE))
                hasher.update(content)
                task.advance(len(content), note=name)
            seen = Digest(size, hasher.hexdigest())
            if seen != expected:
                rule = f"the manifest says {expected.bytes} bytes, xxh3 {expected.xxh3_128}"
                told = f"{manifest.place}/{name}: {seen.bytes} bytes, xxh3 {seen.xxh3_128}"
                raise InputError(
                    Problem("inspect", told, rule, "restore the file, or prepare the data again")
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


# -- what the lengths of documents tell


def _splits(manifest: DataManifest, folder: Folder, sequence_length: int) -> list[str]:
    lines = []
    for name, split in manifest.splits.items():
        lengths = document_lengths(folder, split)
        if not len(lengths):
            continue
        middle, most = (int(value) for value in np.quantile(lengths, (0.5, 0.99)))
        lines.append(
            f"{name:<10} lengths: median {middle:,}, 99% up to {most:,}, longest {int(lengths.max()):,} tokens"
        )
        lost = waste(lengths, sequence_length)
        lines.append(
            f"           in windows of {sequence_length:,}: {lost.cut:.1%} of documents are cut ({lost.longer:.1%} are longer), "
            f"{lost.lost:.1%} of tokens do not see their document's beginning"
        )
        quality = shuffle_quality(lengths)
        told = (
            "too few documents to tell"
            if quality is None
            else f"chi2/df {quality:.2f} of lengths over places (1: well shuffled)"
        )
        lines.append(f"           shuffle: {told}")
    return lines


def document_lengths(folder: Folder, split: Split) -> Lengths:
    """Tokens of each document, in order; a document may be several sequences."""
    found = [np.empty(0, dtype=np.int32)]
    for shard in split.shards:
        content = memoryview(folder.read_bytes(f"{shard.name}.idx"))
        _, _, _, sequences, ends = HEADER.unpack(content[: HEADER.size])
        tokens = np.zeros(sequences + 1, dtype=np.int64)
        np.cumsum(np.frombuffer(content, "<i4", sequences, HEADER.size), out=tokens[1:])
        found.append(
            np.diff(tokens[np.frombuffer(content, "<i8", ends, HEADER.size + 12 * sequences)]).astype(
                np.int32
            )
        )
    return np.concatenate(found)


def shuffle_quality(lengths: Lengths) -> float | None:
    """chi2/df of how often documents of each of DOMAINS ranges of length stand in each of up to SEGMENTS stretches of the data.

    About 1 where length and place have nothing to do with each other; far above where files or sources of one kind lie together.
    What differs in no length is not seen. None for too few documents.
    """
    if not len(lengths):
        return None
    edges = np.unique(np.quantile(lengths, np.arange(1, DOMAINS) / DOMAINS))
    domain = np.searchsorted(edges, lengths, side="right")
    shares = np.bincount(domain, minlength=len(edges) + 1) / len(lengths)
    segments = min(SEGMENTS, int(len(lengths) * shares[shares > 0].min() / LEAST_IN_A_CELL))
    domains = int((shares > 0).sum())
    if segments < 2 or domains < 2:
        return None
    place = np.arange(len(lengths)) * segments // len(lengths)
    counts = np.bincount(place * len(shares) + domain, minlength=segments * len(shares)).reshape(
        segments, -1
    )[:, shares > 0]
    expected = counts.sum(axis=1, keepdims=True) * shares[shares > 0]
    return float(((counts - expected) ** 2 / expected).sum() / ((segments - 1) * (domains - 1)))


@dataclass(frozen=True, slots=True)
class _Place:
    shard: str
    start: int  # first token
    tokens: int


def _samples(manifest: DataManifest, folder: Folder, count: int) -> list[str]:
    """The beginnings of ``count`` documents that lie evenly over the training split, decoded."""
    if not count or "train" not in manifest.splits:
        return []
    tokenizer, split, lines = bpe.load(manifest.tokenizer_folder), manifest.split("train"), []
    dtype = np.dtype(manifest.dtype)
    for number in sorted({(2 * index + 1) * split.documents // (2 * count) for index in range(count)}):
        place = _find(folder, split, number)
        end = place.start + min(place.tokens, SHOWN_TOKENS)
        content = (
            folder.read_range(f"{place.shard}.bin", place.start * dtype.itemsize, end * dtype.itemsize)
            if place.tokens
            else b""
        )
        text = tokenizer.decode(np.frombuffer(content, dtype).tolist(), skip_special_tokens=False)
        more = " ..." if place.tokens > SHOWN_TOKENS else ""
        lines.append(
            f"sample     document {number:,} of {place.tokens:,} tokens: {json.dumps(text, ensure_ascii=False)}{more}"
        )
    return lines


def _find(folder: Folder, split: Split, number: int) -> _Place:
    for shard in split.shards:
        if number < shard.documents:
            lengths = document_lengths(folder, Split((shard,)))
            return _Place(shard.name, int(lengths[:number].sum(dtype=np.int64)), int(lengths[number]))
        number -= shard.documents
    raise AssertionError(f"document {number} behind the last one")
