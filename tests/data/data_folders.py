"""Small data folders, and token sources without files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toolkit.data.digest import hash_file
from toolkit.data.manifest import DataManifest, DataOrigin, TokenizerInfo, write_manifest
from toolkit.data.manifest_file import MANIFEST_NAME
from toolkit.data.tokens.index import token_dtype
from toolkit.data.tokens.writer import SHARD_BYTES, SplitWriter
from toolkit.plan.types import BatchPlan, RampStage

Ints = npt.NDArray[np.int64]


class PositionTokens:
    """A token source in which each token is its own position, so that a window identifies itself."""

    token_bytes = 2
    dtype = np.dtype(np.int64)
    vocab_size = 1 << 40
    data_hash = "data"
    tokenizer_hash = "tokenizer"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def read(self, starts: Ints, out: Ints) -> None:
        assert not out.size or (starts.min() >= 0 and starts.max() + out.shape[1] <= self.tokens)
        out[:] = starts[:, None] + np.arange(out.shape[1])

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> list[bytes | memoryview]:
        rows = np.empty((len(starts), length), dtype=self.dtype)
        self.read(starts, rows)
        return [row.tobytes() for row in rows]


def batch_plan(micro_batch: int, global_batch: int, data_parallel: int) -> BatchPlan:
    stages = (RampStage(global_batch, 0, 0, None),)
    return BatchPlan(
        micro_batch=micro_batch, global_batch=global_batch, data_parallel=data_parallel, stages=stages
    )


def documents(count: int, vocab_size: int, seed: int = 0, longest: int = 50) -> list[Ints]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, random.integers(1, longest + 1)) for _ in range(count)]


def make_folder(
    folder: Path,
    splits: dict[str, Sequence[Ints]],
    vocab_size: int = 300,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: str = "{}",
) -> DataManifest:
    """Write a data folder of these documents with a placeholder for the tokenizer."""
    (folder / "tokenizer").mkdir(parents=True)
    file = folder / "tokenizer" / "tokenizer.json"
    file.write_text(tokenizer)
    file.with_name("tokenizer_config.json").write_text("{}")
    dtype, written = token_dtype(vocab_size), {}
    for name, texts in splits.items():
        with SplitWriter(folder, name, dtype, shard_bytes) as writer:
            for text in texts:
                writer.add(text)
            written[name] = writer.close()
    tokenizer = TokenizerInfo("tokenizer", hash_file(file).xxh3_128, vocab_size, 0)
    manifest = DataManifest(
        folder=folder,
        dtype=dtype.name,
        origin=DataOrigin("made", "none", 1, 1, "0"),
        tokenizer=tokenizer,
        splits=written,
    )
    write_manifest(manifest, folder)
    return manifest


def remove_checksums(folder: Path, version: int = 2) -> None:
    """Change the folder to the format without checksums."""
    content = json.loads((folder / MANIFEST_NAME).read_text())
    del content["manifest_xxh3_128"]
    for split in content["splits"].values():
        for shard in split["shards"]:
            (folder / f"{shard['name']}.sums").unlink()
            del shard["sums"]
    (folder / MANIFEST_NAME).write_text(json.dumps({**content, "format_version": version}))
