"""Measure the CPU time per token for many shards, mixtures, wide tokens, long windows and a DataLoader.

    python benchmarks/harness/data_layouts.py FOLDER --tokens 100000000 --seconds 2

Each case alternates, in one process, with its own baseline: windows of the same length and dtype, sliced in
sequence from one memory map and widened into the rows of a batch. FOLDER keeps the synthetic tokens. Prints
a list of cases as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # to run this file as a script

import numpy as np
import numpy.typing as npt
from harness.contenders.common import GLOBAL_BATCH, LENGTH, SEED
from harness.corpus import VOCABULARY

from toolkit.data.digest import hash_file
from toolkit.data.manifest import DataManifest, DataOrigin, TokenizerInfo, read_manifest, write_manifest
from toolkit.data.order.mixture import Mixture, MixturePhase
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream
from toolkit.data.tokens.token_array import MappedTokens
from toolkit.data.tokens.writer import SplitWriter
from toolkit.plan.types import BatchPlan, RampStage

TURN_TOKENS = 16 << 20
DOCUMENT = 5000  # tokens
WEIGHTS = tuple(Fraction(weight) for weight in (8, 7, 6, 5, 4, 3, 2, 1))


@dataclass(frozen=True, slots=True)
class DataLayoutCase:
    """A layout of data. ``aim`` is the largest ratio to its baseline; None if there is no aim."""

    name: str
    aim: float | None
    dtype: str = "<u2"
    shards: int = 1
    sources: int = 1
    length: int = LENGTH
    loader: bool = False


CASES = (
    DataLayoutCase("one shard", 1.6),
    DataLayoutCase("six shards", 1.6, shards=6),
    DataLayoutCase("one shard, int32", 1.6, dtype="<i4"),
    DataLayoutCase("six shards, int32", 1.6, dtype="<i4", shards=6),
    DataLayoutCase("mixture of eight", 2.0, sources=8),
    DataLayoutCase("mixture of eight, int32", 2.0, dtype="<i4", sources=8),
    DataLayoutCase("windows of 131,072", 1.6, length=1 << 17),
    DataLayoutCase("DataLoader over positions", None, loader=True),
)


def make_folder(folder: Path, tokens: int, case: DataLayoutCase, seed: int) -> MappedTokens:
    """Create uniform tokens in ``case.shards`` shards unless they exist."""
    if not (folder / "manifest.json").is_file():
        tokenizer = folder / "tokenizer" / "tokenizer.json"
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.write_text("{}")
        rng, dtype = np.random.default_rng(seed), np.dtype(case.dtype)
        shard_bytes = tokens // case.shards * dtype.itemsize if case.shards > 1 else 1 << 40
        with SplitWriter(folder, "train", dtype, shard_bytes) as writer:
            for _ in range(tokens // DOCUMENT):
                writer.add(rng.integers(1, VOCABULARY, DOCUMENT))
            split = writer.close()
        write_manifest(
            DataManifest(
                folder=folder,
                dtype=dtype.name,
                origin=DataOrigin("fabricated", "CC0-1.0", 1, 1, ""),
                splits={"train": split},
                tokenizer=TokenizerInfo("tokenizer", hash_file(tokenizer).xxh3_128, VOCABULARY, 0),
            ),
            folder,
        )
    return MappedTokens(read_manifest(folder), "train")


def batches(case: DataLayoutCase, sources: list[MappedTokens]) -> Iterator[Any]:
    """Yield int64 tensors [GLOBAL_BATCH, length] from this toolkit."""
    import torch
    from torch.utils.data import DataLoader

    from toolkit.data.torch_dataset import SampleDataset

    plan = BatchPlan(
        micro_batch=GLOBAL_BATCH,
        global_batch=GLOBAL_BATCH,
        data_parallel=1,
        stages=(RampStage(GLOBAL_BATCH, 0, 0, None),),
    )
    windows = {
        f"source-{number}": TokenWindows(source, case.length, SEED + number)
        for number, source in enumerate(sources)
    }
    mixture = Mixture([MixturePhase(0, WEIGHTS)], SEED) if len(sources) > 1 else None
    stream = Stream(windows, mixture, seed=SEED, batch=plan, data_rank=0)
    if case.loader:
        yield from DataLoader(SampleDataset(stream, 1 << 40), batch_size=GLOBAL_BATCH, sampler=range(1 << 40))  # type: ignore[arg-type]
    for micro_batches in stream.steps(0):
        for rows in micro_batches:
            yield torch.from_numpy(rows[:, : case.length])


def floor(case: DataLayoutCase, tokens: npt.NDArray[Any]) -> Iterator[Any]:
    import torch

    batch, last = 0, len(tokens) // (GLOBAL_BATCH * case.length)
    while True:
        rows = torch.empty((GLOBAL_BATCH, case.length), dtype=torch.int64)
        out = rows.numpy()
        for row in range(GLOBAL_BATCH):
            start = (batch % last * GLOBAL_BATCH + row) * case.length
            out[row] = tokens[start : start + case.length]
        yield rows
        batch += 1


def measure(case: DataLayoutCase, folder: Path, tokens: int, seconds: float) -> dict[str, Any]:
    parts = [
        make_folder(
            folder / f"{case.dtype[1:]}-{case.shards}-{case.sources}-{number}",
            tokens // case.sources,
            case,
            number,
        )
        for number in range(case.sources)
    ]
    mine, theirs = (
        batches(case, parts),
        floor(case, np.frombuffer(parts[0].windows(np.zeros(1, np.int64), parts[0].tokens)[0], case.dtype)),
    )
    turn = max(1, TURN_TOKENS // (GLOBAL_BATCH * case.length))

    def take(some: Iterator[Any], clock: Callable[[], float]) -> float:
        began = clock()
        for _ in range(turn):
            next(some)
        return (clock() - began) / (turn * GLOBAL_BATCH * case.length) * 1e9

    for _ in range(2):  # load every page of the maps, and start the threads
        take(theirs, time.thread_time)
        take(mine, time.process_time)
    turns, until = [], time.monotonic() + seconds
    while time.monotonic() < until or len(turns) < 3:
        own = take(mine, time.process_time)  # all threads, including reading ahead
        turns.append((own, take(theirs, time.thread_time)))
    ratios = [own / base for own, base in turns]
    return {
        "name": case.name,
        "aim": case.aim,
        "cpu_ns": statistics.median(own for own, _ in turns),
        "floor_cpu_ns": statistics.median(base for _, base in turns),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "turns": len(turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the turns per case")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(
        json.dumps([measure(case, given.folder, given.tokens, given.seconds) for case in CASES]), flush=True
    )


if __name__ == "__main__":
    main()
