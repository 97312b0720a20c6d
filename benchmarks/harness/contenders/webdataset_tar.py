"""webdataset: tar shards of whole samples, deterministic shard shuffle and a sample buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness.contenders.common import (
    BUFFER,
    LENGTH,
    SEED,
    SHARD,
    Contender,
    CountedBatches,
    OpenedStream,
    StreamRank,
)
from harness.corpus import Corpus

if TYPE_CHECKING:
    import torch


def make(corpus: Corpus, folder: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(folder / "shard-%05d.tar"), maxcount=SHARD, verbose=0) as writer:
        for number, window in enumerate(corpus.windows(LENGTH)):
            writer.write({"__key__": f"{number:09}", "tokens": window.tobytes()})


def _row(sample: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(sample["tokens"], dtype="<u2")


def _batch(rows: list[np.ndarray]) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.stack(rows).astype(np.int64))


def open_tar(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    import webdataset

    urls = sorted(str(file) for file in folder.glob("shard-*.tar"))
    dataset = webdataset.WebDataset(
        urls, shardshuffle=len(urls), detshuffle=True, seed=SEED, nodesplitter=webdataset.split_by_node
    )
    dataset = dataset.compose(webdataset.detshuffle(BUFFER, initial=BUFFER, seed=SEED)).map(_row)
    dataset = dataset.batched(stream_rank.batch, collation_fn=_batch, partial=False)

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from dataset

    counted = CountedBatches(endless())
    for _ in range(json.loads(state)["batch"] if state else 0):  # it has no state: read the samples again
        next(counted)
    return OpenedStream(counted, lambda: json.dumps({"batch": counted.taken}).encode())


CONTENDERS = {
    "webdataset": Contender(
        "webdataset",
        f"tar shards of {SHARD:,} raw uint16 samples, detshuffle of shards and of {BUFFER:,} samples; "
        "resume reads again",
        ("webdataset",),
        ("torch", "webdataset"),
        open_tar,
        make,
    )
}
