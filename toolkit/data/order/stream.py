"""The sample stream of one data rank; the global batch of a step is the same under any layout.

A stream is stateless. Step -> positions in the run's order -> (source, index in it) -> (epoch, number) ->
samples. So it starts at any step at the same cost, and a checkpoint needs only the step, a fingerprint of
the data, and the positions that rollbacks have skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.order.mixture import MIXTURE_VERSIONS, Mixture, mixture_digest
from toolkit.data.order.permutation import ORDER_VERSION, SampleOrder, derive_key, root_key
from toolkit.data.order.prefetch import Prefetch
from toolkit.data.order.samples import SampleSource, stack_buffers
from toolkit.data.order.skipped import SkippedSamples
from toolkit.errors import CheckpointError, Problem
from toolkit.plan.types import BatchPlan

FORK = "or start a new run from that state: run.fork=PATH"
# The key of an entry, and what to do; {key} and {saved} are replaced by the entry's.
Remedy = tuple[str, str]


def compare_fingerprints(
    current: Mapping[str, object],
    saved: Mapping[str, object],
    remedies: Mapping[str, Remedy],
    *,
    default: Remedy | None = None,
    details: Mapping[str, str] | None = None,
) -> None:
    """Check that every entry is the same in ``current`` and ``saved``.

    Args:
        remedies: by the first part of an entry's name.
        default: the remedy of all other entries; None: the other entries are not compared.
        details: text to append to the error of an entry, by its name.

    Raises:
        CheckpointError: names everything that differs.
    """
    problems = []
    for name in sorted(current.keys() | saved.keys()):
        remedy = remedies.get(name.partition(" ")[0], default)
        if remedy is None or saved.get(name) == current.get(name):
            continue
        detail = (details or {}).get(name, "")
        seen = f"{name}={current.get(name)}, the checkpoint has {name}={saved.get(name)}{detail}"
        key, text = (part.format(key=name, saved=saved.get(name)) for part in remedy)
        problems.append(
            Problem(key, seen, "a run continues on the samples and in the order with which it began", text)
        )
    if problems:
        raise CheckpointError(*problems)


Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

# Steps are ordered, read and delivered in chunks: a permutation is a hundred numpy calls, whatever its size.
ORDER_CHUNK_SAMPLES = 4096  # samples
# Samples at first, doubled each time: with many ranks, a rank's samples are spread over many blocks.
FIRST_ORDER_CHUNK_SAMPLES = 64
READ_CHUNK_BYTES = 1 << 21  # bytes for which numpy's calls per source are paid once
CHUNKS_AHEAD = 3  # of at least one step

# Entry of a fingerprint -> the key that determines it, and what to do if it differs.
_REMEDIES = {
    "order": ("data.order", f"use the version of the toolkit that wrote the checkpoint, {FORK}"),
    "data": ("data.path", f"point data.path to the data with which the run began, {FORK}"),
    "tokenizer": ("data.path", f"point data.path to the data with which the run began, {FORK}"),
    "seed": ("data.shuffle_seed", f"write data.shuffle_seed={{saved}}, {FORK}"),
    "sequence_length": ("train.sequence_length", f"write train.sequence_length={{saved}}, {FORK}"),
    "mixture": ("data.sources", f"write the sources, weights and phases with which the run began, {FORK}"),
}
_DEFAULT_REMEDY = ("data.{key}", f"restore what the run began with, {FORK}")


def rank_positions(batch: BatchPlan, step: int, data_rank: int) -> Ints:
    """Return the samples of one data rank in optimizer step ``step``: int64 [accumulation, micro_batch].

    Micro-batch ``m`` of rank ``r`` begins at sample ``(m * data_parallel + r) * micro_batch`` of the global
    batch. Ordered by micro-batch and then by rank, samples have the same order under any layout.
    """
    stage = batch.at(step)
    return stage.first_sample + rank_batch_indices(
        stage.accumulation, batch.data_parallel, batch.micro_batch, data_rank
    )


@lru_cache(maxsize=64)
def rank_batch_indices(accumulation: int, data_parallel: int, micro_batch: int, data_rank: int) -> Ints:
    """Return one data rank's indices in a global batch: int64 [accumulation, micro_batch], read-only."""
    firsts = (np.arange(accumulation, dtype=np.int64) * data_parallel + data_rank) * micro_batch
    indices = firsts[:, None] + np.arange(micro_batch)
    indices.flags.writeable = False
    return indices


