"""Compare saving and loading a checkpoint with ``cp`` and sync of the same bytes.

    python benchmarks/checkpoint.py                                     1 GB, 2 ranks, 7 rounds, here
    python benchmarks/checkpoint.py --gigabytes 4 --folder /mnt/nvme    in another folder

The jobs alternate within each round, so that noise of the machine affects all of them. The figures are
medians of the ratios within rounds. The state is that of ZeRO in bf16: weights, master weights and two
moments, in flat ranges. Before a load or a copy the files' page cache is dropped, so that both read the
disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from harness.environment import describe_machine, package_versions

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, Shard, TensorKey, flat_shards
from toolkit.checkpoint_folder import newest_checkpoint

BYTES_PER_PARAMETER = 2 + 4 + 4 + 4
SHAPE = (4096, 1021)  # of one matrix; odd, so that flat ranges become several boxes


def shards_of(rank: int, ranks: int, parameters: int) -> list[Shard]:
    """Return a rank's flat ranges of all tensors."""
    numel = SHAPE[0] * SHAPE[1]
    shards = []
    for number in range(max(1, parameters // numel)):
        start, stop = numel * rank // ranks, numel * (rank + 1) // ranks
        for state, dtype in (
            (WEIGHT, torch.bfloat16),
            (MASTER, torch.float32),
            (EXP_AVG, torch.float32),
            (EXP_AVG_SQ, torch.float32),
        ):
            data = torch.randn(stop - start).to(dtype)
            shards += flat_shards(TensorKey(state, f"layers.{number}.weight"), SHAPE, start, data)
    return shards


def drop_page_cache(folder: Path) -> None:
    """Drop the files' pages from the cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rank_main(rank: int, ranks: int, parameters: int, folder: Path, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    shards = shards_of(rank, ranks, parameters)
    store = CheckpointStore(folder, keep_last=1)
    for step, job in iter(jobs.get, None):
        began = time.perf_counter()
        blocked = None
        if job == "load":
            open_reader(folder).read(shards)
        else:
            pending = store.save(
                step,
                shards,
                {},
                namespace="benchmark/1",
                rank=rank,
                ranks=ranks,
                attempt=1,
                background=job == "background",
            )
            blocked = time.perf_counter() - began
            pending.wait()
        results.put((time.perf_counter() - began, blocked))


def copy(source: Path, target: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in (*target.iterdir(), target):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - began


def measure(folder: Path, ranks: int, parameters: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each job in each round, of the slowest rank, and the checkpoint's bytes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    queues = [context.Queue() for _ in range(ranks)]
    processes = [
        context.Process(
            target=rank_main, args=(rank, ranks, parameters, folder / "checkpoints", queues[rank], results)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()

    def run(step: int, job: str) -> tuple[float, float]:
        for queue in queues:
            queue.put((step, job))
        answers = [results.get(timeout=600) for _ in processes]
        return max(seconds for seconds, _ in answers), max(blocked or 0 for _, blocked in answers)

    seconds: dict[str, list[float]] = {
        name: [] for name in ("cp_and_sync", "save", "background", "background_blocked", "load")
    }
    for number in range(rounds + 1):  # the first round is a warm-up
        saved, _ = run(2 * number + 1, "save")
        whole, blocked = run(2 * number + 2, "background")
        path = newest_checkpoint(folder / "checkpoints")
        assert path is not None
        drop_page_cache(path)
        copied = copy(path, folder / "copy")
        shutil.rmtree(folder / "copy")
        drop_page_cache(path)
        loaded, _ = run(0, "load")
        if number:
            for name, value in zip(seconds, (copied, saved, whole, blocked, loaded), strict=True):
                seconds[name].append(value)
        print(
            f"round {number}: cp+sync {copied:.2f} s, save {saved:.2f} s, "
            f"background {whole:.2f} s (blocked {blocked:.2f} s), load {loaded:.2f} s"
        )
    for queue in queues:
        queue.put(None)
    for process in processes:
        process.join(60)
    return seconds, sum(file.stat().st_size for file in path.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint.json")
    arguments = parser.parse_args()
    work = arguments.folder / f"checkpoint-benchmark-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        seconds, numbytes = measure(
            work, arguments.ranks, int(arguments.gigabytes * 1e9 / BYTES_PER_PARAMETER), arguments.rounds
        )
    finally:
        shutil.rmtree(work)
    pairs = {
        name: [value / base for value, base in zip(values, seconds["cp_and_sync"], strict=True)]
        for name, values in seconds.items()
    }
    result = {
        "bytes": numbytes,
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "seconds": seconds,
        "times_cp_and_sync": {
            name: {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            for name, ratios in pairs.items()
        },
        "machine": describe_machine(),
        "versions": package_versions("torch", "xxhash"),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, figures in result["times_cp_and_sync"].items():
        print(
            f"{name:>20}: {figures['median']:.2f} x cp+sync ({figures['least']:.2f} .. {figures['most']:.2f})"
        )


if __name__ == "__main__":
    main()
