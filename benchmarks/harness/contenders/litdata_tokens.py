"""litdata: optimized token chunks and TokensLoader, as in its guide on training language models."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
from harness.contenders.common import LENGTH, SEED, Contender, CountedBatches, OpenedStream, StreamRank
from harness.corpus import Corpus, open_corpus

if TYPE_CHECKING:
    import torch

CHUNK = LENGTH * 8012  # tokens, as in its guide


def _documents(window: int, folder: str) -> Iterator[np.ndarray]:
    """Yield one input of ``optimize``: CHUNK tokens, as one row."""
    yield np.array(open_corpus(Path(folder)).mapped()[window * CHUNK : (window + 1) * CHUNK])


def make(corpus: Corpus, folder: Path) -> None:
    import litdata

    inputs = list(range(-(-corpus.tokens // CHUNK)))
    # optimize deletes both folders first; its defaults, TMPDIR/chunks and TMPDIR/data, may belong to others.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="litdata-") as scratch:
        caches = {
            "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/chunks",
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/data",
        }
        with mock.patch.dict(os.environ, caches):
            litdata.optimize(
                functools.partial(_documents, folder=str(corpus.folder)),
                inputs,
                str(folder),
                chunk_size=CHUNK,
                num_workers=1,
                item_loader=litdata.TokensLoader(),
            )


def open_tokens(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    import litdata

    dataset = litdata.StreamingDataset(
        str(folder),
        item_loader=litdata.TokensLoader(block_size=LENGTH),
        shuffle=True,
        drop_last=True,
        seed=SEED,
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=stream_rank.batch, num_workers=0, drop_last=True)
    if state:
        loader.load_state_dict(json.loads(state))

    def endless() -> Iterator[torch.Tensor]:
        while True:
            for batch in loader:
                yield batch.long()

    return OpenedStream(CountedBatches(endless()), lambda: json.dumps(loader.state_dict()).encode())


CONTENDERS = {
    "litdata": Contender(
        "litdata TokensLoader",
        f"chunks of {CHUNK:,} uint16 tokens, StreamingDataLoader, shuffle=True, drop_last=True",
        ("litdata",),
        ("torch", "litdata"),
        open_tokens,
        make,
    )
}
