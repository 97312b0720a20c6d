"""Evaluation batches (always a split's first samples), and the unigram model as a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.order.samples import SampleSource
from toolkit.data.order.stream import rank_batch_indices
from toolkit.data.tokens.token_array import TokenSource
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]

# Marks positions after the end of a split: no input, no target. The default ignore_index of torch's
# cross-entropy.
IGNORE_INDEX = -100
# Enough to estimate the frequencies of 10^5 tokens; counting all tokens of a large data set would take
# minutes.
COUNTED_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One evaluation set.

    Attributes:
        batches: returns an iterator over the global batches from the first, each as this rank's micro-batches
            [micro_batch, ...]. All ranks have the same number of micro-batches.
    """

    data_hash: str
    batches: Callable[[], Iterator[list[Any]]]


def inputs_and_labels(tokens: Ints) -> tuple[Ints, Ints]:
    """Split windows [..., length + 1] into inputs and labels, both [..., length].

    Labels are shifted by one and keep IGNORE_INDEX. Inputs have token 0 there; no label that counts depends
    on it.
    """
    return np.maximum(tokens[..., :-1], 0), tokens[..., 1:]


def count_eval_windows(source: TokenSource, sequence_length: int, batches: int, global_batch: int) -> int:
    """Return the number of windows to evaluate: the first windows of the split.

    The last may be partly filled.
    """
    return min(batches * global_batch, max(0, -(-(source.tokens - 1) // sequence_length)))


def eval_batches(
    source: TokenSource, sequence_length: int, batches: int, batch: BatchPlan, data_rank: int
) -> Iterator[list[Ints]]:
    """Yield global batches of the split's first windows, each as a list of this rank's micro-batches.

    A micro-batch is int64 [micro_batch, sequence_length + 1]. A split with fewer windows than ``batches``
    global batches yields fewer batches. The last batch is padded with IGNORE_INDEX, so that all ranks have
    the same number of micro-batches, at least one.
    """
    samples = count_eval_windows(source, sequence_length, batches, batch.global_batch)
    indices = rank_batch_indices(batch.accumulation, batch.data_parallel, batch.micro_batch, data_rank)
    for first in range(0, max(samples, 1), batch.global_batch):
        yield [_read_windows(source, first + numbers, samples, sequence_length) for numbers in indices]


def _read_windows(source: TokenSource, windows: Ints, samples: int, sequence_length: int) -> Ints:
    batch = np.full((len(windows), sequence_length + 1), IGNORE_INDEX, dtype=np.int64)
    starts = windows * sequence_length
    lengths = np.where(windows < samples, np.minimum(sequence_length + 1, source.tokens - starts), 0)
    # One read for each length (whole windows and perhaps a last one), so that a store gets all requests at
    # once.
    for length in np.unique(lengths[lengths > 0]).tolist():
        selected = np.flatnonzero(lengths == length)
        tokens = np.empty((len(selected), length), dtype=np.int64)
        source.read(starts[selected], tokens)
        batch[selected, :length] = tokens
    return batch


def eval_sample_batches(
    samples: SampleSource, batches: int, batch: BatchPlan, data_rank: int
) -> Iterator[list[npt.NDArray[Any]]]:
    """Yield evaluation batches of samples of any kind, in the manner of ``eval_batches``.

    If the last global batch is incomplete, its last micro-batches are shorter or empty; all ranks still have
    the same number of them.
    """
    count = min(batches * batch.global_batch, samples.count)
    indices = rank_batch_indices(batch.accumulation, batch.data_parallel, batch.micro_batch, data_rank)
    for first in range(0, count, batch.global_batch):
        chosen = [first + numbers[first + numbers < count] for numbers in indices]
        yield [samples.read(np.zeros_like(numbers), numbers) for numbers in chosen]


def eval_targets(source: TokenSource, sequence_length: int, batches: int, global_batch: int) -> Ints:
    """Return the labels of all ranks' ``eval_batches`` without padding, int64 [tokens]."""
    samples = count_eval_windows(source, sequence_length, batches, global_batch)
    targets = np.empty((1, max(0, min(samples * sequence_length, source.tokens - 1))), dtype=np.int64)
    source.read(np.ones(1, dtype=np.int64), targets)
    return targets[0]


def unigram_loss(train: TokenSource, targets: Ints) -> float:
    """Return the loss of a unigram model on ``targets`` in nats per token.

    The model is the add-one estimate from the training split, so it has seen the same text as the trained
    model. (The entropy of the targets themselves would be lower than any model fitted beforehand can reach.)
    """
    counts = count_tokens(train) + 1
    log_probabilities = np.log(counts) - math.log(counts.sum())
    return float(-log_probabilities[targets].mean())


def count_tokens(source: TokenSource) -> Ints:
    """Count each token in the first COUNTED_TOKENS tokens of ``source``: int64 [vocab_size]."""
    counts = np.zeros(source.vocab_size, dtype=np.int64)
    end = min(source.tokens, COUNTED_TOKENS)
    chunk = np.empty((1, min(1 << 20, end)), dtype=np.int64)
    for start in range(0, end, 1 << 20):
        part = chunk[:, : min(1 << 20, end - start)]
        source.read(np.array([start], dtype=np.int64), part)
        counts += np.bincount(part[0], minlength=source.vocab_size)
    return counts
