"""Compare reading image records in the run's order with a plain memory map of the same file.

    python benchmarks/records.py                        512 MB of uint16 tiles [12, 64, 64], 15 rounds
    python benchmarks/records.py --gigabytes 4 --folder /mnt/nvme

The jobs alternate within each round, on batches of the same size, in the page cache. A figure is the median
over rounds of CPU seconds of the whole process, including the stream's thread; ratios are within rounds.

    floor      numpy's fancy indexing of a structured memory map by the batch's numbers, shuffled beforehand
    held       the same while the last batches are still in use, so that memory is new and not warm
    records    ``Records.read`` of the same numbers
    stream     ``Stream.steps``: positions, permutation, reading ahead by a thread, micro-batches
    collated   the stream, and the vision task's fp32 normalised tensors on the CPU
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness.environment import describe_machine, package_versions

from toolkit.data.order.stream import CHUNKS_AHEAD, Stream
from toolkit.data.records.reader import RECORD_SUFFIX, RecordSamples, open_records
from toolkit.data.records.writer import RecordWriter
from toolkit.data.tiles import make_tile
from toolkit.plan.types import BatchPlan, RampStage
from toolkit.train.vision import ImageClassificationTask

BATCH, STEPS = 64, 16
Job = Callable[[], object]


def write(folder: Path, gigabytes: float) -> RecordSamples:
    """Write one tile many times, with its number as the label; reading does not depend on the values."""
    image = make_tile(0, np.random.default_rng(0), 12, 64, 10)
    began = time.perf_counter()
    with RecordWriter(
        folder, {"image": ("uint16", image.shape), "label": ("int64", ())}, description="", licence=""
    ) as writer:
        for number in range(int(gigabytes * 1e9 / image.nbytes)):
            writer.add("train", image=image, label=number % 10)
    records = open_records(folder, "train")
    print(
        f"{records.count * records.dtype.itemsize / (time.perf_counter() - began) / 1e6:.0f} MB/s, "
        "written, synced and verified"
    )
    return records


def jobs_of(records: RecordSamples, folder: Path) -> dict[str, Job]:
    mapped = np.memmap(folder / f"train-00000{RECORD_SUFFIX}", dtype=records.dtype, mode="r")
    batch = BatchPlan(
        micro_batch=BATCH, global_batch=BATCH, data_parallel=1, stages=(RampStage(BATCH, 0, 0, None),)
    )
    stream = Stream({"train": records}, None, seed=0, batch=batch, data_rank=0)
    steps, task = stream.steps(0), ImageClassificationTask("", records.manifest)
    held: deque[np.ndarray] = deque(maxlen=CHUNKS_AHEAD + 2)
    zeros = np.zeros(BATCH, dtype=np.int64)
    shuffled = np.random.default_rng(0).permutation(records.count)[: BATCH * STEPS].reshape(STEPS, BATCH)
    return {
        "floor": lambda: [mapped[numbers] for numbers in shuffled],
        "held": lambda: [held.append(mapped[numbers]) for numbers in shuffled],
        "records": lambda: [records.read(zeros, numbers) for numbers in shuffled],
        "stream": lambda: [next(steps) for _ in range(STEPS)],
        "collated": lambda: [task.collate(next(steps)[0]) for _ in range(STEPS)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "records.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = given.folder / f"records-benchmark-{os.getpid()}"
    try:
        records = write(work, given.gigabytes)
        size = BATCH * STEPS * records.dtype.itemsize
        jobs = jobs_of(records, work)
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(given.rounds + 1):
            for name, job in jobs.items():
                began = time.process_time()
                job()
                if number:  # the first round only fills caches and the stream's buffer
                    seconds[name].append(time.process_time() - began)
    finally:
        shutil.rmtree(work)
    result = {
        "record_bytes": records.dtype.itemsize,
        "records": records.count,
        "batch": BATCH,
        "rounds": given.rounds,
        "gigabytes_per_cpu_second": {
            name: size / statistics.median(values) / 1e9 for name, values in seconds.items()
        },
        "times_floor": {
            name: statistics.median(
                value / floor for value, floor in zip(values, seconds["floor"], strict=True)
            )
            for name, values in seconds.items()
        },
        "machine": describe_machine(),
        "versions": package_versions("numpy", "torch"),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, ratio in result["times_floor"].items():
        print(
            f"{name:>10}: {result['gigabytes_per_cpu_second'][name]:.2f} GB per CPU second, "
            f"{ratio:.2f} x the baseline"
        )


if __name__ == "__main__":
    main()
