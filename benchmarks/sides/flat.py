"""What a stream costs on a fabricated corpus of any size: no file, every token 0. One line of JSON.

    python benchmarks/sides/flat.py 1000000000000
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from sides.streams.common import GLOBAL_BATCH, LENGTH, SEED, Place
from sides.streams.ours import batch_plan

from toolkit.data.samples import Ints, TokenWindows
from toolkit.data.stream import Stream

REPEATS = 20


class Fabricated:
    """A row of ``tokens`` tokens that is nowhere."""

    token_bytes = 2
    vocab_size = 64_000
    data_hash = tokenizer_hash = "0" * 32

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def read(self, starts: Ints, out: Ints) -> None:
        assert int(starts.min()) >= 0, starts
        assert int(starts.max()) + out.shape[1] <= self.tokens, starts
        out[:] = 0


def cost(samples: int) -> dict[str, float]:
    """Medians in milliseconds; the peak that Python and numpy allocate, in bytes."""
    half = samples // 2 // GLOBAL_BATCH
    first = [_open(samples, 0) for _ in range(REPEATS)]
    resume = [_open(samples, half) for _ in range(REPEATS)]
    tracemalloc.start()
    _open(samples, half)
    peak = tracemalloc.get_traced_memory()[1]
    state = json.dumps({"step": half, "fingerprint": _stream(samples).fingerprint()})
    return {"samples": samples, "first_batch_ms": float(np.median(first)) * 1e3, "resume_ms": float(np.median(resume)) * 1e3,
            "peak_bytes": peak, "state_bytes": len(state)}


def _stream(samples: int) -> Stream:
    return Stream({"train": TokenWindows(Fabricated(samples * LENGTH + 1), LENGTH, SEED)}, None, seed=SEED, batch=batch_plan(Place()),
                  data_rank=0)


def _open(samples: int, step: int) -> float:
    """Seconds to the first batch."""
    started = time.perf_counter()
    stream = _stream(samples)
    next(stream.steps(step))
    seconds = time.perf_counter() - started
    stream.close()
    return seconds


if __name__ == "__main__":
    print(json.dumps(cost(int(float(sys.argv[1])))))
