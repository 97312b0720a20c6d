"""The fixed samples of an evaluation, and the unigram model as a yardstick on exactly their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.order.samples import Samples
from toolkit.data.order.stream import rank_places
from toolkit.data.tokens.token_array import TokenSource
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]

# Stands where a split has no more tokens: no input, no target. The ignore_index of torch's cross-entropy.
IGNORED = -100
# Enough to know the frequencies of 10^5 tokens; counting all of a large data set would take minutes.
COUNTED_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One set to evaluate on. ``batches`` gives its global batches from the first, each as this rank's micro-batches
    [micro_batch, ...]; all ranks have equally many."""

    data_hash: str
    batches: Callable[[], Iterator[list[npt.NDArray[Any]]]]


def inputs_and_labels(tokens: Ints) -> tuple[Ints, Ints]:
    """Windows [..., length + 1] -> what the model sees and what it predicts, both [..., length].

    Labels are shifted and IGNORED where the window is; inputs have token 0 there, which no unmasked label sees (it comes later).
    """
    return np.maximum(tokens[..., :-1], 0), tokens[..., 1:]


def evaluation_samples(source: TokenSource, sequence_length: int, batches: int, global_batch: int) -> int:
    """Windows of an evaluation: the split's first ones, as many as it has. The last may be partly filled."""
    return min(batches * global_batch, max(0, -(-(source.tokens - 1) // sequence_length)))


def eval_batches(
    source: TokenSource, sequence_length: int, batches: int, batch: BatchPlan, data_rank: int
) -> Iterator[list[Ints]]:
    """Global batches over the split's first windows, always the same: this rank's micro-batches of each.

    A micro-batch is int64 [micro_batch, sequence_length + 1]. A split with fewer windows than ``batches`` global batches
    gives fewer; the last one is filled up with IGNORED, so that all ranks have equally many micro-batches, at least one.
    """
    samples = evaluation_samples(source, sequence_length, batches, batch.global_batch)
    accumulation = batch.global_batch // (batch.micro_batch * batch.data_parallel)
    places = rank_places(accumulation, batch.data_parallel, batch.micro_batch, data_rank)
    for first in range(0, max(samples, 1), batch.global_batch):
        yield [_read(source, first + rows, samples, sequence_length) for rows in places]


def _read(source: TokenSource, windows: Ints, samples: int, sequence_length: int) -> Ints:
    rows = np.full((len(windows), sequence_length + 1), IGNORED, dtype=np.int64)
    starts = windows * sequence_length
    lengths = np.where(windows < samples, np.minimum(sequence_length + 1, source.tokens - starts), 0)
    # By length, that is whole ones and perhaps a last one: a source in a store answers all that is asked of it in one turn.
    for length in np.unique(lengths[lengths > 0]).tolist():
        some = np.flatnonzero(lengths == length)
        read = np.empty((len(some), length), dtype=np.int64)
        source.read(starts[some], read)
        rows[some, :length] = read
    return rows


def sample_batches(
    samples: Samples, batches: int, batch: BatchPlan, data_rank: int
) -> Iterator[list[npt.NDArray[Any]]]:
    """``eval_batches`` of samples of any kind: the split's first ones, as many as it has.

    The last global batch may have fewer samples than places: its last micro-batches are shorter then, or empty, and all ranks still
    have equally many.
    """
    count = min(batches * batch.global_batch, samples.count)
    accumulation = batch.global_batch // (batch.micro_batch * batch.data_parallel)
    places = rank_places(accumulation, batch.data_parallel, batch.micro_batch, data_rank)
    for first in range(0, count, batch.global_batch):
        numbers = [first + rows[first + rows < count] for rows in places]
        yield [samples.read(np.zeros_like(some), some) for some in numbers]


def evaluation_targets(source: TokenSource, sequence_length: int, batches: int, global_batch: int) -> Ints:
    """The unmasked labels of all ranks' ``eval_batches``, [tokens]: windows touch, so they are one row of the split."""
    samples = evaluation_samples(source, sequence_length, batches, global_batch)
    targets = np.empty((1, max(0, min(samples * sequence_length, source.tokens - 1))), dtype=np.int64)
    source.read(np.ones(1, dtype=np.int64), targets)
    return targets[0]


def unigram_loss(train: TokenSource, targets: Ints) -> float:
    """Nats a token of the unigram model on ``targets``: add-one estimate over the vocabulary from the training split.

    The model that is trained and this one learn from the same text and are judged on the same tokens. (The targets' own
    entropy would be a lower figure that no model fitted beforehand reaches: it has seen its answers.)
    """
    counts = token_counts(train) + 1
    log_probabilities = np.log(counts) - math.log(counts.sum())
    return float(-log_probabilities[targets].mean())


def token_counts(source: TokenSource) -> Ints:
    """How often each token stands in the first COUNTED_TOKENS tokens: int64 [vocab_size]."""
    counts = np.zeros(source.vocab_size, dtype=np.int64)
    end = min(source.tokens, COUNTED_TOKENS)
    chunk = np.empty((1, min(1 << 20, end)), dtype=np.int64)
    for start in range(0, end, 1 << 20):
        part = chunk[:, : min(1 << 20, end - start)]
        source.read(np.array([start], dtype=np.int64), part)
        counts += np.bincount(part[0], minlength=source.vocab_size)
    return counts
