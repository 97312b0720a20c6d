"""This toolkit's stream, over one source and over a mixture of three."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from harness.contenders.common import (
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    Contender,
    CountedBatches,
    OpenedStream,
    StreamRank,
)
from harness.corpus import PARTS, Corpus

if TYPE_CHECKING:
    import torch

    from toolkit.data.order.samples import TokenWindows
    from toolkit.plan.types import BatchPlan

WEIGHTS = (3, 2, 1)


def batch_plan(stream_rank: StreamRank) -> BatchPlan:
    from toolkit.plan.types import BatchPlan, RampStage

    return BatchPlan(
        micro_batch=stream_rank.batch,
        global_batch=GLOBAL_BATCH,
        data_parallel=stream_rank.ranks,
        stages=(RampStage(GLOBAL_BATCH, 0, 0, None),),
    )


def _windows(folder: Path) -> TokenWindows:
    from toolkit.data.order.samples import TokenWindows
    from toolkit.data.tokens.token_array import open_split

    return TokenWindows(open_split(folder, "train"), LENGTH, SEED)


def open_single_source(
    corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None
) -> OpenedStream:
    return _open({"train": corpus.folder}, None, stream_rank, state)


def open_mixture(corpus: Corpus, folder: Path, stream_rank: StreamRank, state: bytes | None) -> OpenedStream:
    return _open({part: corpus.folder / part for part in PARTS}, WEIGHTS, stream_rank, state)


def _open(
    folders: dict[str, Path], weights: tuple[int, ...] | None, stream_rank: StreamRank, state: bytes | None
) -> OpenedStream:
    import torch

    from toolkit.data.order.mixture import Mixture, MixturePhase
    from toolkit.data.order.stream import Stream

    mixture = (
        Mixture([MixturePhase(0, tuple(Fraction(weight) for weight in weights))], SEED) if weights else None
    )
    sources = {name: _windows(folder) for name, folder in folders.items()}
    stream = Stream(sources, mixture, seed=SEED, batch=batch_plan(stream_rank), data_rank=stream_rank.rank)
    saved = json.loads(state) if state else {"step": 0}
    if state:
        stream.check_fingerprint(saved["fingerprint"])

    def batches() -> Iterator[torch.Tensor]:
        for micro_batches in stream.steps(saved["step"]):
            for rows in micro_batches:  # int64 [batch, LENGTH + 1], with the labels
                yield torch.from_numpy(rows[:, :LENGTH])

    counted = CountedBatches(batches(), saved["step"])
    return OpenedStream(
        counted, lambda: json.dumps({"step": counted.taken, "fingerprint": stream.fingerprint()}).encode()
    )


_MODULES = (
    "numpy",
    "torch",
    "toolkit.data.order.mixture",
    "toolkit.data.order.stream",
    "toolkit.data.tokens.token_array",
    "toolkit.plan.types",
)
CONTENDERS = {
    "toolkit": Contender(
        "this toolkit",
        "data/order/stream.py as a run opens it: one source, read ahead by its thread, windows of 2,049 "
        "of which 2,048 are counted",
        ("numpy",),
        _MODULES,
        open_single_source,
        peer=False,
    ),
    "toolkit-mixture": Contender(
        "this toolkit, mixture of three",
        f"thirds of the corpus, weights {WEIGHTS}; folders of up to 256 MiB, as these are, are hashed "
        "when they are opened",
        ("numpy",),
        _MODULES,
        open_mixture,
        peer=False,
    ),
}
