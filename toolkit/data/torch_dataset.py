"""PyTorch datasets over a stream, for a training loop of your own; docs/data.md shows a complete one.

    loader = DataLoader(StepDataset(stream, steps=1000), batch_size=None, num_workers=2)   # iterable-style
    loader = DataLoader(SampleDataset(stream, count), batch_size=8)        # map-style, unshuffled

Worker processes are forked and share the mapped files. Streams read with threads, so text needs no workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from toolkit.data.order.stream import Stream
from toolkit.errors import CheckpointError, Problem

Array = npt.NDArray[Any]


class SampleDataset(Dataset[Array]):
    """The first ``count`` samples of the run's order over all ranks: sample ``i`` is at position ``i``.

    Samples are already shuffled and mixed, so use a sequential sampler.
    """

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Array:
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Array]:
        """Return a whole batch at once; PyTorch calls this method if a dataset has it."""
        indices = np.array(positions, dtype=np.int64)
        if indices.size and not (-self._count <= indices.min() and indices.max() < self._count):
            raise IndexError(f"positions {indices.min()} .. {indices.max()} of {self._count} samples")
        return list(self._stream.samples(np.where(indices < 0, indices + self._count, indices)))


class StepDataset(IterableDataset[Array]):
    """One item per step: this rank's micro-batches as one array [accumulation, micro_batch, ...].

    Each of ``n`` workers produces every ``n``-th step, and PyTorch restores their order. The state is the
    next step (in a worker: the next step of that worker, as ``torchdata.stateful_dataloader`` stores it). It
    fits any number of ranks and any micro-batch size. Because workers read ahead, the object in the main
    process does not know which steps were used: call ``state_at(step)`` there, which fits any number of
    workers too.
    """

    def __init__(self, stream: Stream, steps: int, first_step: int = 0) -> None:
        self._stream, self._end = stream, steps
        self._next = first_step
        self._resumed = False

    def __iter__(self) -> Iterator[Array]:
        worker = get_worker_info()
        # A state saved in a worker is that worker's own step; any other state is the first step of all
        # workers.
        number, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if not self._resumed:
            self._next += number
        self._resumed = False
        return self._items(self._next, stride)

    def _items(self, first: int, stride: int) -> Iterator[Array]:
        steps = self._stream.steps(first, stride)
        try:
            for step in range(first, self._end, stride):
                item = np.stack(next(steps))
                self._next = step + stride
                yield item
        finally:
            steps.close()

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps: plain JSON types, below 1 KB for a dozen sources."""
        return {
            "step": step,
            "samples": self._stream.first_sample(step),
            "fingerprint": self._stream.fingerprint(),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self._next)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises CheckpointError if it is of other data, another order or another
        global batch.
        """
        self._stream.check_fingerprint(state["fingerprint"])
        step, samples = state["step"], self._stream.first_sample(state["step"])
        if samples != state["samples"]:
            raise CheckpointError(
                Problem(
                    "train.global_batch",
                    f"step {step} begins at sample {samples}, in the saved state at {state['samples']}",
                    "a run continues with the global batch with which it began",
                    "restore the global batch and its ramp",
                )
            )
        self._next, self._resumed = step, get_worker_info() is not None