def source_seed(seed: int, name: str | None) -> int:
    """Return the seed of one source of a mixture; ``name`` is None for a single source."""
    return (
        seed
        if name is None
        else int(derive_key(root_key(seed), xxhash.xxh3_64_intdigest(name.encode()) >> 1)[0])
    )


class Stream:
    """The endless samples of one data rank.

    Worked example: ``BatchPlan(micro_batch=2, global_batch=8, data_parallel=2)``. In step 0 rank 0 reads
    samples ``[0, 1]`` and ``[4, 5]``, rank 1 reads ``[2, 3]`` and ``[6, 7]``.
    """

    prefetchable = True

    def __init__(
        self,
        sources: Mapping[str, SampleSource],
        mixture: Mixture | None,
        *,
        seed: int,
        batch: BatchPlan,
        data_rank: int,
    ) -> None:
        """
        Args:
            sources: by name, in the order of the mixture's weights. Their samples have the same shape.
            mixture: None for a single source.
            seed: of the order. A source of a mixture uses ``source_seed``.
        """
        assert 0 <= data_rank < batch.data_parallel, f"rank {data_rank} of {batch.data_parallel}"
        assert len(sources) == (1 if mixture is None else mixture.sources), f"{len(sources)} sources"
        self.skipped = SkippedSamples()
        self._sources = dict(sources)
        self._mixture = mixture
        self._seed = seed
        self._batch = batch
        self._rank = data_rank
        self._samples = list(sources.values())
        names = [None] if mixture is None else list(sources)
        self._orders = [
            SampleOrder(samples.count, block_samples=samples.block, seed=source_seed(seed, name))
            for name, samples in zip(names, self._samples, strict=True)
        ]
        self._dtype = self._samples[0].dtype
        self._last_range = -1  # the run of positions of the last call, see _locate_cached
        self._cached_range: tuple[int, tuple[Ints, Ints, Ints]] | None = None
        self._open: weakref.WeakSet[Prefetch[list[Array]]] = weakref.WeakSet()

    def steps(self, first_step: int, stride: int = 1) -> Prefetch[list[Array]]:
        """Iterate over steps: lists of this rank's micro-batches [micro_batch, ...].

        The steps are ``first_step`` and every ``stride``-th after it. Prefetching begins with the first
        ``next``, which also raises its errors. Closing the iterator or the stream ends it.
        """
        dtype = self._dtype  # not self: the thread would keep it alive

        def widened(step: list[Array]) -> list[Array]:
            return [rows.astype(dtype, copy=False) for rows in step]

        steps = Prefetch(self._chunks(first_step, stride), CHUNKS_AHEAD, name="data-stream", finish=widened)
        self._open.add(steps)
        return steps

    def samples(self, positions: Ints) -> Array:
        """Return the samples at ``positions`` [n] of the run's order: [n, ...]."""
        return self._read(*self._locate_cached(positions)).astype(self._dtype, copy=False)

    def locate(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Locate the samples at ``positions`` [n]: source, epoch and sample number, [n] each."""
        if self._mixture is None:
            return (np.zeros_like(positions), *self._orders[0](positions))
        sources, indices = self._mixture(positions)
        epochs, numbers = np.empty_like(indices), np.empty_like(indices)
        for source, order in enumerate(self._orders):
            rows = np.flatnonzero(sources == source)
            if rows.size:
                epochs[rows], numbers[rows] = order(indices[rows])
        return sources, epochs, numbers

    def _locate_cached(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return ``locate(positions)``, faster for callers that need a few positions at a time.

        A hundred numpy calls for 8 samples cost more than reading them. All but shuffling samplers use rising
        positions, so a run of ORDER_CHUNK_SAMPLES positions is computed and cached when it is used twice in a
        row.
        """
        first = int(positions.min()) // ORDER_CHUNK_SAMPLES if positions.size else 0
        if not positions.size or int(positions.max()) // ORDER_CHUNK_SAMPLES != first:
            return self.locate(positions)
        repeated, self._last_range = self._last_range == first, first
        if self._cached_range is None or self._cached_range[0] != first:
            if not repeated:
                return self.locate(positions)
            self._cached_range = (
                first,
                self.locate(
                    np.arange(first * ORDER_CHUNK_SAMPLES, (first + 1) * ORDER_CHUNK_SAMPLES, dtype=np.int64)
                ),
            )
        sources, epochs, numbers = self._cached_range[1]
        rows = positions - first * ORDER_CHUNK_SAMPLES
        return sources[rows], epochs[rows], numbers[rows]

    def first_sample(self, step: int) -> int:
        """Return the number of samples before ``step``, over all ranks."""
        return self._batch.at(step).first_sample

    def consumed(self, step: int) -> dict[str, tuple[int, float]]:
        """Return the samples and epochs that the first ``step`` steps use of each source."""
        number, mixture = self.first_sample(step), self._mixture
        counts = [number] if mixture is None else self.skipped.counts(number, mixture.counts)
        return {
            name: (count, count / samples.count)
            for (name, samples), count in zip(self._sources.items(), counts, strict=True)
        }

    def fingerprint(self) -> dict[str, str | int]:
        """Return what determines every later sample apart from the step: plain JSON types, O(sources)."""
        entries: dict[str, str | int] = {"order": ORDER_VERSION, "seed": self._seed}
        if self._mixture is None:
            return entries | self._samples[0].fingerprint()
        for name, samples in self._sources.items():
            for key, value in samples.fingerprint().items():
                entries[f"data of {name}" if key == "data" else key] = value
        return entries | {"mixture": f"{self._mixture.version} {mixture_digest(self._mixture)}"}

    def check_fingerprint(self, saved: Mapping[str, object]) -> None:
        """Compare with the saved stream, and continue in the mixture version under which that stream began.

        Raises:
            CheckpointError: names every other difference.
        """
        version = str(saved.get("mixture", "")).partition(" ")[0]
        if self._mixture is not None and version in MIXTURE_VERSIONS:
            self._mixture = self._mixture.with_version(version)
            self._cached_range = None
        compare_fingerprints(self.fingerprint(), saved, _REMEDIES, default=_DEFAULT_REMEDY)

    def state(self, step: int) -> dict[str, Any]:
        """Return the skipped positions. Apart from them the step determines the samples."""
        return self.skipped.to_state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.skipped = SkippedSamples.from_state(state)

    def fork(self, fingerprint: Mapping[str, object], state: Mapping[str, Any]) -> None:
        """Skip what a run skipped that read the same samples in the same order."""
        if fingerprint == self.fingerprint():
            self.restore(state)

    def close(self) -> None:
        for steps in list(self._open):
            steps.close()

    def _chunks(self, first_step: int, stride: int) -> Iterator[list[list[Array]]]:
        """Yield chunks of steps: single steps at first, for a quick start, then up to READ_CHUNK_BYTES."""
        step = first_step
        chunk_steps, ordered_samples = 1, FIRST_ORDER_CHUNK_SAMPLES
        while True:
            ahead = self._positions(step, stride, ordered_samples)
            located = self.locate(ahead.ravel())
            first = 0
            while first < len(ahead):
                chunk = ahead[first : first + chunk_steps]
                in_chunk = slice(first * ahead[0].size, first * ahead[0].size + chunk.size)
                rows = self._read(*(part[in_chunk] for part in located))
                yield [list(micro_batches) for micro_batches in rows.reshape(*chunk.shape, *rows.shape[1:])]
                chunk_steps = max(
                    1, min(2 * len(chunk), READ_CHUNK_BYTES * len(chunk) // max(1, rows.nbytes))
                )
                first += len(chunk)
            step += len(ahead) * stride
            ordered_samples = min(2 * ordered_samples, ORDER_CHUNK_SAMPLES)

    def _positions(self, step: int, stride: int, samples: int) -> Ints:
        """Return positions of every ``stride``-th step from ``step`` on: [steps, accumulation, micro_batch].

        There are enough steps for ``samples``, or as many as precede a change of the global batch.
        """
        stage = self._batch.at(step)
        indices = rank_batch_indices(
            stage.accumulation, self._batch.data_parallel, self._batch.micro_batch, self._rank
        )
        steps = -(-samples // indices.size)
        change = next((later.first_step for later in self._batch.stages if later.first_step > step), None)
        if change is not None:
            steps = min(steps, -(-(change - step) // stride))
        firsts = stage.first_sample + np.arange(steps, dtype=np.int64) * (stride * stage.size)
        return self.skipped.positions(firsts[:, None, None] + indices)

    def _read(self, sources: Ints, epochs: Ints, numbers: Ints) -> Array:
        first_source = self._samples[0]
        if self._mixture is None:
            return first_source.read(epochs, numbers)
        buffers: list[Any] = [b""] * len(sources)
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            for row, buffer in zip(
                rows.tolist(), self._samples[source].buffers(epochs[rows], numbers[rows]), strict=True
            ):
                buffers[row] = buffer
        return stack_buffers(buffers, first_source.stored_dtype, first_source.shape)
