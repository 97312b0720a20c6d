"""Measure costs of a data stream that do not depend on the amount of data, with synthetic tokens."""

from __future__ import annotations

import json
import time
import tracemalloc
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from toolkit.data.order.mixture import Mixture, MixturePhase
from toolkit.data.order.samples import TokenWindows
from toolkit.data.order.stream import Stream, source_seed
from toolkit.plan.types import BatchPlan, RampStage

Ints = npt.NDArray[np.int64]

LENGTH = 2048
GLOBAL_BATCH, RANKS, MICRO_BATCH = 1024, 128, 8
ROUNDS = 5  # of each measurement
# Weights of the three sources of a mixture, before and after half of the first epoch.
WEIGHTS = ((0.7, 0.2, 0.1), (0.4, 0.3, 0.3))


class SyntheticTokens:
    """Any number of tokens without memory: each is a hash of its position."""

    token_bytes = 2
    dtype = np.dtype(np.uint16)
    vocab_size = 50_000
    tokenizer_hash = "f" * 32

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.data_hash = f"{tokens:032x}"

    def read(self, starts: Ints, out: npt.NDArray[np.integer]) -> None:
        tokens = starts[:, None] + np.arange(out.shape[1])
        tokens *= 0x9E3779B1
        tokens >>= 16
        tokens %= self.vocab_size
        out[:] = tokens

    def windows(self, starts: npt.NDArray[np.int64], length: int) -> list[bytes | memoryview]:
        rows = np.empty((len(starts), length), dtype=self.dtype)
        self.read(starts, rows)
        return [row.tobytes() for row in rows]


def synthetic_stream(samples: int, *, mixed: bool) -> Stream:
    """Return the stream of rank 3 of 128, over sources with ``samples`` in all."""
    stages = (RampStage(GLOBAL_BATCH, 0, 0, None),)
    batch = BatchPlan(micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH, data_parallel=RANKS, stages=stages)
    if not mixed:
        windows = TokenWindows(SyntheticTokens(samples * LENGTH), LENGTH, 0)
        return Stream({"train": windows}, None, seed=0, batch=batch, data_rank=3)
    tables = [tuple(Fraction(str(weight)) for weight in weights) for weights in WEIGHTS]
    mixture = Mixture([MixturePhase(0, tables[0]), MixturePhase(samples // 2, tables[1])], 0)
    names = ("code", "maths", "web")
    sources = {
        name: TokenWindows(SyntheticTokens(samples // 3 * LENGTH), LENGTH, source_seed(0, name))
        for name in names
    }
    return Stream(sources, mixture, seed=0, batch=batch, data_rank=3)


@dataclass(frozen=True, slots=True)
class StreamCost:
    """The cost of opening a stream.

    Attributes:
        first_batch_seconds: from nothing to the micro-batches of the first step: 8 windows of 2,048 tokens.
        resume_seconds: the same at a step in the third epoch.
        peak_bytes: memory of Python and numpy while resuming, including prefetched batches.
        state_bytes: size of the state as JSON.
    """

    samples: int
    mixed: bool
    first_batch_seconds: float
    resume_seconds: float
    peak_bytes: int
    state_bytes: int


def measure_stream_cost(samples: int, *, mixed: bool) -> StreamCost:
    """Measure an index of ``samples``; seconds are minima over ``ROUNDS``."""
    late = 5 * samples // 2 // GLOBAL_BATCH
    first = min(_seconds(samples, mixed, 0) for _ in range(ROUNDS))
    resume = min(_seconds(samples, mixed, late) for _ in range(ROUNDS))
    tracemalloc.start()
    _seconds(samples, mixed, late)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stream = synthetic_stream(samples, mixed=mixed)
    state = {"step": late, "samples": stream.first_sample(late), "fingerprint": stream.fingerprint()}
    return StreamCost(samples, mixed, first, resume, peak, len(json.dumps(state)))


def _seconds(samples: int, mixed: bool, step: int) -> float:
    began = time.perf_counter()
    stream = synthetic_stream(samples, mixed=mixed)
    steps = stream.steps(step)  # referenced, so that closing waits for its thread
    (batch,) = next(steps)
    seconds = time.perf_counter() - began
    assert batch.shape == (MICRO_BATCH, LENGTH + 1), f"shape {batch.shape}"
    stream.close()
    return seconds
