"""Run one contender of benchmarks/streaming.py in its own process; print one line of JSON.

    python benchmarks/harness/read_contender.py toolkit speed --corpus FOLDER --files FOLDER [--seconds 2]

Tasks:

    make      write the contender's files
    speed     seconds to the first batch; CPU ns per token, in turns with slices of a memory map; peak memory
    order     a number and a domain of each sample of an epoch (--out), the state in its middle (--state)
    resume    continue from that state as rank --rank of --ranks: seconds to the first batch, samples (--out)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(
    str(Path(__file__).resolve().parents[1])
)  # last, because a contender imports another module named streaming

import numpy as np
import psutil
from harness.contenders import CONTENDERS
from harness.contenders.common import CACHE, GLOBAL_BATCH, LENGTH, Contender, OpenedStream, StreamRank
from harness.contenders.memory_map import read_slices
from harness.corpus import Corpus, domain_of, open_corpus

WARM_UP_SECONDS = 0.5
SLICES = 2000  # per turn of slices: 33 M tokens, about 15 ms
TURN_SECONDS = 0.15
AFTER = 64  # global batches compared after a resume


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("task", choices=("make", "speed", "order", "resume"))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True, help="the folder of this contender's own files")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the turns")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    contender, corpus = CONTENDERS[given.contender], open_corpus(given.corpus)
    import_contender(contender)
    if given.task == "make":
        found = make(contender, corpus, given.files)
    elif given.task == "speed":
        found = speed(contender, corpus, given.files, given.seconds)
    elif given.task == "order":
        found = order(contender, corpus, given.files, given.state, given.out)
    else:
        found = resume(
            contender, corpus, given.files, given.state, given.out, StreamRank(given.rank, given.ranks)
        )
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads and workers of some contenders do not end by themselves


def import_contender(contender: Contender) -> None:
    """Import what is not timed, and use one torch thread.

    Raises:
        PackageNotFoundError: the contender is not installed.
    """
    import torch

    for package in contender.packages:
        metadata.version(package)

    torch.set_num_threads(1)
    for module in ("numpy.ma", *contender.modules):  # numpy imports it on first use
        importlib.import_module(module)
    if contender.prepare is not None:
        contender.prepare()


def make(contender: Contender, corpus: Corpus, files: Path) -> dict[str, Any]:
    started = time.perf_counter()
    if contender.make is not None:
        contender.make(corpus, files)
    return {"make_seconds": time.perf_counter() - started}


def speed(contender: Contender, corpus: Corpus, files: Path, seconds: float) -> dict[str, Any]:
    if (files / CACHE).is_dir():  # a first start includes what the contender builds once
        shutil.rmtree(files / CACHE)
    first_seconds, opened = first_batch(contender, corpus, files, StreamRank(), None)
    reference = read_slices(corpus, StreamRank())
    memory = [private_bytes()]
    warm_until = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < warm_until:
        next(opened.batches)
    take(reference, corpus.tokens // (GLOBAL_BATCH * LENGTH))  # load every page of the map
    memory.append(private_bytes())
    turns: list[dict[str, float]] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = tree_cpu_seconds()
        thread_started = time.thread_time()
        take(reference, SLICES // 2)  # not counted: warm the caches after the contender
        slices_started = time.thread_time()
        take(reference, SLICES)
        slice_seconds = time.thread_time() - slices_started
        others_seconds = time.thread_time() - thread_started
        # The contender's threads also work during the turns of the slices, so count the whole process tree.
        batches = take_batches(opened, TURN_SECONDS)
        cpu_seconds = tree_cpu_seconds() - started - others_seconds
        turns.append(
            {
                "cpu_ns": cpu_seconds / (batches * GLOBAL_BATCH * LENGTH) * 1e9,
                "slice_cpu_ns": slice_seconds / (SLICES * GLOBAL_BATCH * LENGTH) * 1e9,
            }
        )
        memory.append(private_bytes())
    return {
        "first_seconds": first_seconds,
        "turns": turns,
        "peak_bytes": max(memory),
        "versions": {package: metadata.version(package) for package in contender.packages},
    }


def take(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches)


def take_batches(opened: OpenedStream, seconds: float) -> int:
    """Return the batches of about ``seconds`` seconds."""
    batches, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(8):
            next(opened.batches)
        batches += 8
    return batches


def first_batch(
    contender: Contender, corpus: Corpus, files: Path, stream_rank: StreamRank, state: bytes | None
) -> tuple[float, OpenedStream]:
    """Return the seconds from opening to the first batch, which is consumed."""
    started = time.perf_counter()
    opened = contender.open(corpus, files, stream_rank, state)
    batch = next(opened.batches)
    seconds = time.perf_counter() - started
    assert tuple(batch.shape) == (stream_rank.batch, LENGTH), f"{tuple(batch.shape)}"
    assert str(batch.dtype) == "torch.int64", f"{batch.dtype}"
    return seconds, opened


def order(contender: Contender, corpus: Corpus, files: Path, state: Path, out: Path) -> dict[str, Any]:
    """Read one epoch of whole global batches; keep the state before its middle one."""
    opened = contender.open(corpus, files, StreamRank(), None)
    batches = corpus.tokens // LENGTH // GLOBAL_BATCH
    numbers = np.empty((batches, GLOBAL_BATCH), dtype=np.uint64)
    domains = np.empty((batches, GLOBAL_BATCH), dtype=np.int64)
    size = 0
    for index in range(batches):
        if index == batches // 2:
            size = state.write_bytes(opened.state())
        rows = next(opened.batches).numpy()
        numbers[index], domains[index] = hash_rows(rows), domain_of(rows)
    np.savez(out, numbers=numbers, domains=domains)
    return {"batches": batches, "state_at": batches // 2, "state_bytes": size}


def resume(
    contender: Contender, corpus: Corpus, files: Path, state: Path, out: Path, stream_rank: StreamRank
) -> dict[str, Any]:
    if stream_rank.ranks > 1:
        import torch.distributed

        torch.distributed.init_process_group("gloo", rank=stream_rank.rank, world_size=stream_rank.ranks)
    state_bytes = state.read_bytes()
    started = time.perf_counter()
    opened = contender.open(corpus, files, stream_rank, state_bytes)
    first = next(opened.batches)
    seconds = time.perf_counter() - started
    rows = [first, *(next(opened.batches) for _ in range(AFTER - 1))]
    np.save(out, np.stack([hash_rows(batch.numpy()) for batch in rows]))
    return {"resume_seconds": seconds}


def hash_rows(rows: np.ndarray) -> np.ndarray:
    """Return a uint64 hash for each row of ``rows`` [batch, LENGTH]."""
    factors = np.random.default_rng(1).integers(1, 1 << 63, LENGTH, dtype=np.uint64) | np.uint64(1)
    return (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)


def tree_cpu_seconds() -> float:
    """Return user and system time of this process and all its children, living and ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    living = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(entry.ru_utime + entry.ru_stime for entry in usage) + sum(
        entry.user + entry.system for entry in living
    )


def private_bytes() -> int:
    """Return the anonymous and shared memory of the process tree, without the page cache."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        sizes = {
            key: int(rest.split()[0])
            for key, _, rest in (line.partition(":") for line in lines)
            if key in ("RssAnon", "RssShmem")
        }
        total += sum(sizes.values()) << 10
    return total


if __name__ == "__main__":
    main()
