"""The stream of a map-style dataset of the user's own code, and its evaluation batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from toolkit.data.custom.reader import Key, SampleReader
from toolkit.data.custom.samples import Samples, pad_samples
from toolkit.data.order.permutation import ORDER_VERSION, SampleOrder
from toolkit.data.order.skipped import SkippedSamples
from toolkit.data.order.stream import (
    FORK,
    ORDER_CHUNK_SAMPLES,
    Remedy,
    compare_fingerprints,
    rank_batch_indices,
    rank_positions,
)
from toolkit.plan.types import BatchPlan

_REMEDIES: dict[str, Remedy] = {
    "order": ("data.order", f"use the version of the toolkit that wrote the checkpoint, {FORK}"),
    "seed": ("data.shuffle_seed", f"write data.shuffle_seed={{saved}}, {FORK}"),
    "length": ("data.target", f"give the dataset the {{saved}} samples with which the run began, {FORK}"),
}
DEFAULT_REMEDY: Remedy = ("data.target", f"restore the dataset with which the run began, {FORK}")


class MapStream:
    """Like :class:`toolkit.data.order.stream.Stream`: the order is a function of the position, each epoch has
    another order, and the global batch of a step is the same for any number of ranks. A micro-batch is a
    list of samples.

    Args:
        identity: what identifies the samples, in plain JSON types.
    """

    prefetchable = False  # reading calls the user's code, which may draw random numbers

    def __init__(
        self,
        reader: SampleReader,
        length: int,
        identity: Mapping[str, str | int],
        *,
        seed: int,
        batch: BatchPlan,
        data_rank: int,
    ) -> None:
        self._reader, self._length, self._identity = reader, length, dict(identity)
        self._seed, self._batch, self._rank = seed, batch, data_rank
        self._order = SampleOrder(length, block_samples=1, seed=seed)
        self.skipped = SkippedSamples()

    def steps(self, first_step: int) -> Iterator[list[Samples]]:
        batches = self._reader.batches(self._keys(first_step))
        step = first_step
        while True:
            accumulation = self._batch.at(step).accumulation
            yield [Samples(samples) for samples in islice(batches, accumulation)]
            step += 1

    def _keys(self, first_step: int) -> Iterator[list[Key]]:
        """Yield the keys of each micro-batch. The order of many samples costs little more than of one."""
        step = first_step
        while True:
            size = rank_positions(self._batch, step, self._rank).size
            steps = range(step, step + max(1, ORDER_CHUNK_SAMPLES // size))
            positions = self.skipped.positions(
                np.concatenate([rank_positions(self._batch, each, self._rank) for each in steps])
            )
            _, numbers = self._order(positions.ravel())
            for micro_batch, row in zip(positions, numbers.reshape(positions.shape), strict=True):
                yield list(zip(micro_batch.tolist(), row.tolist(), strict=True))
            step = steps.stop

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        count = self._batch.at(step).first_sample
        return {"train": (count, count / self._length)}

    def fingerprint(self) -> dict[str, str | int]:
        return {"order": ORDER_VERSION, "seed": self._seed, **self._identity}

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        compare_fingerprints(self.fingerprint(), saved, _REMEDIES, default=DEFAULT_REMEDY)

    def state(self, step: int) -> dict[str, Any]:
        """Return the skipped positions. Apart from them the step determines the samples."""
        return self.skipped.to_state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.skipped = SkippedSamples.from_state(state)

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Skip what a run skipped that read the same dataset in the same order."""
        if fingerprint == self.fingerprint():
            self.restore(state)

    def close(self) -> None:
        self._reader.close()


def map_eval_batches(
    reader: SampleReader, length: int, batches: int, batch: BatchPlan, data_rank: int
) -> Iterator[list[Samples]]:
    """Yield global batches of the first samples in the dataset's own order, as this rank's micro-batches.

    All ranks have the same number of full micro-batches; see :class:`Samples`.
    """
    count = min(batches * batch.global_batch, length)
    indices = rank_batch_indices(batch.accumulation, batch.data_parallel, batch.micro_batch, data_rank)
    for first in range(0, count, batch.global_batch):
        step = []
        for numbers in (first + indices).tolist():
            real = [number for number in numbers if number < count]
            # Training uses positions from 0 on.
            samples = reader.read([(-1 - number, number) for number in real or [count - 1]])
            step.append(pad_samples(samples[: len(real)], batch.micro_batch, samples[-1]))
        yield step
