"""Hugging Face datasets over arrow shards of samples: streamed in arrow batches, streamed in rows, and
mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness.contenders.common import (
    BUFFER,
    GLOBAL_BATCH,
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
    import pyarrow as pa

    windows = corpus.windows(LENGTH)
    schema = pa.schema({"tokens": pa.list_(pa.uint16(), LENGTH)})
    for first in range(0, len(windows), SHARD):
        with pa.ipc.new_stream(str(folder / f"shard-{first // SHARD:05}.arrow"), schema) as writer:
            # Batches of about 1,000, the default.
            for rows in np.array_split(windows[first : first + SHARD], max(1, SHARD // 1000)):
                array = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), LENGTH)
                writer.write_batch(pa.record_batch([array], schema=schema))


def _files(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.glob("shard-*.arrow"))


def _tensor(table: Any) -> torch.Tensor:
    """Return the values of an arrow table without a copy, widened."""
    import torch

    column = table["tokens"]
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    values = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]
    flat = values[0] if len(values) == 1 else np.concatenate(values)
    return torch.from_numpy(flat.astype(np.int64)).view(-1, LENGTH)


def _streamed(folder: Path, stream_rank: StreamRank, *, buffer: int | None) -> Any:
    import datasets
    from datasets.distributed import split_dataset_by_node

    dataset = datasets.load_dataset("arrow", data_files=_files(folder), split="train", streaming=True)
    if buffer:
        dataset = dataset.shuffle(seed=SEED, buffer_size=buffer)
    return (
        split_dataset_by_node(dataset, stream_rank.rank, stream_rank.ranks)
        if stream_rank.ranks > 1
        else dataset
    )


def _open(dataset: Any, batches: Any, state: bytes | None) -> OpenedStream:
    if state:
        dataset.load_state_dict(json.loads(state))

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from batches()

    return OpenedStream(CountedBatches(endless()), lambda: json.dumps(dataset.state_dict()).encode())


def open_batches(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    dataset = _streamed(folder, stream_rank, buffer=None).with_format("arrow")
    return _open(dataset, lambda: map(_tensor, dataset.iter(stream_rank.batch, drop_last_batch=True)), state)


def open_rows(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    dataset = _streamed(folder, stream_rank, buffer=BUFFER).with_format("torch")
    return _open(
        dataset,
        lambda: (batch["tokens"] for batch in dataset.iter(stream_rank.batch, drop_last_batch=True)),
        state,
    )


def open_mapped(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    """Open by number: the state is one number; the order is a list of all samples in memory."""
    import datasets

    files = [datasets.Dataset.from_file(file) for file in _files(folder)]
    dataset = (
        datasets.concatenate_datasets(files).shuffle(seed=SEED, keep_in_memory=True).with_format("arrow")
    )
    taken = json.loads(state)["batch"] if state else 0
    batches = len(dataset) // GLOBAL_BATCH

    def endless() -> Iterator[torch.Tensor]:
        batch = taken
        while True:
            first = batch % batches * GLOBAL_BATCH + stream_rank.rank * stream_rank.batch
            yield _tensor(dataset[first : first + stream_rank.batch])
            batch += 1

    counted = CountedBatches(endless(), taken)
    return OpenedStream(counted, lambda: json.dumps({"batch": counted.taken}).encode())


_MODULES = ("torch", "datasets", "pyarrow")
_SHARDS = f"arrow shards of {SHARD:,} samples"
CONTENDERS = {
    "datasets-arrow": Contender(
        "datasets, arrow batches",
        f"{_SHARDS}, streaming, with_format('arrow').iter(8), values taken without a copy; "
        "not shuffled: a buffer would make rows of them",
        ("datasets", "pyarrow"),
        _MODULES,
        open_batches,
        make,
    ),
    "datasets-rows": Contender(
        "datasets, rows",
        f"{_SHARDS}, streaming, shuffle(buffer_size={BUFFER:,}).with_format('torch').iter(8)",
        ("datasets", "pyarrow"),
        _MODULES,
        open_rows,
        make,
    ),
    "datasets-mapped": Contender(
        "datasets, mapped",
        f"{_SHARDS}, mapped, shuffle() with its list of indices in memory, slices of 8 in arrow; "
        "batches asked for by number",
        ("datasets", "pyarrow"),
        _MODULES,
        open_mapped,
        make,
    ),
}
