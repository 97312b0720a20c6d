"""The results of a preparation: counts, the histogram of document lengths, and the manifest."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import toolkit
from toolkit.data.digest import hash_file
from toolkit.data.manifest import DataManifest, DataOrigin, TokenizerInfo, TokenSplit, write_manifest
from toolkit.data.prepare.merge import ShardPlan, ShardReceipt
from toolkit.data.prepare.parts import FIRST_BAD, SPLITS, PartReceipt
from toolkit.data.prepare.plan import PreparationPlan
from toolkit.data.tokens.index import IndexFile
from toolkit.files import write_whole

SOURCES, REPORT, PICTURE = "sources.json", "report.json", "lengths.png"
VERSIONED = ("tokenizers", "numpy", "xxhash")  # packages that affect the bytes
BINS_PER_DOUBLING = 2
LONGEST = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationStatistics:
    """Statistics of a preparation.

    Attributes:
        read: rows of the input. ``read = documents + equal + empty + bad``.
        equal: dropped as duplicates.
        empty: dropped because they have no text.
        replaced: documents (duplicates included) with bytes that are not UTF-8, written as U+FFFD.
        bad: rows skipped because no document could be read (``on_bad_row=skip``).
        text_bytes: UTF-8 bytes of all documents that are not empty; bytes_per_token is over the same
            documents.
        histogram: [shortest, documents] of each bin of lengths in tokens; a bin ends where the next begins.
    """

    read: int
    documents: int
    tokens: int
    equal: int
    empty: int
    replaced: int
    text_bytes: int
    bytes_per_token: float
    shortest: int
    longest: int
    mean: float
    histogram: tuple[tuple[int, int], ...]
    bad: int = 0


def write_results(
    plan: PreparationPlan,
    output: Path,
    tokenizer: TokenizerInfo,
    dtype: np.dtype[Any],
    receipts: Sequence[PartReceipt],
    shards: Sequence[ShardPlan],
    shard_receipts: Mapping[int, ShardReceipt],
) -> DataManifest:
    """Write sources, report, histogram and manifest; equal input and recipe give equal bytes."""
    shards_by_split: dict[str, list[Any]] = {name: [] for name in SPLITS}
    for number, piece in enumerate(shards):
        if (shard := shard_receipts[number].shard) is not None:
            shards_by_split[SPLITS[piece.split]].append(shard)
    splits = {name: TokenSplit(tuple(entries)) for name, entries in shards_by_split.items() if entries}
    statistics = _statistics(receipts, shard_receipts.values(), splits, output)
    write_whole(output / SOURCES, json.dumps(_sources(plan, receipts), indent=1) + "\n")
    write_whole(output / REPORT, json.dumps(asdict(statistics), indent=1) + "\n")
    draw_histogram(statistics, output / PICTURE)
    tokenizer_files = (path for path in sorted((output / tokenizer.folder).rglob("*")) if path.is_file())
    files = [SOURCES, REPORT, PICTURE, *(path.relative_to(output).as_posix() for path in tokenizer_files)]
    tokenizer_info = TokenizerInfo(
        **{**asdict(tokenizer), "ends_documents": not any(receipt.inside for receipt in receipts)}
    )
    origin = DataOrigin(
        plan.seen, plan.recipe["licence"], len(plan.present), plan.bytes, hash_file(output / SOURCES).xxh3_128
    )
    manifest = DataManifest(
        folder=output,
        dtype=dtype.name,
        origin=origin,
        tokenizer=tokenizer_info,
        splits=splits,
        recipe=plan.recipe,
        versions=package_versions(),
        files={name: hash_file(output / name) for name in files},
        special_tokens=_special(receipts),
        bad_rows=_bad_rows(plan, receipts),
    )
    write_manifest(manifest, output)
    return manifest


def _bad_rows(plan: PreparationPlan, receipts: Sequence[PartReceipt]) -> dict[str, Any]:
    """Return number and examples of bad rows by file and position, however the work was split."""
    count = sum(receipt.bad for receipt in receipts)
    if not count:
        return {}
    first = sorted(
        (plan.sources[source].name, position, description)
        for receipt in receipts
        for source, position, description in receipt.first_bad
    )
    return {"count": count, "first": [f"{name}, {description}" for name, _, description in first[:FIRST_BAD]]}


def _special(receipts: Sequence[PartReceipt]) -> dict[str, int]:
    entries: Counter[str] = Counter()
    for receipt in receipts:
        entries.update(dict(receipt.special))
    return dict(sorted(entries.items()))


def package_versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:2]))
    return {"toolkit": toolkit.__version__, "python": python, **{name: version(name) for name in VERSIONED}}


def _sources(plan: PreparationPlan, receipts: Sequence[PartReceipt]) -> list[dict[str, Any]]:
    """Describe the sources, with their numbers of documents that are not empty, except for datasets."""
    documents: Counter[int] = Counter()
    for receipt in receipts:
        documents.update(dict(receipt.sources))
    entries = []
    present = [(number, source) for number, source in enumerate(plan.sources) if not source.gone]
    for number, source in sorted(present, key=lambda entry: entry[1].name):
        entry = {
            "name": source.name,
            "format": source.format,
            "bytes": source.bytes,
            "xxh3_128": source.xxh3_128,
        }
        entries.append(entry if source.format == "dataset" else {**entry, "documents": documents[number]})
    return entries


def _statistics(
    receipts: Sequence[PartReceipt], shard_receipts: Any, splits: Mapping[str, TokenSplit], output: Path
) -> PreparationStatistics:
    edges = np.unique((2 ** (np.arange(31 * BINS_PER_DOUBLING + 1) / BINS_PER_DOUBLING)).astype(np.int64))
    counts = np.zeros(len(edges), dtype=np.int64)
    shortest, longest = LONGEST, 0
    for name in (shard.name for split in splits.values() for shard in split.shards):
        lengths = IndexFile(output / f"{name}.idx").lengths
        counts += np.bincount(np.searchsorted(edges, lengths, side="right") - 1, minlength=len(edges))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    documents, tokens = (
        sum(split.documents for split in splits.values()),
        sum(split.tokens for split in splits.values()),
    )
    text_bytes = sum(receipt.text_bytes for receipt in receipts)
    token_count = sum(sum(receipt.tokens) for receipt in receipts)
    nonempty = np.flatnonzero(counts)
    return PreparationStatistics(
        read=sum(receipt.empty + receipt.bad + receipt.equal + sum(receipt.kept) for receipt in receipts),
        documents=documents,
        tokens=tokens,
        equal=sum(receipt.equal for receipt in receipts)
        + sum(shard_receipt.equal for shard_receipt in shard_receipts),
        empty=sum(receipt.empty for receipt in receipts),
        replaced=sum(receipt.replaced for receipt in receipts),
        text_bytes=text_bytes,
        bytes_per_token=text_bytes / token_count,
        shortest=shortest,
        longest=longest,
        mean=tokens / documents,
        bad=sum(receipt.bad for receipt in receipts),
        histogram=tuple((int(edges[bin]), int(counts[bin])) for bin in range(nonempty[0], nonempty[-1] + 1)),
    )


def describe_preparation(manifest: DataManifest) -> list[str]:
    """Format the results that the manifest lacks, from the report if launch/prepare.py wrote one."""
    lines, file = [], manifest.folder / REPORT
    if SPLITS[1] not in manifest.splits:
        lines.append(
            "validation none: write eval.every=0 to train on this data, since there is nothing to evaluate on"
        )
    if file.is_file():
        lines += [
            *describe_report(file.read_bytes()),
            f"           histogram of lengths: {manifest.folder / PICTURE}",
        ]
    return lines


def describe_report(content: bytes) -> list[str]:
    statistics = PreparationStatistics(**json.loads(content))
    lengths = f"{statistics.shortest:,} to {statistics.longest:,} tokens, mean {statistics.mean:,.0f}"
    lines = [
        f"documents  {statistics.read:,} read, {statistics.documents:,} kept; "
        f"dropped: {statistics.equal:,} duplicates, {statistics.empty:,} empty",
        f"           {lengths}; {statistics.bytes_per_token:.2f} bytes per token",
    ]
    if statistics.replaced:
        lines.append(f"           {statistics.replaced:,} had bytes that are not UTF-8, written as U+FFFD")
    return lines


def draw_histogram(statistics: PreparationStatistics, path: Path) -> None:
    """Draw the histogram of document lengths in tokens, with logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    starts: npt.NDArray[Any] = np.array([start for start, _ in statistics.histogram], dtype=np.float64)
    counts = [count for _, count in statistics.histogram]
    ends = np.append(starts[1:], starts[-1] * 2 ** (1 / BINS_PER_DOUBLING))
    axes.bar(starts, counts, width=ends - starts, align="edge", edgecolor="white", linewidth=0.5)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of a document",
        ylabel="documents",
        title=f"{statistics.documents:,} documents, {statistics.tokens:,} tokens",
    )
    FigureCanvasAgg(figure)
    temporary = path.with_name(f".{path.name}.writing")
    figure.savefig(temporary, format="png", metadata={"Software": None})
    temporary.replace(path)
