"""Synthetic documents with the features of real ones, written in every supported format."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash

from toolkit.config.prepare import PrepareConfig, TokenizerConfig
from toolkit.config.special_tokens import SpecialTokens
from toolkit.data.manifest import DataManifest, read_manifest
from toolkit.data.prepare import plan, tokenise
from toolkit.data.prepare.report import PreparationStatistics
from toolkit.data.prepare.run import prepare
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.index import IndexFile
from toolkit.progress import Progress

WORDS = [
    "the",
    "of",
    "data",
    "token",
    "naïve",
    "数",
    "ship",
    "river",
    "",
    "stone\tfor\nevery",
    "🙂",
    "<|endoftext|>",
    "def",
    "garden",
]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Return texts that are all different and not empty."""
    random_ = random.Random(seed)
    return [
        f"{number} " + " ".join(random_.choices(WORDS, k=random_.randint(1, longest)))
        for number in range(count)
    ]


def small_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json of 400 tokens whose <|endoftext|> is id 0."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe.train_bpe(make_texts(200, seed=99), 400).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


TEXTS = make_texts(300)


def write_jsonl(path: Path, texts: list[str], name: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(json.dumps({"id": number, name: text}).encode() + b"\n" for number, text in enumerate(texts))
    )
    return path


def write_gz(path: Path, content: bytes) -> None:
    """Compress as two members, as after appending."""
    middle = len(content) // 2
    path.write_bytes(gzip.compress(content[:middle], mtime=0) + gzip.compress(content[middle:], mtime=0))


def write_zst(path: Path, content: bytes) -> None:
    import pyarrow

    codec, middle = pyarrow.Codec("zstd"), len(content) // 3
    path.write_bytes(
        codec.compress(content[:middle], asbytes=True) + codec.compress(content[middle:], asbytes=True)
    )


def settings(
    source: object, output: Path, tokenizer: Path | TokenizerConfig, **changes: object
) -> PrepareConfig:
    """Return settings with half of the documents for validation and special tokens as text:
    both splits are filled. ``changes`` override them.
    """
    given = (
        TokenizerConfig(path=str(tokenizer), end_of_text=bpe.END_OF_TEXT)
        if isinstance(tokenizer, Path)
        else tokenizer
    )
    options: dict[str, object] = {
        "tokenizer": given,
        "workers": 1,
        "validation": 0.5,
        "special_tokens": SpecialTokens.text,
        **changes,
    }
    return PrepareConfig(input=str(source), output=str(output), **options)  # type: ignore[arg-type]


def prepared(
    source: object, output: Path, tokenizer: Path | TokenizerConfig, **changes: object
) -> DataManifest:
    return prepare(settings(source, output, tokenizer, **changes), Progress.silent())


def use_small_units(
    monkeypatch: pytest.MonkeyPatch, unit: int = 9000, part: int = 4000, batch: int = 500
) -> None:
    """Set small work units and parts in this process; other processes get the units from the plan."""
    monkeypatch.setattr(plan, "MIN_UNIT_BYTES", unit)
    monkeypatch.setattr(plan, "MAX_UNIT_BYTES", unit)
    monkeypatch.setattr(tokenise, "PART_BYTES", part)
    monkeypatch.setattr(tokenise, "BATCH_TEXT_BYTES", batch)


def write_histogram(statistics: PreparationStatistics, path: Path) -> None:
    """Replace ``report.draw_histogram``: write the numbers that it would draw."""
    path.write_text(json.dumps([statistics.documents, statistics.tokens, statistics.histogram]))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """Return the tokens of each document of a split, in order."""
    manifest = read_manifest(folder)
    found: list[list[int]] = []
    for shard in manifest.splits[split].shards if split in manifest.splits else ():
        row = np.fromfile(folder / f"{shard.name}.bin", manifest.dtype)
        lengths = IndexFile(folder / f"{shard.name}.idx").lengths
        found += [part.tolist() for part in np.split(row, np.cumsum(lengths)[:-1])]
    return found


def texts_of(folder: Path, split: str) -> list[str]:
    """Return the documents of a split as text, without their end-of-text."""
    manifest = read_manifest(folder)
    end, tokenizer = manifest.tokenizer.end_of_text, bpe.read_tokenizer(manifest.tokenizer_folder)
    documents = documents_of(folder, split)
    assert all(document[-1] == end and end not in document[:-1] for document in documents)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]


def is_validation_text(text: str, share: float = 0.5) -> bool:
    return int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8]) < int(share * 2**64)
