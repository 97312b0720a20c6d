"""Training samples in their order: which windows a step sees, read ahead by a thread.

A sample is a window of ``sequence_length + 1`` tokens; windows follow one another every ``sequence_length`` tokens over
the concatenated documents, so every token but the first of a window is predicted once. An epoch's windows begin at its
own shift and run around the end of the corpus, so there are ``tokens // sequence_length`` of them in each epoch and the
few tokens that no window holds lie elsewhere each time.

The state of a stream is a number: the samples consumed. ``BatchPlan`` gives it for a step, and nothing else is needed to
continue on another number of ranks, with another micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from toolkit.data.index import TokenSource
from toolkit.data.order import VERSION, Order, block_samples
from toolkit.data.prefetch import Prefetch
from toolkit.errors import CheckpointError, InputError, Problem
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]

# Steps are ordered, read and handed over by the chunk: the permutation alone is a hundred numpy calls, whatever it permutes.
ORDERED_AT_ONCE = 4096  # samples
READ_AT_ONCE = 1 << 16  # tokens: 512 KiB of int64, which stays in a core's cache
CHUNKS_AHEAD = 3  # of one step at least

_FORK = "or start a new run from that state: run.fork=PATH"
# What a fingerprint holds -> what to do where it differs.
_REMEDIES = {
    "order": f"use the version of the toolkit that wrote the checkpoint, {_FORK}",
    "data": f"point data.path to the data that the run began with, {_FORK}",
    "tokenizer": f"point data.path to the data that the run began with, {_FORK}",
    "seed": f"write data.shuffle_seed={{saved}}, {_FORK}",
    "sequence_length": f"write train.sequence_length={{saved}}, {_FORK}",
}


def rank_positions(batch: BatchPlan, step: int, data_rank: int) -> Ints:
    """The samples of one data rank in optimizer step ``step``: int64 [accumulation, micro_batch].

    Micro-batch ``m`` of rank ``r`` begins at sample ``(m * data_parallel + r) * micro_batch`` of the global batch: taken
    by micro-batch, then by rank, samples keep their order whatever the layout.
    """
    now = batch.at(step)
    return now.first_sample + rank_places(now.accumulation, batch.data_parallel, batch.micro_batch, data_rank)


@lru_cache(maxsize=64)
def rank_places(accumulation: int, data_parallel: int, micro_batch: int, data_rank: int) -> Ints:
    """The places of one data rank in a global batch of ``accumulation * data_parallel * micro_batch``. Read-only."""
    firsts = (np.arange(accumulation, dtype=np.int64) * data_parallel + data_rank) * micro_batch
    places = firsts[:, None] + np.arange(micro_batch)
    places.flags.writeable = False
    return places


class Stream:
    """One data rank's view of one split, endless.

    Worked example: ``BatchPlan(micro_batch=2, global_batch=8, data_parallel=2)``; in step 0 rank 0 reads samples
    ``[0, 1]`` and ``[4, 5]``, rank 1 reads ``[2, 3]`` and ``[6, 7]``.
    """

    def __init__(self, source: TokenSource, *, sequence_length: int, seed: int, batch: BatchPlan, data_rank: int) -> None:
        """Raises InputError where the split is shorter than one window."""
        assert 0 <= data_rank < batch.data_parallel, f"rank {data_rank} of {batch.data_parallel}"
        if source.tokens < sequence_length + 1:
            raise InputError(too_short(source.tokens, sequence_length))
        self._source = source
        self._length = sequence_length
        self._seed = seed
        self._batch = batch
        self._rank = data_rank
        self.samples_per_epoch = source.tokens // sequence_length
        self._order = Order(self.samples_per_epoch, block_samples=block_samples(sequence_length, source.token_bytes), seed=seed)
        self._open: weakref.WeakSet[Prefetch[list[Ints]]] = weakref.WeakSet()

    def steps(self, first_step: int) -> Prefetch[list[Ints]]:
        """This rank's micro-batches, one list a step from ``first_step`` on: each int64 [micro_batch, sequence_length + 1].

        Reading ahead begins at once; an error in it is raised by ``next``. Closing the iterator or the stream ends it.
        """
        steps = Prefetch(self._chunks(first_step), CHUNKS_AHEAD, name="data-stream")
        self._open.add(steps)
        return steps

    def windows(self, positions: Ints) -> Ints:
        """The samples at ``positions`` [n] of the run's order: int64 [n, sequence_length + 1]."""
        return self._read(self.starts(positions))

    def starts(self, positions: Ints) -> Ints:
        """The first token of each sample."""
        epochs, windows = self._order(positions)
        present, where = np.unique(epochs, return_inverse=True)
        shifts = self._order.shifts(present, self._source.tokens)
        return (windows * self._length + shifts[where]) % self._source.tokens

    def fingerprint(self) -> dict[str, str | int]:
        """What, beside the consumed samples, decides every sample that follows. Plain JSON types."""
        return {
            "order": VERSION,
            "data": self._source.data_hash,
            "tokenizer": self._source.tokenizer_hash,
            "seed": self._seed,
            "sequence_length": self._length,
        }

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Raises CheckpointError naming everything in which the stream that was saved differs from this one."""
        mine = self.fingerprint()
        problems = [
            Problem(
                f"data.{key}" if key != "sequence_length" else "train.sequence_length",
                f"{key}={mine[key]}, the checkpoint has {key}={saved.get(key)}",
                "a run continues on the samples and in the order it began with",
                remedy.format(saved=saved.get(key)),
            )
            for key, remedy in _REMEDIES.items()
            if saved.get(key) != mine[key]
        ]
        if problems:
            raise CheckpointError(*problems)

    def close(self) -> None:
        for steps in list(self._open):
            steps.close()

    def _chunks(self, first_step: int) -> Iterator[list[list[Ints]]]:
        """Consecutive steps, about READ_AT_ONCE tokens of them at a time."""
        step = first_step
        while True:
            ahead = self._positions(step)
            starts = self.starts(np.concatenate([positions.ravel() for positions in ahead]))
            yield from self._read_chunks(ahead, starts)
            step += len(ahead)

    def _positions(self, step: int) -> list[Ints]:
        """Of the steps from ``step`` on, until there are ORDERED_AT_ONCE."""
        ahead: list[Ints] = []
        samples = 0
        while samples < ORDERED_AT_ONCE:
            ahead.append(rank_positions(self._batch, step + len(ahead), self._rank))
            samples += ahead[-1].size
        return ahead

    def _read_chunks(self, ahead: list[Ints], starts: Ints) -> Iterator[list[list[Ints]]]:
        """``ahead``: the positions of each step; ``starts``: of all their samples, one after another."""
        length = self._length + 1
        first = at = 0
        while first < len(ahead):
            last = first + max(1, READ_AT_ONCE // (ahead[first].size * length))
            some = ahead[first:last]
            size = sum(positions.size for positions in some)
            rows = self._read(starts[at : at + size])
            chunk: list[list[Ints]] = []
            row = 0
            for positions in some:
                chunk.append(list(rows[row : row + positions.size].reshape(*positions.shape, length)))
                row += positions.size
            yield chunk
            first, at = last, at + size

    def _read(self, starts: Ints) -> Ints:
        tokens, length = self._source.tokens, self._length + 1
        rows = np.empty((len(starts), length), dtype=np.int64)
        around = np.flatnonzero(starts + length > tokens)  # at most one window an epoch
        if not around.size:
            self._source.read(starts, rows)
            return rows
        within = np.flatnonzero(starts + length <= tokens)
        straight = np.empty((len(within), length), dtype=np.int64)
        self._source.read(starts[within], straight)
        rows[within] = straight
        for row in around.tolist():
            before_end = tokens - int(starts[row])
            self._source.read(starts[row : row + 1], rows[row : row + 1, :before_end])
            self._source.read(np.zeros(1, dtype=np.int64), rows[row : row + 1, before_end:])
        return rows


def too_short(tokens: int, sequence_length: int, split: str = "train") -> Problem:
    """The problem of a split that does not fill one window."""
    seen = f"train.sequence_length={sequence_length}, split {split} has {tokens} tokens"
    remedy = f"write train.sequence_length={max(1, tokens - 1)} or less, or prepare more text"
    return Problem("train.sequence_length", seen, "the data fills at least one window of sequence_length + 1 tokens", remedy)
