"""Measure the CPU time per token of training straight from a dataset, and the tokenizer's share of it.

    python benchmarks/dataset.py [--megabytes 12] [--seconds 15] [--output benchmarks/results/dataset.json]

The text is Python's standard library, one JSONL row per 2,000 characters; the tokenizer is trained on it.
The baseline is one process that calls ``encode_batch_fast`` on the same rows and discards the result. All
figures are CPU time of the whole process tree, so they also hold on a busy machine, within the noise of
shared caches.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from harness.environment import describe_machine, package_versions
from harness.time_slices import cpu_seconds

from toolkit.config.data import DataConfig, DatasetConfig
from toolkit.config.schema import RunConfig, TrainConfig
from toolkit.data.dataset.stream import DatasetStream
from toolkit.data.registry import open_data, prepare_data
from toolkit.data.tokens import tokenizer as bpe
from toolkit.data.tokens.stdlib import read_source_texts
from toolkit.files import write_whole
from toolkit.plan.types import BatchPlan, RampStage
from toolkit.progress import Progress

CHARACTERS, VOCABULARY = 2000, 16384
LENGTH, BATCH = 2048, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=12, help="size of the text")
    parser.add_argument("--seconds", type=float, default=15, help="approximate CPU time per measurement")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/dataset.json"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        rows = make(folder, asked.megabytes * 1_000_000)
        results: list[dict[str, Any]] = []
        for streaming, workers in ((False, 1), (False, 2), (True, 2)):
            # Before and after, because a shared machine changes its speed.
            before = floor(folder, rows, asked.seconds / 2)
            result = ours(folder, streaming, workers, asked.seconds)
            mean = (before + floor(folder, rows, asked.seconds / 2)) / 2
            results.append(
                {
                    **result,
                    "floor_ns_per_token": round(mean, 1),
                    "tokenizer_share": round(mean / result["cpu_ns_per_token"], 3),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    write_whole(
        asked.output,
        json.dumps(
            {
                "machine": describe_machine(),
                "versions": package_versions("tokenizers", "datasets", "pyarrow", "numpy"),
                "window": LENGTH,
                "batch": BATCH,
                "vocabulary": VOCABULARY,
                "rows": len(rows),
                "results": results,
            },
            indent=1,
        )
        + "\n",
    )


def make(folder: Path, size: int) -> list[str]:
    text = "".join(
        content.decode("utf-8", errors="replace")
        for _, content in read_source_texts(Path(sysconfig.get_path("stdlib")))
    )[:size]
    rows = [text[first : first + CHARACTERS] for first in range(0, len(text), CHARACTERS)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    bpe.save_tokenizer(bpe.train_bpe(rows, VOCABULARY), folder)
    return rows


def floor(folder: Path, rows: list[str], seconds: float) -> float:
    """Return CPU nanoseconds per token."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = bpe.read_tokenizer(folder / bpe.TOKENIZER_FOLDER)
    tokenizer.encode_special_tokens = True
    tokens, at, began = 0, 0, time.process_time()
    while time.process_time() - began < seconds:
        tokens += sum(map(len, tokenizer.encode_batch_fast(rows[at : at + 32], add_special_tokens=False)))
        at = (at + 32) % len(rows)
    return (time.process_time() - began) * 1e9 / tokens


def ours(folder: Path, streaming: bool, workers: int, seconds: float) -> dict[str, Any]:
    dataset = DatasetConfig(
        path=str(folder / "corpus.jsonl"),
        tokenizer=str(folder / bpe.TOKENIZER_FOLDER),
        streaming=streaming,
        workers=workers,
    )
    config = RunConfig(
        data=DataConfig(name="dataset", path=str(folder / "data"), dataset=dataset),
        train=TrainConfig(global_batch=BATCH, sequence_length=LENGTH),
    )
    batch = BatchPlan(
        micro_batch=BATCH, global_batch=BATCH, data_parallel=1, stages=(RampStage(BATCH, 0, 0, None),)
    )
    opened_at = time.perf_counter()
    ready = prepare_data(config, None, Progress.silent())
    ready_seconds, opened_at = time.perf_counter() - opened_at, time.perf_counter()
    stream = open_data(config, batch, 0, ready).stream
    assert isinstance(stream, DatasetStream)
    steps = stream.steps(0)
    next(steps)
    first_seconds = time.perf_counter() - opened_at
    for _ in islice(steps, 20):  # skip what was read ahead at the start
        pass
    pids = [os.getpid(), *stream._encoders.pids] if stream._encoders is not None else []
    before, counted, began = [cpu_seconds(pid) for pid in pids], 0, time.perf_counter()
    while sum(map(cpu_seconds, pids)) - sum(before) < seconds:
        counted += sum(1 for _ in islice(steps, 20))
    spent = [cpu_seconds(pid) - one for pid, one in zip(pids, before, strict=True)]
    wall = time.perf_counter() - began
    at = stream._step_done
    state = stream.state(at)
    stream.close()
    resume_at = time.perf_counter()
    resumed = open_data(config, batch, 0, ready).stream
    resumed.restore(state)
    next(iter(resumed.steps(at)))
    resume_seconds = time.perf_counter() - resume_at
    resumed.close()
    tokens = counted * BATCH * LENGTH
    return {
        "what": f"data=dataset, {'streaming' if streaming else 'map-style'}, {workers} workers",
        "tokens": tokens,
        "cpu_ns_per_token": round(sum(spent) * 1e9 / tokens, 1),
        "of_the_rank_itself": round(spent[0] * 1e9 / tokens, 1),
        "tokens_per_second": round(tokens / wall),
        "ready_seconds": round(ready_seconds, 2),
        "first_batch_seconds": round(first_seconds, 2),
        "resume_seconds": round(resume_seconds, 2),
        "state_bytes": len(json.dumps(state)),
    }


if __name__ == "__main__":
    main()
