"""Samples for one data rank: whatever the layout, the global batch of a step is the same samples in the same order.

A stream has no state of its own. Step -> positions in the run's order -> (source, place in it) -> (epoch, number) -> samples; so it
starts at any step at the same cost, and a checkpoint needs the number of the step and a fingerprint of what is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.order import mixture as mixing
from toolkit.data.order.fingerprint import FORK, check_same
from toolkit.data.order.mixture import Mixture
from toolkit.data.order.permutation import VERSION, Order, keyed, root_key
from toolkit.data.order.prefetch import Prefetch
from toolkit.data.order.samples import Samples, joined
from toolkit.plan.types import BatchPlan

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

# Steps are ordered, read and handed over by the chunk: the permutation alone is a hundred numpy calls, whatever it permutes.
ORDERED_AT_ONCE = 4096  # samples
ORDERED_AT_FIRST = 64  # samples, twice as many each time: of many ranks' samples each one's are few, and spread over many blocks
READ_AT_ONCE = 1 << 21  # bytes: numpy's calls for each source are paid once for so many
CHUNKS_AHEAD = 3  # of one step at least

# What a fingerprint holds -> the key that it comes from, and what to do where it differs.
_REMEDIES = {
    "order": ("data.order", f"use the version of the toolkit that wrote the checkpoint, {FORK}"),
    "data": ("data.path", f"point data.path to the data that the run began with, {FORK}"),
    "tokenizer": ("data.path", f"point data.path to the data that the run began with, {FORK}"),
    "seed": ("data.shuffle_seed", f"write data.shuffle_seed={{saved}}, {FORK}"),
    "sequence_length": ("train.sequence_length", f"write train.sequence_length={{saved}}, {FORK}"),
    "mixture": ("data.sources", f"write the sources, weights and phases that the run began with, {FORK}"),
}
_OTHERWISE = ("data.{key}", f"bring back what the run began with, {FORK}")


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


def source_seed(seed: int, name: str | None) -> int:
    """The seed of one source of several, of its own, whatever the others are; ``name`` is None where there is only one."""
    return (
        seed if name is None else int(keyed(root_key(seed), xxhash.xxh3_64_intdigest(name.encode()) >> 1)[0])
    )


class Stream:
    """One data rank's view of its sources, endless.

    Worked example: ``BatchPlan(micro_batch=2, global_batch=8, data_parallel=2)``; in step 0 rank 0 reads samples
    ``[0, 1]`` and ``[4, 5]``, rank 1 reads ``[2, 3]`` and ``[6, 7]``.
    """

    def __init__(
        self,
        sources: Mapping[str, Samples],
        mixture: Mixture | None,
        *,
        seed: int,
        batch: BatchPlan,
        data_rank: int,
    ) -> None:
        """
        Args:
            sources: by name, in the order of the mixture's weights. Their samples are of one shape.
            mixture: None where there is one source.
            seed: of the order. That of a source of several is ``source_seed``.
        """
        assert 0 <= data_rank < batch.data_parallel, f"rank {data_rank} of {batch.data_parallel}"
        assert len(sources) == (1 if mixture is None else mixture.sources), f"{len(sources)} sources"
        self._sources = dict(sources)
        self._mixture = mixture
        self._seed = seed
        self._batch = batch
        self._rank = data_rank
        self._samples = list(sources.values())
        names = [None] if mixture is None else list(sources)
        self._orders = [
            Order(samples.count, block_samples=samples.block, seed=source_seed(seed, name))
            for name, samples in zip(names, self._samples, strict=True)
        ]
        self._dtype = self._samples[0].dtype
        self._asked = -1  # the run of positions that was asked for last, see _remembered
        self._kept: tuple[int, tuple[Ints, Ints, Ints]] | None = None
        self._open: weakref.WeakSet[Prefetch[list[Array]]] = weakref.WeakSet()

    def steps(self, first_step: int, stride: int = 1) -> Prefetch[list[Array]]:
        """This rank's micro-batches, one list a step: each [micro_batch, ...] of ``Samples.dtype``.

        The steps are ``first_step`` and every ``stride``-th after it. Reading ahead begins with the first ``next``; an error in it is
        raised by ``next``. Closing the iterator or the stream ends it.
        """
        dtype = self._dtype  # not self, which the thread's owner would keep alive

        def widened(step: list[Array]) -> list[Array]:
            return [rows.astype(dtype, copy=False) for rows in step]

        steps = Prefetch(self._chunks(first_step, stride), CHUNKS_AHEAD, name="data-stream", finish=widened)
        self._open.add(steps)
        return steps

    def samples(self, positions: Ints) -> Array:
        """The samples at ``positions`` [n] of the run's order: [n, ...]."""
        return self._read(*self._remembered(positions)).astype(self._dtype, copy=False)

    def places(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Where the samples at ``positions`` [n] stand: the number of the source, the epoch and the number in it, [n] each."""
        if self._mixture is None:
            return (np.zeros_like(positions), *self._orders[0](positions))
        which, places = self._mixture(positions)
        epochs, numbers = np.empty_like(places), np.empty_like(places)
        for source, order in enumerate(self._orders):
            at = np.flatnonzero(which == source)
            if at.size:
                epochs[at], numbers[at] = order(places[at])
        return which, epochs, numbers

    def _remembered(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """``places``, for whoever asks for a few positions at a time: a hundred numpy calls for 8 samples cost more than reading them.

        Positions come in rising order from all but shuffling samplers, so the places of a whole run of ORDERED_AT_ONCE positions are
        kept as soon as it has been asked for twice in a row.
        """
        first = int(positions.min()) // ORDERED_AT_ONCE if positions.size else 0
        if not positions.size or int(positions.max()) // ORDERED_AT_ONCE != first:
            return self.places(positions)
        again, self._asked = self._asked == first, first
        if self._kept is None or self._kept[0] != first:
            if not again:
                return self.places(positions)
            self._kept = (
                first,
                self.places(
                    np.arange(first * ORDERED_AT_ONCE, (first + 1) * ORDERED_AT_ONCE, dtype=np.int64)
                ),
            )
        which, epochs, numbers = self._kept[1]
        at = positions - first * ORDERED_AT_ONCE
        return which[at], epochs[at], numbers[at]

    def first_sample(self, step: int) -> int:
        """The position in the run's order at which ``step`` begins, over all ranks."""
        return self._batch.at(step).first_sample

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        """Samples and epochs that the first ``step`` steps take of each source."""
        position = self.first_sample(step)
        counts = [position] if self._mixture is None else self._mixture.counts(position)
        return {
            name: (count, count / samples.count)
            for (name, samples), count in zip(self._sources.items(), counts, strict=True)
        }

    def fingerprint(self) -> dict[str, str | int]:
        """What, beside the consumed samples, decides every sample that follows. Plain JSON types, O(sources)."""
        own: dict[str, str | int] = {"order": VERSION, "seed": self._seed}
        if self._mixture is None:
            return own | self._samples[0].fingerprint()
        for name, samples in self._sources.items():
            found = samples.fingerprint()
            own |= {key if key != "data" else f"data of {name}": value for key, value in found.items()}
        return own | {"mixture": f"{self._mixture.version} {mixing.digest(self._mixture)}"}

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Compare with the stream that was saved, and go on in the version of the mixture's order under which that one began.

        Raises:
            CheckpointError: names everything else in which they differ.
        """
        version = str(saved.get("mixture", "")).partition(" ")[0]
        if self._mixture is not None and version in mixing.VERSIONS:
            self._mixture = self._mixture.under(version)
            self._kept = None
        check_same(self.fingerprint(), saved, _REMEDIES, otherwise=_OTHERWISE)

    def state(self, step: int) -> dict[str, Any]:
        """Nothing: the step decides."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        for steps in list(self._open):
            steps.close()

    def _chunks(self, first_step: int, stride: int) -> Iterator[list[list[Array]]]:
        """Steps: one at first, so that the first batch is not waited for longer than need be, then up to READ_AT_ONCE bytes at a time."""
        step = first_step
        at_once, ordered = 1, ORDERED_AT_FIRST
        while True:
            ahead = self._positions(step, stride, ordered)
            places = self.places(ahead.ravel())
            first = 0
            while first < len(ahead):
                some = ahead[first : first + at_once]
                at = slice(first * ahead[0].size, first * ahead[0].size + some.size)
                rows = self._read(*(part[at] for part in places))
                yield [list(micro_batches) for micro_batches in rows.reshape(*some.shape, *rows.shape[1:])]
                at_once = max(1, min(2 * len(some), READ_AT_ONCE * len(some) // max(1, rows.nbytes)))
                first += len(some)
            step += len(ahead) * stride
            ordered = min(2 * ordered, ORDERED_AT_ONCE)

    def _positions(self, step: int, stride: int, samples: int) -> Ints:
        """Of every ``stride``-th step from ``step`` on, until there are ``samples`` or the global batch changes:
        [steps, accumulation, micro_batch]."""
        now = self._batch.at(step)
        places = rank_places(now.accumulation, self._batch.data_parallel, self._batch.micro_batch, self._rank)
        steps = -(-samples // places.size)
        change = next((stage.first_step for stage in self._batch.stages if stage.first_step > step), None)
        if change is not None:
            steps = min(steps, -(-(change - step) // stride))
        firsts = now.first_sample + np.arange(steps, dtype=np.int64) * (stride * now.size)
        return firsts[:, None, None] + places

    def _read(self, which: Ints, epochs: Ints, numbers: Ints) -> Array:
        one = self._samples[0]
        if self._mixture is None:
            return one.read(epochs, numbers)
        buffers: list[Any] = [b""] * len(which)
        for source in np.unique(which).tolist():
            at = np.flatnonzero(which == source)
            for row, buffer in zip(
                at.tolist(), self._samples[source].buffers(epochs[at], numbers[at]), strict=True
            ):
                buffers[row] = buffer
        return joined(buffers, one.stored, one.shape)
